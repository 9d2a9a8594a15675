//! What the process has once: the context of all its groups.

use std::sync::{Arc, Mutex, PoisonError};

use tensorwire::{Context, Result};

static CONTEXT: Mutex<Option<Arc<Context>>> = Mutex::new(None);

/// The context of this process. A forked child that makes groups of its own gets one of its own; its parent's is left
/// alone there, because its threads did not come along.
pub(crate) fn ours() -> Result<Arc<Context>> {
    let mut slot = CONTEXT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = slot.as_ref().filter(|context| context.is_ours()) {
        return Ok(context.clone());
    }
    let context = Context::from_env()?;
    if let Some(parents) = slot.replace(context.clone()) {
        std::mem::forget(parents);
    }
    Ok(context)
}

/// The same, unless there is none yet.
pub(crate) fn ours_if_any() -> Option<Arc<Context>> {
    let slot = CONTEXT.lock().unwrap_or_else(PoisonError::into_inner);
    slot.as_ref().filter(|context| context.is_ours()).cloned()
}

//! A way for tests to stop, delay or kill a process at a named step. Not in ordinary builds.

use std::sync::{Arc, RwLock};

type Hook = Arc<dyn Fn(&'static str) + Send + Sync>;

/// Steps of one part of the library, and what is called at each of them.
#[derive(Default)]
pub struct Steps(RwLock<Option<Hook>>);

impl Steps {
    /// Steps at which nothing is called.
    pub const fn new() -> Self {
        Self(RwLock::new(None))
    }

    /// Calls `hook` at every step of this process from now on, on the thread that is there.
    pub fn set(&self, hook: impl Fn(&'static str) + Send + Sync + 'static) {
        if let Ok(mut slot) = self.0.write() {
            *slot = Some(Arc::new(hook));
        }
    }

    /// This process is at a step.
    pub fn at(&self, step: &'static str) {
        let hook = self.0.read().ok().and_then(|slot| slot.clone());
        if let Some(hook) = hook {
            hook(step);
        }
    }
}

impl std::fmt::Debug for Steps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Steps")
    }
}

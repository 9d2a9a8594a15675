//! Memory with a name, which stays as long as the context.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, PoisonError};

use tensorwire_device::{DeviceId, Span};

use super::Context;
use crate::error::{Error, Result};

/// By name and device.
pub(super) type Named = Mutex<HashMap<(String, DeviceId), Span>>;

impl Context {
    /// The memory of this name on a device, from its pool: the same each time, and it never goes away. At first it holds whatever
    /// is in it. Another number of bytes is refused. Two users of one name have the same memory, and nothing orders them.
    pub fn named(&self, name: &str, device: &DeviceId, bytes: usize) -> Result<Span> {
        self.birth().check("the context")?;
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        match named.entry((name.to_owned(), device.clone())) {
            Entry::Occupied(known) if known.get().len() == bytes => Ok(known.get().clone()),
            Entry::Occupied(known) => Err(Error::misuse(format!(
                "symmetric memory {name:?} on {device} has {} bytes, and {bytes} were asked for",
                known.get().len()
            ))),
            Entry::Vacant(place) => {
                let region = self.pool(device)?.alloc(bytes)?;
                Ok(place.insert(Span::new(region, 0..bytes)?).clone())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_name_has_one_memory() {
        let context = Context::new(Config::default()).unwrap();
        let first = context.named("one", &DeviceId::Host, 100).unwrap();
        first.write(0, &[7; 100]).unwrap();
        drop(first);
        let again = context.named("one", &DeviceId::Host, 100).unwrap();
        assert_eq!(again.to_vec().unwrap(), [7; 100]);
        let other = context.named("other", &DeviceId::Host, 100).unwrap();
        assert!(!other.touches(&again));
        let refused = context.named("one", &DeviceId::Host, 101).unwrap_err().to_string();
        assert!(refused.contains("\"one\"") && refused.contains("100 bytes, and 101"), "{refused}");
    }
}

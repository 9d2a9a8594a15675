//! What kind of store an object is, as far as torch shows it.

use pyo3::prelude::*;

/// More prefixes than anybody nests.
const DEEPEST: usize = 100;

/// What lies under the prefixes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Bottom {
    /// A client of a TCP server; `queues` if it has them.
    Tcp {
        host: String,
        port: u16,
        queues: bool,
    },
    File,
    Hash,
    /// A store of the user.
    Other,
}

/// A store as errors name it, and what is known of it.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    name: String,
    prefixes: usize,
    bottom: Bottom,
}

impl Shape {
    /// Looks at an object; asks it nothing that could take long.
    pub(super) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut below = object.clone();
        let mut prefixes = 0;
        while prefixes < DEEPEST && is_torch(&below, "PrefixStore")? {
            below = below.getattr("underlying_store")?;
            prefixes += 1;
        }
        // Exactly torch's classes: what a subclass does with keys and values only its methods know.
        let bottom = if is_torch(&below, "TCPStore")? {
            let queues = below.getattr("libuvBackend").and_then(|libuv| libuv.is_truthy()).unwrap_or(true);
            Bottom::Tcp {
                host: below.getattr("host")?.extract()?,
                port: below.getattr("port")?.extract()?,
                queues,
            }
        } else if is_torch(&below, "FileStore")? {
            Bottom::File
        } else if is_torch(&below, "HashStore")? {
            Bottom::Hash
        } else {
            Bottom::Other
        };
        let class = below.get_type().name()?;
        let name = match &bottom {
            // What torch shows of a Python object that it was handed and that nobody has kept.
            _ if is_torch(&below, "Store")? => {
                "a store whose Python object is gone (keep a reference to it)".into()
            }
            Bottom::Tcp { host, port, .. } => format!("the TCPStore of torch at {host}:{port}"),
            Bottom::Other => format!("the store of class {class}"),
            _ => format!("the {class} of torch"),
        };
        let name = match prefixes {
            0 => name,
            1 => format!("{name} (under a prefix)"),
            _ => format!("{name} (under {prefixes} prefixes)"),
        };
        Ok(Self { name, prefixes, bottom })
    }

    /// "the FileStore of torch (under 2 prefixes)".
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// How many prefixes there are above the bottom.
    pub(super) fn prefixes(&self) -> usize {
        self.prefixes
    }

    pub(super) fn bottom(&self) -> &Bottom {
        &self.bottom
    }
}

/// Whether the object's class is torch's of that name. torch itself is not imported for this.
fn is_torch(object: &Bound<'_, PyAny>, name: &str) -> PyResult<bool> {
    let class = object.get_type();
    let module = class.module()?.to_string();
    Ok(class.name()? == name && (module == "torch" || module.starts_with("torch.")))
}

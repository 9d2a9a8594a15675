//! The device whose queues and kernels are measured.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tensorwire::device::{Device, cuda};
use tensorwire::{Context, DeviceId, Result};

/// The host, or a GPU by its number in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::bench) enum BenchDevice {
    #[default]
    Host,
    Gpu(usize),
}

impl BenchDevice {
    /// Whether it is here.
    pub(in crate::bench) fn check(self) -> Result<()> {
        match self {
            Self::Host => Ok(()),
            Self::Gpu(ordinal) => Ok(cuda::facts(ordinal).map(drop)?),
        }
    }

    /// How many waits its streams were given in this process, and how many the calling threads did instead.
    pub(super) fn waits(self) -> Result<Option<(u64, u64)>> {
        match self {
            Self::Host => Ok(None),
            Self::Gpu(ordinal) => {
                let usage = cuda::Gpu::open(ordinal)?.usage();
                Ok(Some((usage.stream_waits, usage.caller_waits)))
            }
        }
    }

    pub(super) fn open(self, context: &Context) -> Result<Arc<dyn Device>> {
        match self {
            Self::Host => context.device(&DeviceId::Host),
            Self::Gpu(ordinal) => context.device(&DeviceId::Gpu(cuda::facts(ordinal)?.uuid)),
        }
    }
}

impl fmt::Display for BenchDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Gpu(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for BenchDevice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            None if text == "cuda" => Ok(Self::Gpu(0)),
            Some(("cuda", ordinal)) => {
                ordinal.parse().map(Self::Gpu).map_err(|_| format!("no number: {ordinal}"))
            }
            _ => Err("a device is host, cuda, or cuda:N".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (text, place) in
            [("host", BenchDevice::Host), ("cuda", BenchDevice::Gpu(0)), ("cuda:3", BenchDevice::Gpu(3))]
        {
            assert_eq!(text.parse(), Ok(place));
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "host:1", "cuda:-1"] {
            assert!(text.parse::<BenchDevice>().is_err(), "{text}");
        }
    }
}

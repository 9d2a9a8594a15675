//! The device that is measured.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tensorwire::device::gpu::{Answers, Gpu};
use tensorwire::device::{Device, cuda};
use tensorwire::{Context, DeviceId, Error, Result};

/// The host, or GPUs of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum BenchDevice {
    #[default]
    Host,
    /// All of them: ranks take them in turn. Where one is wanted, it is the first.
    Gpus,
    /// One by its number, which all ranks share.
    Gpu(usize),
}

impl BenchDevice {
    /// As JSON lines call it.
    pub(super) fn kind(self) -> &'static str {
        if self == Self::Host { "host" } else { "cuda" }
    }

    pub(super) fn is_gpu(self) -> bool {
        self != Self::Host
    }

    fn ordinal(self) -> Option<usize> {
        match self {
            Self::Host => None,
            Self::Gpus => Some(0),
            Self::Gpu(ordinal) => Some(ordinal),
        }
    }

    /// The GPUs that ranks take in turn: none on the host, and otherwise at least one.
    pub(super) fn gpus(self, answers: &Answers) -> Result<Vec<Gpu>> {
        if self == Self::Host {
            return Ok(Vec::new());
        }
        let all = answers.gpus()?;
        let taken = match self {
            Self::Gpu(ordinal) => all.get(ordinal..=ordinal).unwrap_or_default(),
            _ => all,
        };
        if taken.is_empty() {
            return Err(Error::device(format!(
                "there is no GPU {self}: this process sees {} (CUDA_VISIBLE_DEVICES)",
                all.len()
            )));
        }
        Ok(taken.to_vec())
    }

    /// Whether it is here.
    pub(super) fn check(self) -> Result<()> {
        match self.ordinal() {
            None => Ok(()),
            Some(ordinal) => Ok(cuda::facts(ordinal).map(drop)?),
        }
    }

    /// How many waits its streams were given in this process, and how many the calling threads did instead.
    pub(super) fn waits(self) -> Result<Option<(u64, u64)>> {
        match self.ordinal() {
            None => Ok(None),
            Some(ordinal) => {
                let usage = cuda::Gpu::open(ordinal)?.usage();
                Ok(Some((usage.stream_waits, usage.caller_waits)))
            }
        }
    }

    pub(super) fn open(self, context: &Context) -> Result<Arc<dyn Device>> {
        match self.ordinal() {
            None => context.device(&DeviceId::Host),
            Some(ordinal) => context.device(&DeviceId::Gpu(cuda::facts(ordinal)?.uuid)),
        }
    }
}

impl fmt::Display for BenchDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Gpus => f.pad("cuda"),
            Self::Gpu(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for BenchDevice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            None if text == "cuda" => Ok(Self::Gpus),
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
            [("host", BenchDevice::Host), ("cuda", BenchDevice::Gpus), ("cuda:3", BenchDevice::Gpu(3))]
        {
            assert_eq!(text.parse(), Ok(place));
            assert_eq!(place.to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "host:1", "cuda:-1"] {
            assert!(text.parse::<BenchDevice>().is_err(), "{text}");
        }
    }
}

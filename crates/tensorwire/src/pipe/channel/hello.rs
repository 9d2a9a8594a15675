//! What one end can do, as pure data: the other one hears it when the two connect.

use tensorwire_device::DeviceId;

use super::Channel;
use crate::error::Result;
use crate::pipe::desk;
use crate::wire::{Reader, Writer, bad};

/// What one end can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::pipe) struct Hello {
    /// The channels that it has, as bits.
    pub(super) channels: u32,
    /// The GPUs that it has. Nothing if it may have some and has not asked which: to ask is to start the driver, and not done before there
    /// is a tensor for them.
    pub(super) gpus: Option<Vec<[u8; 16]>>,
    /// A random name of its process. Nothing if it does not say.
    pub(super) process: Option<[u8; 16]>,
}

const NO_GPU: u8 = 0;
const MAY_HAVE: u8 = 1;
const THESE: u8 = 2;

impl Hello {
    pub(in crate::pipe) fn new(channels: &[Channel], gpus: Option<Vec<DeviceId>>) -> Self {
        let uuid = |gpu: &DeviceId| match gpu {
            DeviceId::Gpu(uuid) => Some(*uuid),
            _ => None,
        };
        let gpus: Option<Vec<_>> = gpus.and_then(|gpus| gpus.iter().map(uuid).collect());
        let gpus = gpus.filter(|gpus| gpus.len() <= Self::MOST);
        let channels = channels.iter().fold(0, |bits, channel| bits | channel.bit());
        Self { channels, gpus, process: desk::process() }
    }

    /// Bytes that it travels in: room for what later releases add.
    pub(in crate::pipe) const PADDED: usize = 1024;
    /// The most GPUs that it names.
    const MOST: usize = 32;

    pub(in crate::pipe) fn padded(&self) -> [u8; Self::PADDED] {
        let mut padded = [0; Self::PADDED];
        self.to_bytes().into_iter().zip(&mut padded).for_each(|(byte, to)| *to = byte);
        padded
    }

    fn to_bytes(&self) -> Vec<u8> {
        let out = Writer::new().u32(self.channels);
        let out = match self.gpus.as_deref() {
            None => out.u8(MAY_HAVE),
            Some([]) => out.u8(NO_GPU),
            Some(gpus) => {
                let out = out.u8(THESE).u32(gpus.len() as u32);
                gpus.iter().fold(out, |out, uuid| out.fixed(uuid))
            }
        };
        out.fixed(&self.process.unwrap_or_default()).finish()
    }

    /// What a later release adds behind it is passed over; channels that are not known here are not chosen.
    pub(in crate::pipe) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new(bytes);
        let channels = from.u32()?;
        let gpus = match from.u8()? {
            NO_GPU => Some(Vec::new()),
            MAY_HAVE => None,
            THESE => match from.count(16)? {
                count @ 1..=Self::MOST => Some((0..count).map(|_| from.array()).collect::<Result<_>>()?),
                _ => return Err(bad("more GPUs than an end names")),
            },
            _ => return Err(bad("a hello that no pipe of ours sends")),
        };
        // An end of an earlier release does not say it: what it travels in is filled up with zeros.
        let process = from.array().ok().filter(|process| *process != [0; 16]);
        Ok(Self { channels, gpus, process })
    }

    /// Without a channel: for memory that it cannot carry.
    pub(in crate::pipe) fn without(&self, channel: Channel) -> Self {
        Self { channels: self.channels & !channel.bit(), ..self.clone() }
    }

    /// Whether it may have a GPU.
    pub(in crate::pipe) fn has_gpu(&self) -> bool {
        self.gpus.as_ref().is_none_or(|gpus| !gpus.is_empty())
    }

    /// Whether the two are ends in one process.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        self.process.is_some() && self.process == other.process
    }

    /// Whether it may have this one.
    pub(super) fn may_open(&self, gpu: Option<[u8; 16]>) -> bool {
        let known = self.gpus.as_ref().zip(gpu);
        known.is_none_or(|(gpus, gpu)| gpus.contains(&gpu))
    }

    pub(super) fn has(&self, channel: Channel) -> bool {
        self.channels & channel.bit() != 0
    }
}

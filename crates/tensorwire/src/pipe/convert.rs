//! What a pipe does with memory of each kind of device: one table. A new kind of device is a new row.

use tensorwire_device::{DeviceId, Mark, Span};

use super::channel::Kind;
use super::lanes::Lanes;
use crate::context::Context;
use crate::error::Result;

/// From here on new memory of the host comes from the context's pool.
const POOLED: usize = 64 << 10;

/// A row.
pub(super) struct Converter {
    kind: Kind,
    /// Behind which marks memory that is sent is ready, where that is not now.
    ready: fn(&Span, &mut Lanes) -> Result<Vec<Mark>>,
    /// New memory for what is received. The last word says whether queues of GPUs copy from or to it.
    allocate: fn(&Context, &DeviceId, usize, bool) -> Result<Span>,
}

static TABLE: [Converter; 2] = [
    Converter {
        kind: Kind::Host,
        // The caller has it ready.
        ready: |_, _| Ok(Vec::new()),
        // What GPUs copy from or to is of a pool, which they reach.
        allocate: |context, host, len, for_gpus| match len < POOLED && !for_gpus {
            true => Ok(Span::whole(tensorwire_device::host::private(len)?)),
            false => pooled(context, host, len),
        },
    },
    Converter {
        kind: Kind::Gpu,
        ready: |span, lanes| match lanes.is_behind(&span.device()) {
            true => Ok(vec![lanes.of(&span.device())?.mark()?]),
            false => Ok(Vec::new()),
        },
        // It may be written at once: behind what the reader's queue does, which is where copies to it are put.
        allocate: |context, gpu, len, _| pooled(context, gpu, len),
    },
];

fn pooled(context: &Context, device: &DeviceId, len: usize) -> Result<Span> {
    Ok(Span::whole(context.pool(device)?.alloc(len)?))
}

/// The row of a device.
pub(super) fn of(device: &DeviceId) -> &'static Converter {
    let kind = Kind::of(device);
    TABLE.iter().find(|row| row.kind == kind).unwrap_or(&TABLE[0])
}

impl Converter {
    pub(super) fn ready(&self, span: &Span, lanes: &mut Lanes) -> Result<Vec<Mark>> {
        (self.ready)(span, lanes)
    }

    pub(super) fn allocate(
        &self,
        context: &Context,
        device: &DeviceId,
        len: usize,
        for_gpus: bool,
    ) -> Result<Span> {
        Ok((self.allocate)(context, device, len, for_gpus)?.slice(0..len)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_row() {
        for kind in Kind::ALL {
            assert_eq!(TABLE.iter().filter(|row| row.kind == kind).count(), 1, "{}", kind.name());
        }
    }
}

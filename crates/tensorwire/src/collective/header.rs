//! What a rank came for, in 24 bytes beside its flag. So the other ranks see at once whether they came for the
//! same.

use std::fmt;

use tensorwire_device::{Dtype, ReduceOp};

use crate::shm::kind::{Kind, Path};

/// Bytes of a header.
pub(crate) const HEADER: usize = 24;

/// The fields that must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Header {
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    /// Nothing where no bytes have a type: a barrier.
    pub(crate) dtype: Option<Dtype>,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) path: Option<Path>,
    /// As a place on this host.
    pub(crate) root: u32,
    /// Elements: of the tensor, of each part, or of all parts together.
    pub(crate) count: u64,
    /// What else must agree: sizes of parts, number of tensors, a factor.
    pub(crate) rest: u32,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&self.number.to_le_bytes());
        bytes[4] = self.kind.code();
        bytes[5] = self.dtype.map_or(0, dtype_code);
        bytes[6] = self.op.map_or(0, op_code);
        bytes[7] = self.path.map_or(0, Path::code);
        bytes[8..12].copy_from_slice(&self.root.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.count.to_le_bytes());
        bytes[20..].copy_from_slice(&self.rest.to_le_bytes());
        bytes
    }

    /// Reads what another rank wrote; nothing if it makes no sense.
    pub(crate) fn from_bytes(bytes: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        Some(Self {
            number: word(0)?,
            kind: Kind::from_code(bytes[4])?,
            dtype: bytes[5].checked_sub(1).and_then(|index| Dtype::ALL.get(usize::from(index))).copied(),
            op: bytes[6].checked_sub(1).and_then(|index| ReduceOp::ALL.get(usize::from(index))).copied(),
            path: Path::from_code(bytes[7]),
            root: word(8)?,
            count: u64::from(word(12)?) | u64::from(word(16)?) << 32,
            rest: word(20)?,
        })
    }
}

/// "all_reduce of 1024 float32 (SUM)"
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(dtype) = self.dtype {
            write!(f, " of {} {dtype}", self.count)?;
        }
        if let Some(op) = self.op {
            write!(f, " ({op})")?;
        }
        match self.kind {
            Kind::Broadcast | Kind::Scatter => write!(f, " from rank {}", self.root)?,
            Kind::Reduce | Kind::Gather => write!(f, " to rank {}", self.root)?,
            _ => {}
        }
        match self.path {
            Some(path) => write!(f, " through {path}"),
            None => Ok(()),
        }
    }
}

/// The code of a type in shared memory; never 0.
pub(crate) fn dtype_code(dtype: Dtype) -> u8 {
    Dtype::ALL.iter().position(|&other| other == dtype).map_or(0, |index| index as u8 + 1)
}

/// The code of a reduction in shared memory; never 0.
pub(crate) fn op_code(op: ReduceOp) -> u8 {
    let same = |other: &ReduceOp| std::mem::discriminant(other) == std::mem::discriminant(&op);
    ReduceOp::ALL.iter().position(same).map_or(0, |index| index as u8 + 1)
}

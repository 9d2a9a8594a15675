//! What a rank came for, in 24 bytes beside its flag. So the other ranks see at once whether they came for the
//! same.

use std::fmt;

use tensorwire_device::flag::LINE;
use tensorwire_device::{Dtype, ReduceOp};

use crate::shm::control::{Control, Desk};
use crate::shm::kind::{Kind, Path};

/// Bytes of a header.
pub(crate) const HEADER: usize = 24;
/// Where it begins in a progress line, behind the counter.
const AT: usize = 8;

/// Beside the path, in its byte.
const QUEUED: u8 = 1 << 7;

/// The fields that must be equal on all ranks, but for `queued` ([`Header::differ_in_place`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Header {
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    /// Nothing where no bytes have a type: a barrier.
    pub(crate) dtype: Option<Dtype>,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) path: Option<Path>,
    /// Whether the tensors live on a GPU, whose queues do the steps.
    pub(crate) queued: bool,
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
        bytes[7] = self.path.map_or(0, Path::code) | if self.queued { QUEUED } else { 0 };
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
            path: Path::from_code(bytes[7] & !QUEUED),
            queued: bytes[7] & QUEUED != 0,
            root: word(8)?,
            count: u64::from(word(12)?) | u64::from(word(16)?) << 32,
            rest: word(20)?,
        })
    }

    /// Whether two ranks came for the same, but have their tensors on other kinds of devices: one on a GPU, the other on the host.
    /// All-reduces of sparse tensors must agree in that, too.
    pub(crate) fn differ_in_place(mut one: [u8; HEADER], mut other: [u8; HEADER]) -> bool {
        let differ = (one[7] ^ other[7]) & QUEUED != 0;
        (one[7], other[7]) = (one[7] & !QUEUED, other[7] & !QUEUED);
        differ && one == other && one[4] != Kind::Keys.code()
    }

    /// The same in the operation of another number.
    pub(crate) fn numbered(self, number: u32) -> Self {
        Self { number, ..self }
    }

    /// "1024 float32"
    pub(crate) fn size(&self) -> String {
        match self.dtype {
            Some(dtype) => format!("{} {dtype}", self.count),
            None => format!("{} elements", self.count),
        }
    }

    /// "from rank 3", or "to rank 3"
    pub(crate) fn root(&self) -> String {
        let way = if matches!(self.kind, Kind::Reduce | Kind::Gather) { "to" } else { "from" };
        format!("{way} rank {}", self.root)
    }

    /// Where the tensors live.
    pub(crate) fn place(&self) -> &'static str {
        if self.queued { "on a GPU" } else { "in host memory" }
    }

    /// What else must agree. Most of that is known only as a number in which all of it was mixed, so the words tell
    /// no more than that the ranks which are named first have one thing, and others have another.
    pub(crate) fn rest(&self, first: bool) -> String {
        match (self.kind, self.op) {
            (Kind::AllReduce, Some(op)) if !matches!(op, ReduceOp::PremulSum(_)) => match self.rest {
                1 => "1 tensor".into(),
                tensors => format!("{tensors} tensors"),
            },
            (Kind::Keys, _) if first => "one shape".into(),
            (Kind::Keys, _) => "another shape".into(),
            (_, Some(ReduceOp::PremulSum(_))) if first => "one factor".into(),
            (_, Some(ReduceOp::PremulSum(_))) => "another factor".into(),
            _ if first => "some sizes of parts".into(),
            _ => "other sizes of parts".into(),
        }
    }
}

/// "all_reduce of 1024 float32 (SUM)"
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if self.dtype.is_some() {
            write!(f, " of {}", self.size())?;
        }
        if let Some(op) = self.op {
            write!(f, " ({op})")?;
        }
        if self.kind.is_rooted() {
            write!(f, " {}", self.root())?;
        }
        if self.queued {
            write!(f, " {}", self.place())?;
        }
        match self.path {
            Some(path) => write!(f, " through {path}"),
            None => Ok(()),
        }
    }
}

impl Control {
    /// Where the rank at a place has its progress line for an operation.
    pub(crate) fn progress_at(&self, place: usize, number: u32) -> usize {
        self.map().desk(place) + Desk::PROGRESS + (number as usize % Desk::STEPS) * LINE
    }

    /// Where the header in that line is.
    pub(crate) fn header_at(&self, place: usize, number: u32) -> usize {
        self.progress_at(place, number) + AT
    }

    /// What the rank at a place came for in an operation, as long as its line says so.
    pub(crate) fn header(&self, place: usize, number: u32) -> Option<Header> {
        let mut bytes = [0; HEADER];
        self.region().read(self.header_at(place, number), &mut bytes).ok()?;
        Header::from_bytes(&bytes).filter(|header| header.number == number)
    }
}

/// The code of a type in shared memory; never 0.
fn dtype_code(dtype: Dtype) -> u8 {
    Dtype::ALL.iter().position(|&other| other == dtype).map_or(0, |index| index as u8 + 1)
}

/// The code of a reduction in shared memory; never 0.
fn op_code(op: ReduceOp) -> u8 {
    let same = |other: &ReduceOp| std::mem::discriminant(other) == std::mem::discriminant(&op);
    ReduceOp::ALL.iter().position(same).map_or(0, |index| index as u8 + 1)
}

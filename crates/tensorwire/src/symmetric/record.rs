//! What a rank tells the others of the memory that it brings.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | the version of this table |
//! | 4 | 0 for memory of the host, 1 for memory of a GPU |
//! | 8..24 | the UUID of the GPU |
//! | 24..32 | bytes of the memory |
//! | 32..48 | where the memory is: the number of its allocation, and where in it |
//! | 48..64 | the same of the pad |
//! | 64..80 | the same of the signals |
//! | 80..96 | the same of the words of meetings |
//! | 96..104 | how many blocks of its kernels run at the same time |

use tensorwire_device::DeviceId;

/// Bytes of a record.
pub(super) const LEN: usize = 104;

/// Raised whenever the table changes.
const VERSION: u32 = 2;

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) device: DeviceId,
    pub(super) len: u64,
    pub(super) buffer: Whereabouts,
    pub(super) pad: Whereabouts,
    pub(super) signals: Whereabouts,
    pub(super) words: Whereabouts,
    pub(super) blocks: u64,
}

/// Where memory of a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whereabouts {
    pub(super) number: u64,
    pub(super) offset: u64,
}

impl Record {
    pub(super) fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
        if let DeviceId::Gpu(uuid) = &self.device {
            bytes[4] = 1;
            bytes[8..24].copy_from_slice(uuid);
        }
        let Self { buffer, pad, signals, words, .. } = self;
        let places = [buffer, pad, signals, words].into_iter().flat_map(|place| [place.number, place.offset]);
        let numbers = std::iter::once(self.len).chain(places).chain([self.blocks]);
        for (place, word) in bytes[24..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The record in bytes of another rank; otherwise what is wrong with them.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let bytes: &[u8; LEN] =
            bytes.try_into().map_err(|_| format!("a record of {} bytes, not {LEN}", bytes.len()))?;
        let version = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if version != VERSION {
            return Err(format!("a record of version {version}, not {VERSION}"));
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[8..24]);
        let device = match bytes[4] {
            0 => DeviceId::Host,
            1 => DeviceId::Gpu(uuid),
            other => return Err(format!("memory of kind {other}")),
        };
        let mut words = bytes[24..].chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let mut next = || words.next().unwrap_or(0);
        let len = next();
        let mut place = || Whereabouts { number: next(), offset: next() };
        let (buffer, pad, signals, words) = (place(), place(), place(), place());
        Ok(Self { device, len, buffer, pad, signals, words, blocks: next() })
    }
}

/// For the fuzzer: any bytes are a record that is written as it was read, or are refused.
#[cfg(any(test, fuzzing))]
pub fn fuzz(bytes: &[u8]) {
    if let Ok(record) = Record::decode(bytes) {
        assert_eq!(Record::decode(&record.encode()).as_ref(), Ok(&record));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place() -> impl Strategy<Value = Whereabouts> {
        (any::<u64>(), any::<u64>()).prop_map(|(number, offset)| Whereabouts { number, offset })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            gpu: Option<[u8; 16]>, len: u64, places in [place(), place(), place(), place()], blocks: u64
        ) {
            let device = gpu.map_or(DeviceId::Host, DeviceId::Gpu);
            let [buffer, pad, signals, words] = places;
            let record = Record { device, len, buffer, pad, signals, words, blocks };
            prop_assert_eq!(Record::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn any_bytes_are_a_record_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..2 * LEN)) {
            fuzz(&bytes);
        }
    }

    #[test]
    fn corpus() {
        crate::store::fuzz::tests::replay("symmetric_record", fuzz);
    }

    #[test]
    fn refusals_say_why() {
        let place = Whereabouts { number: 1, offset: 2 };
        let (buffer, pad, signals, words) = (place, place, place, place);
        let record = Record { device: DeviceId::Host, len: 8, buffer, pad, signals, words, blocks: 1 };
        let with = |at: usize, value: u8| {
            let mut bytes = record.encode();
            bytes[at] = value;
            Record::decode(&bytes).unwrap_err()
        };
        assert!(with(0, 9).contains("version 9"), "{}", with(0, 9));
        assert!(with(4, 2).contains("kind 2"), "{}", with(4, 2));
        assert!(Record::decode(&[0; 3]).unwrap_err().contains("3 bytes"));
    }
}

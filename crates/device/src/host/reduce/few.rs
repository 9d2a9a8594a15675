//! Room for the pointers of one call.

use std::mem::MaybeUninit;

/// Room for values on the stack, or elsewhere if there are very many: a call that moves a few bytes must not allocate.
pub(in crate::host) struct Few<T> {
    room: [MaybeUninit<T>; ROOM],
    more: Vec<T>,
}

const ROOM: usize = 64;

impl<T: Copy> Few<T> {
    #[inline(always)]
    pub(in crate::host) fn new() -> Self {
        Self { room: [const { MaybeUninit::uninit() }; ROOM], more: Vec::new() }
    }

    /// The values as a slice; there are `most` of them or fewer.
    #[inline(always)]
    pub(in crate::host) fn fill(&mut self, most: usize, values: impl Iterator<Item = T>) -> &[T] {
        if most > ROOM {
            self.more.extend(values);
            return &self.more;
        }
        let mut filled = 0;
        for (place, value) in self.room.iter_mut().zip(values) {
            place.write(value);
            filled += 1;
        }
        // SAFETY: the first `filled` places were just written.
        unsafe { std::slice::from_raw_parts(self.room.as_ptr().cast(), filled) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_there_in_order_however_many() {
        for count in [0, 1, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM] {
            let values: Vec<_> = (0..count).collect();
            assert_eq!(Few::new().fill(count, values.iter().copied()), values);
            let some = values.iter().copied().filter(|value| value % 3 == 1);
            assert!(Few::new().fill(count, some.clone()).iter().copied().eq(some));
        }
    }
}

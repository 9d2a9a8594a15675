//! Merges sorted keys of several ranks.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;

use smallvec::SmallVec;
use tensorwire_device::RowPlan;

use super::with_room_for;
use crate::error::Result;

/// Keys that are not as they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BadKey {
    /// The place in its list.
    pub(super) at: usize,
    pub(super) key: i64,
    pub(super) why: Why,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Outside,
    Repeated,
    Unsorted,
}

impl BadKey {
    /// "key 7 at 3 is there twice"
    pub(super) fn text(self, range: &Range<i64>) -> String {
        let Self { at, key, why } = self;
        match why {
            Why::Outside => {
                format!("key {key} at {at} is not from {} to {}", range.start, range.end.wrapping_sub(1))
            }
            Why::Repeated => format!("key {key} at {at} is there twice; coalesce the tensor first"),
            Why::Unsorted => {
                format!("key {key} at {at} is less than the one before; coalesce the tensor first")
            }
        }
    }
}

/// Refuses keys that do not ascend, or lie outside of a range.
pub(super) fn check(keys: &[i64], range: &Range<i64>) -> std::result::Result<(), BadKey> {
    // The ends of a sorted list say all about the range: one look for each key.
    let good = keys.is_sorted_by(|a, b| a < b)
        && keys.first().is_none_or(|key| range.contains(key))
        && keys.last().is_none_or(|key| range.contains(key));
    if good { Ok(()) } else { Err(find(keys, range)) }
}

/// What is wrong with the first key that is.
#[cold]
fn find(keys: &[i64], range: &Range<i64>) -> BadKey {
    let mut before = None;
    for (at, &key) in keys.iter().enumerate() {
        let why = match before {
            _ if !range.contains(&key) => Why::Outside,
            Some(before) if before == key => Why::Repeated,
            Some(before) if before > key => Why::Unsorted,
            _ => {
                before = Some(key);
                continue;
            }
        };
        return BadKey { at, key, why };
    }
    BadKey { at: 0, key: 0, why: Why::Outside }
}

/// Gives each key of the sorted lists once, in order, and which lists have it where. The lists of one key are in their order.
pub(super) fn merge(lists: &[&[i64]]) -> Result<(Vec<i64>, RowPlan)> {
    let mut plan = RowPlan::new(&lists.iter().map(|list| list.len()).collect::<Vec<_>>())?;
    let mut keys = with_room_for(lists.iter().map(|list| list.len()).sum())?;
    // The next key of each list, and where it is.
    let heads = lists.iter().enumerate();
    let mut heads: BinaryHeap<Reverse<(i64, usize, usize)>> =
        heads.filter_map(|(list, keys)| Some(Reverse((*keys.first()?, list, 0)))).collect();
    let mut same: SmallVec<[(usize, usize); 16]> = SmallVec::new();
    let mut current = None;
    while let Some(mut head) = heads.peek_mut() {
        let Reverse((key, list, at)) = *head;
        if current != Some(key) {
            if let Some(current) = current {
                keys.push(current);
                plan.push(same.drain(..))?;
            }
            current = Some(key);
        }
        same.push((list, at));
        match lists[list].get(at + 1) {
            Some(&next) => *head = Reverse((next, list, at + 1)),
            None => {
                PeekMut::pop(head);
            }
        }
    }
    if let Some(current) = current {
        keys.push(current);
        plan.push(same.drain(..))?;
    }
    Ok((keys, plan))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_wrong_with_keys() {
        let range = 0..10;
        assert_eq!(check(&[], &range), Ok(()));
        assert_eq!(check(&[0, 3, 9], &range), Ok(()));
        for (keys, at, why) in [
            (vec![0, 10], 1, Why::Outside),
            (vec![-1, 2], 0, Why::Outside),
            (vec![3, 3], 1, Why::Repeated),
            (vec![1, 5, 4], 2, Why::Unsorted),
            (vec![5, i64::MAX, 6], 1, Why::Outside),
        ] {
            let bad = check(&keys, &range).unwrap_err();
            assert_eq!((bad.at, bad.key, bad.why), (at, keys[at], why), "{keys:?}");
            assert!(bad.text(&range).contains(&format!("key {} at {at} is", keys[at])));
        }
        assert!(check(&[0], &(0..0)).is_err());
    }

    proptest! {
        #[test]
        fn as_a_dictionary_does(
            lists in prop::collection::vec(prop::collection::btree_set(-50i64..50, 0..40), 0..8),
        ) {
            let lists: Vec<Vec<i64>> = lists.into_iter().map(|keys| keys.into_iter().collect()).collect();
            let mut model: BTreeMap<i64, Vec<(usize, usize)>> = BTreeMap::new();
            for (list, keys) in lists.iter().enumerate() {
                keys.iter().enumerate().for_each(|(at, &key)| model.entry(key).or_default().push((list, at)));
            }
            let slices: Vec<&[i64]> = lists.iter().map(Vec::as_slice).collect();
            let (keys, plan) = merge(&slices).unwrap();
            prop_assert_eq!(&keys, &model.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(plan.len(), keys.len());
            prop_assert_eq!(format!("{plan:?}"), {
                let mut same = RowPlan::new(&lists.iter().map(Vec::len).collect::<Vec<_>>()).unwrap();
                model.values().for_each(|from| same.push(from.iter().copied()).unwrap());
                format!("{same:?}")
            });
        }
    }
}

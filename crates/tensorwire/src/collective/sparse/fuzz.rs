//! What arrives from other ranks, for fuzzing.

use super::{merge, ranges};

/// Any bytes as the numbers of other ranks: nothing may panic, and whatever is merged must be in order.
pub fn fuzz(bytes: &[u8]) {
    let numbers: Vec<i64> =
        bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, i64::from_le_bytes)).collect();
    let Some((&head, rest)) = numbers.split_first() else { return };
    let world = (head as u8 % 8 + 1) as usize;
    let size = head as u64 >> 1;
    let each = rest.len() / world;
    let cards: Vec<(u64, Vec<i64>)> = (0..world)
        .map(|rank| {
            let words = &rest[rank * each..(rank + 1) * each];
            (words.first().map_or(0, |&word| word as u64), words.to_vec())
        })
        .collect();
    let cuts = ranges::cut(&cards, size);
    assert!(cuts.len() + 1 == world && cuts.is_sorted());
    let range = 0..i64::try_from(size).unwrap_or(i64::MAX);
    let lists: Vec<&[i64]> = cards.iter().map(|(_, keys)| keys.as_slice()).collect();
    for list in &lists {
        assert_eq!(ranges::count(list, &cuts).len(), world);
    }
    // What is not in order is refused before; it must do no harm either.
    let Ok((keys, plan)) = merge::merge(&lists) else { return };
    assert_eq!(keys.len(), plan.len());
    if lists.iter().all(|list| merge::check(list, &range).is_ok()) {
        assert!(merge::check(&keys, &range).is_ok());
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn corpus() {
        crate::store::fuzz::tests::replay("sparse_keys", super::fuzz);
    }
}

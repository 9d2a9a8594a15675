//! How keys are cut into one range for each rank, and when a dense tensor is cheaper. All ranks compute the same from the
//! same numbers.

/// How many of its keys a rank shows for each rank of the group, and at most.
pub(in super::super) const SAMPLES: usize = 32;
pub(in super::super) const MOST_SAMPLES: usize = 1024;

/// How many of its keys a rank shows to the others.
pub(super) fn samples(world: usize) -> usize {
    (world * SAMPLES).min(MOST_SAMPLES)
}

/// So many keys of a sorted list, each in the middle of an equal share of it. Of an empty one, zeros.
pub(super) fn sample(keys: &[i64], count: usize) -> impl Iterator<Item = i64> + '_ {
    let middle = move |index: usize| (2 * index as u128 + 1) * keys.len() as u128 / (2 * count as u128);
    (0..count).map(move |index| keys.get(middle(index) as usize).copied().unwrap_or(0))
}

/// The first key of each range but the first, which begins at 0. They never descend.
///
/// Each rank's keys are as many as it says, and its samples stand for equal shares of them. The cuts share all keys of all
/// ranks equally, as far as the samples tell: a range has at most `1 / world + 2 / samples` of them, and one key more of each
/// rank. So many keys close together, or on many ranks, do not land on one rank. Samples that make no sense give cuts that
/// make none, and nothing else.
pub(super) fn cut(ranks: &[(u64, Vec<i64>)], size: u64) -> Vec<i64> {
    let world = ranks.len();
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    let mut all: Vec<(i64, u64)> = ranks
        .iter()
        .filter(|(keys, _)| *keys > 0)
        .flat_map(|(keys, samples)| samples.iter().map(|&sample| (sample.clamp(0, size), *keys)))
        .collect();
    all.sort_unstable();
    let total: u128 = all.iter().map(|&(_, weight)| u128::from(weight)).sum();
    let (mut before, mut next) = (0u128, all.iter().peekable());
    (1..world as u128)
        .map(|index| {
            let share = total * index / world as u128;
            while let Some((_, weight)) = next.peek() {
                // The key in the middle of a share stands for all of it.
                if before + u128::from(*weight) / 2 >= share {
                    break;
                }
                before += u128::from(*weight);
                next.next();
            }
            next.peek().map_or(size, |&&(key, _)| key)
        })
        .collect()
}

/// How many of these sorted keys lie in each range.
pub(super) fn count(keys: &[i64], cuts: &[i64]) -> Vec<usize> {
    let ends = cuts.iter().map(|cut| keys.partition_point(|key| key < cut)).chain([keys.len()]);
    let mut start = 0;
    ends.map(|end| std::mem::replace(&mut start, end).abs_diff(end)).collect()
}

/// Whether a dense all_reduce writes fewer bytes on each rank, for so many keys of all ranks. The result is the same, and so
/// are its bytes.
///
/// By key a rank writes its input into its slot, its range out of the slots, and that range merged. Dense, it fills a tensor,
/// puts its rows there and writes the tensor once in the reduction; one bit for each possible key comes and goes beside it.
pub(super) fn dense_is_cheaper(keys: u64, world: usize, size: u64, row: usize) -> bool {
    let (size, row) = (u128::from(size), row as u128);
    let own = u128::from(keys) / world.max(1) as u128;
    let by_key = own.saturating_mul(3 * (row + 8));
    let dense = (2 * size + own).saturating_mul(row).saturating_add(2 * size.div_ceil(8));
    world > 1 && row > 0 && dense < by_key
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Keys of a Zipf distribution: popular ones are small, and are on all ranks.
    fn zipf(rank: u64, count: usize, size: u64) -> Vec<i64> {
        let mut state = rank.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut keys: Vec<i64> = (0..count)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let uniform = (state >> 11) as f64 / (1u64 << 53) as f64;
                // The inverse of the distribution 1 / k, from 1 to size.
                ((size as f64).powf(uniform) as i64 - 1).clamp(0, size as i64 - 1)
            })
            .collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    fn loads(lists: &[Vec<i64>], size: u64) -> Vec<usize> {
        let world = lists.len();
        let cards: Vec<(u64, Vec<i64>)> =
            lists.iter().map(|keys| (keys.len() as u64, sample(keys, samples(world)).collect())).collect();
        let cuts = cut(&cards, size);
        assert_eq!(cuts.len(), world - 1);
        assert!(cuts.is_sorted(), "{cuts:?}");
        let mut loads = vec![0; world];
        for keys in lists {
            let counts = count(keys, &cuts);
            assert_eq!(counts.iter().sum::<usize>(), keys.len());
            counts.iter().zip(&mut loads).for_each(|(count, load)| *load += count);
        }
        loads
    }

    #[test]
    fn popular_keys_do_not_land_on_one_rank() {
        for world in [2, 3, 8, 64] {
            let size = 10_000_000;
            let lists: Vec<Vec<i64>> = (0..world).map(|rank| zipf(rank + 1, 20_000, size)).collect();
            let all: usize = lists.iter().map(Vec::len).sum();
            let most = *loads(&lists, size).iter().max().unwrap();
            let fair = all as f64 / world as f64;
            assert!((most as f64) < fair * 1.25, "{world} ranks: {most}, fair is {fair}");
            // Equal parts of the index would not do.
            let first = lists.iter().flatten().filter(|&&key| (key as u64) < size / world).count();
            assert!(first as f64 > fair * 1.5, "{world} ranks: {first}, fair is {fair}");
        }
    }

    #[test]
    fn the_cost_is_that_of_the_bytes() {
        // A row of 256 bytes: dense pays when nearly all rows are there. One of 4: a third.
        assert!(
            !dense_is_cheaper(8 * 90_000, 8, 100_000, 256) && dense_is_cheaper(8 * 97_000, 8, 100_000, 256)
        );
        assert!(!dense_is_cheaper(8 * 20_000, 8, 100_000, 4) && dense_is_cheaper(8 * 30_000, 8, 100_000, 4));
        assert!(!dense_is_cheaper(100, 1, 100, 4) && !dense_is_cheaper(800, 8, 100, 0));
        assert!(!dense_is_cheaper(0, 8, 0, 4) && !dense_is_cheaper(u64::MAX, 2, u64::MAX, usize::MAX));
    }

    proptest! {
        #[test]
        fn every_rank_has_its_share(
            lists in prop::collection::vec(prop::collection::btree_set(0i64..5000, 0..400), 1..10),
        ) {
            let lists: Vec<Vec<i64>> = lists.into_iter().map(|keys| keys.into_iter().collect()).collect();
            let (world, all) = (lists.len(), lists.iter().map(Vec::len).sum::<usize>());
            let most = loads(&lists, 5000).into_iter().max().unwrap();
            let bound = all as f64 / world as f64 + 2.0 * all as f64 / samples(world) as f64 + 2.0 * world as f64;
            prop_assert!(most as f64 <= bound, "{} of {}, at most {}", most, all, bound);
        }

        #[test]
        fn nonsense_gives_cuts_in_order(
            cards in prop::collection::vec((any::<u64>(), prop::collection::vec(any::<i64>(), 0..8)), 1..6),
            size in 0..=i64::MAX as u64,
        ) {
            let cuts = cut(&cards, size);
            prop_assert!(cuts.is_sorted() && cuts.iter().all(|&cut| (0..=size as i64).contains(&cut)));
        }
    }
}

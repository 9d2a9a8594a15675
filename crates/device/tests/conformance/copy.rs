//! Copies, plain and strided. Strided ones are held against a plain model: for each index, one element.

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use tensorwire_device::{Caching, Error, Layout, Span};

use super::{Subject, noise};

pub fn copies_between_spans(subject: &Subject) {
    let mut queue = subject.queue();
    let lengths = [0, 1, 7, 64, 4097, 1 << 20];
    let cachings = [Caching::Keep, Caching::Bypass, Caching::Give, Caching::Give];
    for (len, caching) in lengths.into_iter().flat_map(|len| cachings.map(|caching| (len, caching))) {
        let (from, into) = (noise(len + 9, 1), noise(len + 9, 2));
        let (src, dst) = (subject.span(&from), subject.span(&into));
        queue
            .copy(dst.slice(5..5 + len).unwrap().view(), src.slice(3..3 + len).unwrap().view(), caching)
            .unwrap();
        let copied = dst.to_vec().unwrap();
        assert!(copied[..5] == into[..5] && copied[5..5 + len] == from[3..3 + len]);
        assert!(copied[5 + len..] == into[5 + len..] && src.to_vec().unwrap() == from);
    }
}

/// Wherever the bytes lie in their cache lines, and whether a copy is long enough to go past the caches or not.
pub fn copies_past_the_caches_from_and_to_any_place(subject: &Subject) {
    let mut queue = subject.queue();
    let (from, into) = (noise(20_200, 1), noise(20_200, 2));
    let (src, dst) = (subject.span(&from), subject.span(&into));
    let lengths = [1, 63, 100, 4095, 4096, 4097, 4096 + 63, 8191, 20_000];
    for (len, caching) in lengths.into_iter().flat_map(|len| [(len, Caching::Bypass), (len, Caching::Give)]) {
        for (to, of) in
            [(0, 0), (0, 1), (1, 0), (1, 1), (8, 17), (32, 64), (48, 33), (63, 63), (64, 5), (65, 0)]
        {
            let (into_span, from_span) = (dst.slice(to..to + len).unwrap(), src.slice(of..of + len).unwrap());
            queue.copy(into_span.view(), from_span.view(), caching).unwrap();
            let expected = [&into[..to], &from[of..of + len], &into[to + len..]].concat();
            assert!(dst.to_vec().unwrap() == expected, "{len} bytes from {of} to {to}");
            dst.write(0, &into).unwrap();
        }
    }
    assert!(src.to_vec().unwrap() == from);
}

pub fn unequal_or_overlapping_spans_are_refused(subject: &Subject) {
    let mut queue = subject.queue();
    let before = noise(64, 1);
    let all = subject.span(&before);
    let part = |range: std::ops::Range<usize>| all.slice(range).unwrap();
    for (dst, src) in [(0..8, 16..25), (0..9, 16..24), (0..8, 7..15), (7..15, 0..8), (0..8, 0..8)] {
        let error =
            queue.copy(part(dst.clone()).view(), part(src.clone()).view(), Caching::Keep).unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{dst:?} {src:?}: {error:?}");
    }
    let layout = Layout::contiguous(&[8], 1).unwrap();
    assert!(queue.copy_strided((part(0..8).view(), &layout), (part(7..15).view(), &layout)).is_err());
    assert!(all.to_vec().unwrap() == before);
    // Neighbours are apart.
    queue.copy(part(0..8).view(), part(8..16).view(), Caching::Keep).unwrap();
    queue.copy_strided((part(8..16).view(), &layout), (part(16..24).view(), &layout)).unwrap();
}

/// Few and many, of any length, from and to any place: more than a device takes at once, too.
pub fn several_copies_in_one_call(subject: &Subject) {
    let mut queue = subject.queue();
    let lengths = [0, 1, 15, 16, 17, 100, 4096, 70_001];
    for (count, caching) in
        [(0, Caching::Keep), (1, Caching::Keep), (7, Caching::Bypass), (200, Caching::Keep)]
    {
        let parts: Vec<usize> = (0..count).map(|i| lengths[(i * 5 + count) % lengths.len()]).collect();
        let whole = parts.iter().map(|len| len + 20).sum::<usize>() + 20;
        let (from, into) = (noise(whole, 1), noise(whole, 2));
        let (src, dst) = (subject.span(&from), subject.span(&into));
        let (mut expected, mut at) = (into.clone(), 0);
        let mut spans = Vec::new();
        for (i, &len) in parts.iter().enumerate() {
            let (to, of) = (at + i % 17, at + (i * 3) % 19);
            expected[to..to + len].copy_from_slice(&from[of..of + len]);
            spans.push((dst.slice(to..to + len).unwrap(), src.slice(of..of + len).unwrap()));
            at += len + 20;
        }
        let copies: Vec<_> = spans.iter().map(|(dst, src)| (dst.view(), src.view())).collect();
        queue.copy_all(&copies, caching).unwrap();
        assert!(dst.to_vec().unwrap() == expected, "{count} copies");
        assert!(src.to_vec().unwrap() == from);
    }
}

pub fn a_wrong_copy_among_several_is_refused(subject: &Subject) {
    let mut queue = subject.queue();
    let before = noise(256, 1);
    let all = subject.span(&before);
    let part = |range: std::ops::Range<usize>| all.slice(range).unwrap();
    let (to, of) = (part(0..8), part(100..108));
    for (dst, src) in [(10..18, 16..25), (10..18, 12..20)] {
        let (dst, src) = (part(dst), part(src));
        let refused = queue.copy_all(&[(to.view(), of.view()), (dst.view(), src.view())], Caching::Keep);
        assert!(matches!(refused, Err(Error::Misuse(_))), "{refused:?}");
        assert!(all.to_vec().unwrap()[8..] == before[8..], "the right one may be done");
    }
}

pub fn odd_layouts_are_refused(subject: &Subject) {
    let mut queue = subject.queue();
    let (dst, src) = (subject.span(&[0; 64]), subject.span(&[1; 64]));
    let layout = |shape: &[usize], strides: &[isize], item| Layout::new(shape, strides, item).unwrap();
    let plain = layout(&[4], &[1], 4);
    for (to, of) in [
        (layout(&[4], &[1], 2), &plain),       // another element size
        (layout(&[2, 2], &[2, 1], 4), &plain), // another shape
        (layout(&[4], &[0], 4), &plain),       // written four times
        (layout(&[4], &[6], 4), &plain),       // beyond the end
        (layout(&[17], &[1], 4), &layout(&[17], &[0], 4)),
    ] {
        let error = queue.copy_strided((dst.view(), &to), (src.view(), of)).unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{to:?}: {error:?}");
    }
    assert!(queue.copy_strided((dst.view(), &plain), (src.view(), &layout(&[4], &[5], 4))).is_ok()); // exactly to the end
    assert!(
        queue
            .copy_strided((dst.view(), &plain), (src.slice(0..63).unwrap().view(), &layout(&[4], &[5], 4)))
            .is_err()
    );

    for refused in [
        Layout::new(&[2], &[1, 1], 4),
        Layout::new(&[1; 9], &[1; 9], 4),
        Layout::new(&[2], &[1], 3),
        Layout::new(&[2], &[1], 0),
        Layout::new(&[2], &[-1], 4),
        Layout::with_origin(&[2], &[-1], 4, 3),
        Layout::new(&[usize::MAX, 2], &[0, 0], 1),
        Layout::new(&[usize::MAX], &[isize::MAX], 16),
        Layout::new(&[1 << 60, 1 << 60, 1 << 60], &[isize::MAX, isize::MAX, isize::MAX], 16),
        Layout::new(&[2; 8], &[isize::MAX; 8], 16),
        Layout::new(&[2; 8], &[isize::MIN; 8], 16),
        Layout::with_origin(&[2], &[1], 1, usize::MAX),
        Layout::contiguous(&[usize::MAX, 0], 1),
        Layout::contiguous(&[1 << 31, 1 << 31, 4], 1),
    ] {
        assert!(matches!(refused, Err(Error::Misuse(_))), "{refused:?}");
    }
    assert!(Layout::with_origin(&[2], &[-1], 4, 4).is_ok());
    assert_eq!(Layout::contiguous(&[3, 0, 2], 4).unwrap().count(), 0);
}

pub fn strides_of_size_one_may_be_anything(subject: &Subject) {
    let mut queue = subject.queue();
    let src = subject.span(&noise(64, 5));
    for odd in [isize::MAX, isize::MIN, isize::MIN + 1, 0, -1] {
        let dst = subject.span(&[0; 64]);
        let to = Layout::new(&[1, 4, 1, 1], &[odd, 1, odd, 0], 16).unwrap();
        let of = Layout::new(&[1, 4, 1, 1], &[0, 1, odd, odd], 16).unwrap();
        queue.copy_strided((dst.view(), &to), (src.view(), &of)).unwrap();
        assert!(dst.to_vec().unwrap() == noise(64, 5));
        // Without elements, strides mean nothing at all.
        let none = Layout::new(&[0, 5], &[odd, odd], 8).unwrap();
        queue.copy_strided((dst.view(), &none), (src.view(), &none)).unwrap();
    }
}

/// A layout and the bytes around it.
#[derive(Debug, Clone)]
struct Side {
    strides: Vec<isize>,
    /// Bytes before the lowest and after the highest element.
    room: (usize, usize),
    /// Where the span begins in its region.
    offset: usize,
}

#[derive(Debug, Clone)]
struct Case {
    shape: Vec<usize>,
    item: usize,
    into: Side,
    from: Side,
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = prop::collection::vec(
        prop_oneof![6 => 1..5usize, 1 => Just(1), 1 => 0..9usize],
        0..=Layout::MAX_DIMS,
    )
    .prop_filter("small", |shape| shape.iter().product::<usize>() <= 2000);
    let sides = shape.prop_flat_map(|shape| {
        let dims = shape.len();
        let order = Just((0..dims).collect::<Vec<_>>()).prop_shuffle();
        // Mostly without gaps, so that runs are met.
        let gaps =
            prop::collection::vec((prop_oneof![4 => Just(0isize), 1 => 0..3isize], any::<bool>()), dims);
        let free = prop::collection::vec(-6..7isize, dims);
        (Just(shape), order, gaps.clone(), gaps, free, 0..3u8)
    });
    let rooms = (0..20usize, 0..20usize, 0..9usize);
    (sides, select(vec![1usize, 2, 4, 8, 16]), rooms.clone(), rooms).prop_map(|(sides, item, room, other)| {
        let (shape, order, gaps, other_gaps, free, kind) = sides;
        let natural: Vec<usize> = (0..shape.len()).rev().collect();
        let into = apart(&shape, if kind == 0 { &natural } else { &order }, &gaps);
        let from = match kind {
            0 => into.clone(),
            1 => apart(&shape, &natural, &other_gaps),
            _ => free, // may overlap and be zero: it is only read
        };
        let side =
            |strides, room: (usize, usize, usize)| Side { strides, room: (room.0, room.1), offset: room.2 };
        Case { into: side(into, room), from: side(from, other), shape, item }
    })
}

/// Strides by which no two elements are one: each dimension steps over all that are faster.
fn apart(shape: &[usize], fastest_first: &[usize], gaps: &[(isize, bool)]) -> Vec<isize> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1;
    for &dim in fastest_first {
        let (gap, backwards) = gaps[dim];
        step += gap;
        strides[dim] = if backwards { -step } else { step };
        step *= shape[dim].max(1) as isize;
    }
    strides
}

/// Where each element begins in the span, in the order of the indices; the layout; and the span's length.
fn places(shape: &[usize], item: usize, side: &Side) -> (Vec<usize>, Layout, usize) {
    let mut offsets = vec![0isize];
    for (&size, &stride) in shape.iter().zip(&side.strides) {
        offsets = offsets
            .iter()
            .flat_map(|&start| (0..size as isize).map(move |index| start + index * stride * item as isize))
            .collect();
    }
    let low = offsets.iter().copied().min().unwrap_or(0);
    let origin = side.room.0 as isize - low;
    let places: Vec<usize> = offsets.iter().map(|&offset| (offset + origin) as usize).collect();
    let end = places.iter().map(|&place| place + item).max().unwrap_or(origin as usize);
    let layout = Layout::with_origin(shape, &side.strides, item, origin as usize).unwrap();
    (places, layout, end + side.room.1)
}

pub fn strided_copies_follow_the_model(subject: &Subject) {
    let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
    runner
        .run(&cases(), |case| {
            let mut queue = subject.queue();
            let (to_places, to, to_len) = places(&case.shape, case.item, &case.into);
            let (of_places, of, of_len) = places(&case.shape, case.item, &case.from);
            let (dst_start, src_start) = (case.into.offset, case.from.offset);
            let (mut model, source) = (noise(dst_start + to_len + 8, 1), noise(src_start + of_len + 8, 2));
            let (dst, src) = (subject.filled(&model), subject.filled(&source));
            let into = Span::new(dst.clone(), dst_start..dst_start + to_len).unwrap();
            let from = Span::new(src, src_start..src_start + of_len).unwrap();
            prop_assert_eq!(to.count(), to_places.len());
            queue.copy_strided((into.view(), &to), (from.view(), &of)).unwrap();

            for (place, origin) in to_places.iter().zip(&of_places) {
                let (place, origin) = (place + dst_start, origin + src_start);
                model[place..place + case.item].copy_from_slice(&source[origin..origin + case.item]);
            }
            // The whole region, so that a stray write is seen.
            prop_assert_eq!(Span::whole(dst).to_vec().unwrap(), model);

            // Contiguous is what the copy of a plain span would do.
            if to.is_contiguous() && to.count() > 0 {
                prop_assert!(to_places.iter().enumerate().all(|(index, &place)| place == index * case.item));
            }
            // A span that is one byte short at its end is refused, if anything lies there.
            if case.into.room.1 == 0 && !to_places.is_empty() {
                let short = into.slice(0..to_len - 1).unwrap();
                prop_assert!(queue.copy_strided((short.view(), &to), (from.view(), &of)).is_err());
            }
            Ok(())
        })
        .unwrap();
}

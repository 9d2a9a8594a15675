//! Reductions by rows, against those of whole tensors; and elements that change no other one.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use tensorwire_device::host::Host;
use tensorwire_device::{Caching, Device, Dtype, ReduceOp, RowPlan, Span, View};

fn span(bytes: &[u8]) -> Span {
    let span = Span::whole(Host.alloc(bytes.len().max(1)).unwrap()).slice(0..bytes.len()).unwrap();
    span.write(0, bytes).unwrap();
    span
}

fn pairs() -> impl Strategy<Value = (ReduceOp, Dtype)> {
    let all = Dtype::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (op, dtype)));
    prop::sample::select(all.filter(|(op, dtype)| op.check(*dtype).is_ok()).collect::<Vec<_>>())
}

/// What a row of the result is made of: input and row, both of any size.
type Sources = Vec<(usize, usize)>;

proptest! {
    #[test]
    fn each_row_is_a_reduction(
        (op, dtype) in pairs(),
        rows in prop::collection::vec(1usize..6, 1..5),
        wanted in prop::collection::vec(prop::collection::vec((0usize..8, 0usize..8), 1..6), 0..12),
        width in prop::sample::select(vec![0usize, 1, 2, 5, 16, 65]),
        seed in any::<u64>(),
    ) {
        let row = width * dtype.size();
        let mut state = seed | 1;
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Small numbers of all types; bools are 0 or 1.
            let byte = (state >> 56) as u8;
            if dtype == Dtype::Bool { byte & 1 } else { byte & 0x3f }
        };
        let inputs: Vec<Span> =
            rows.iter().map(|rows| span(&(0..rows * row).map(|_| byte()).collect::<Vec<_>>())).collect();
        let wanted: Vec<Sources> = wanted
            .into_iter()
            .map(|from| {
                from.into_iter().map(|(i, r)| (i % rows.len(), r % rows[i % rows.len()])).collect()
            })
            .collect();
        let mut plan = RowPlan::new(&rows).unwrap();
        wanted.iter().for_each(|from| plan.push(from.iter().copied()).unwrap());
        let mut queue = Host.queue().unwrap();
        let output = span(&vec![0xaa; wanted.len() * row]);
        let views: Vec<View<'_>> = inputs.iter().map(Span::view).collect();
        // An average is divided by the number of inputs that make a row where that is asked for.
        for from in &wanted {
            let of = from.len();
            let mut one = RowPlan::new(&rows).unwrap();
            one.push(from.iter().copied()).unwrap();
            let (result, expected) = (span(&vec![0; row]), span(&vec![1; row]));
            queue.reduce_rows(op, dtype, of, &views, &one, result.view()).unwrap();
            let parts: Vec<Span> =
                from.iter().map(|&(i, r)| inputs[i].slice(r * row..(r + 1) * row).unwrap()).collect();
            let parts: Vec<View<'_>> = parts.iter().map(Span::view).collect();
            queue.reduce(op, dtype, &parts, &[expected.view()], Caching::Keep).unwrap();
            prop_assert_eq!(result.to_vec().unwrap(), expected.to_vec().unwrap(), "{} of {}", op, dtype);
        }
        queue.reduce_rows(op, dtype, 3, &views, &plan, output.view()).unwrap();
        for (index, from) in wanted.iter().enumerate() {
            let mut one = RowPlan::new(&rows).unwrap();
            one.push(from.iter().copied()).unwrap();
            let result = span(&vec![0; row]);
            queue.reduce_rows(op, dtype, 3, &views, &one, result.view()).unwrap();
            let got = output.slice(index * row..(index + 1) * row).unwrap().to_vec().unwrap();
            prop_assert_eq!(got, result.to_vec().unwrap());
        }
    }
}

/// Every element of small types, and some of large ones: it is there again after a reduction with the element that changes
/// none, before it and behind it.
#[test]
fn elements_that_change_no_other() {
    let mut queue = Host.queue().unwrap();
    for dtype in Dtype::ALL {
        let size = dtype.size();
        let all: Vec<u8> = match size {
            _ if dtype == Dtype::Bool => vec![0, 1],
            1 => (0..=255).collect(),
            2 => (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect(),
            _ => (0..4096u64)
                .flat_map(|index| {
                    let word = index.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left((index % 64) as u32);
                    [word.to_ne_bytes(), word.rotate_left(7).to_ne_bytes()].concat()[..size].to_vec()
                })
                .collect(),
        };
        for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
            let Some(identity) = op.identity(dtype) else {
                let none =
                    matches!(op, ReduceOp::PremulSum(_)) || dtype.is_complex() || dtype == Dtype::F8E8M0Fnu;
                assert!(none, "{op} of {dtype}");
                continue;
            };
            assert_eq!(identity.len(), size);
            let (own, other) = (span(&all), span(&identity.repeat(all.len() / size)));
            for inputs in [[own.view(), other.view()], [other.view(), own.view()]] {
                let result = span(&vec![0; all.len()]);
                // Divided by two and doubled again, an average may have lost a bit.
                let sum = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
                queue.reduce(sum, dtype, &inputs, &[result.view()], Caching::Keep).unwrap();
                let result = result.to_vec().unwrap();
                for (before, after) in all.chunks(size).zip(result.chunks(size)) {
                    assert!(
                        before == after || is_nan(dtype, before),
                        "{op} of {dtype}: {before:?} became {after:?}"
                    );
                }
            }
        }
    }
    assert!(
        ReduceOp::Band.identity(Dtype::F32).is_none() && ReduceOp::Min.identity(Dtype::Complex64).is_none()
    );
}

fn is_nan(dtype: Dtype, element: &[u8]) -> bool {
    let mut word = [0; 16];
    word[..element.len()].copy_from_slice(element);
    let u32s = |at: usize| u32::from_ne_bytes(word[at..at + 4].try_into().unwrap());
    let u64s = |at: usize| u64::from_ne_bytes(word[at..at + 8].try_into().unwrap());
    let u16s = |at: usize| u16::from_ne_bytes(word[at..at + 2].try_into().unwrap());
    let half = |bits: u16| bits & 0x7fff > 0x7c00;
    match dtype {
        Dtype::F16 => half(u16s(0)),
        Dtype::Complex32 => half(u16s(0)) || half(u16s(2)),
        Dtype::Bf16 => u16s(0) & 0x7fff > 0x7f80,
        Dtype::F32 => f32::from_bits(u32s(0)).is_nan(),
        Dtype::F64 => f64::from_bits(u64s(0)).is_nan(),
        Dtype::Complex64 => f32::from_bits(u32s(0)).is_nan() || f32::from_bits(u32s(4)).is_nan(),
        Dtype::Complex128 => f64::from_bits(u64s(0)).is_nan() || f64::from_bits(u64s(8)).is_nan(),
        Dtype::F8E4M3Fn => word[0] & 0x7f == 0x7f,
        Dtype::F8E5M2 => word[0] & 0x7f > 0x7c,
        Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => word[0] == 0x80,
        Dtype::F8E8M0Fnu => word[0] == 0xff,
        _ => false,
    }
}

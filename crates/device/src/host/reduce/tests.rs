use std::cmp::Ordering;
use std::ops::{Add, Mul};

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;

use super::Instructions;
use super::arithmetic::{control, set_control};
use super::element::{Bf16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Element, HALF, Small};
use super::float8::{
    F8E4M3Fn, F8E4M3Fnuz, F8E5M2, F8E5M2Fnuz, F8E8M0Fnu, nearest_power_of_two, power_of_two,
};
use super::isa::{Baseline, Isa};
use crate::device::Caching;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::op::ReduceOp;

/// # Safety
/// As of [`Instructions::reduce`].
unsafe fn reduce(
    op: ReduceOp,
    dtype: Dtype,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
) -> Result<()> {
    // SAFETY: the caller's promises are the same.
    unsafe { Instructions::best().reduce(op, dtype, inputs, outputs, count, Caching::Keep) }
}

#[test]
fn pairs_without_meaning_are_refused_with_both_names() {
    for (op, dtype) in [
        (ReduceOp::Avg, Dtype::I32),
        (ReduceOp::PremulSum(2.0), Dtype::Bool),
        (ReduceOp::Bxor, Dtype::F32),
        (ReduceOp::Max, Dtype::Complex64),
        (ReduceOp::Min, Dtype::Complex32),
        (ReduceOp::Bor, Dtype::F8E8M0Fnu),
    ] {
        let (input, mut output) = ([1u8; 16], [7u8; 16]);
        // SAFETY: one element fits.
        let refused = unsafe { reduce(op, dtype, &[input.as_ptr()], &[output.as_mut_ptr()], 1) };
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(op.name()) && text.contains(dtype.name()), "{text}");
        assert_eq!(output, [7; 16]);
    }
}

#[test]
fn no_inputs_are_refused_and_no_outputs_are_fine() {
    let mut byte = 0u8;
    // SAFETY: one byte is there.
    unsafe {
        assert!(reduce(ReduceOp::Sum, Dtype::U8, &[], &[&mut byte], 1).is_err());
        assert!(reduce(ReduceOp::Sum, Dtype::U8, &[&byte], &[], 1).is_ok());
        assert!(reduce(ReduceOp::Sum, Dtype::U8, &[&byte], &[&mut byte], 0).is_ok());
    }
}

/// Every number, every middle between two neighbours, and what is right beside them.
#[test]
fn small_floats_are_rounded_to_the_nearest() {
    for (name, small, special) in [
        ("f16", HALF, 0x7c00),
        ("e4m3fn", E4M3FN, 0x7f),
        ("e5m2", E5M2, 0x7c),
        ("e4m3fnuz", E4M3FNUZ, 0x80),
        ("e5m2fnuz", E5M2FNUZ, 0x80),
    ] {
        let model = Model::new(name, |code| small.widen(code), special);
        for x in model.points() {
            // Without an infinity, what is too large is the largest number.
            let largest = model.nearest(448f32.copysign(x));
            let too_large = name == "e4m3fn" && x.abs() > 448.0;
            let expected = match if too_large { largest } else { model.nearest(x) } {
                // Of zeros and of what is too large there is only one.
                code if name.ends_with("fnuz") && code & 0x7f == 0 => {
                    if x.abs() < 1.0 {
                        0
                    } else {
                        0x80
                    }
                }
                code => code,
            };
            assert_eq!(small.narrow(x), expected, "{name} of {x:e}");
        }
        for nan in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0x7fff_ffff)] {
            assert!(small.widen(small.narrow(nan)).is_nan());
        }
    }
}

#[test]
fn small_floats_are_widened_by_their_definition() {
    let definition = |code: u32, exponent: u32, mantissa: u32, fnuz: bool| {
        let (e, m) = ((code >> mantissa) as i32, f64::from(code & ((1 << mantissa) - 1)));
        let (bias, unit) = ((1 << (exponent - 1)) - i32::from(!fnuz), 2f64.powi(-(mantissa as i32)));
        if e == 0 { m * unit * 2f64.powi(1 - bias) } else { (1.0 + m * unit) * 2f64.powi(e - bias) }
    };
    for (small, exponent, mantissa, special) in [
        (HALF, 5, 10, 0x7c00),
        (E4M3FN, 4, 3, 0x7f),
        (E5M2, 5, 2, 0x7cu32),
        (E4M3FNUZ, 4, 3, 0x80),
        (E5M2FNUZ, 5, 2, 0x80),
    ] {
        let sign = 1 << (exponent + mantissa);
        let fnuz = special == sign;
        for code in 0..special {
            assert_eq!(f64::from(small.widen(code)), definition(code, exponent, mantissa, fnuz));
            if fnuz && code == 0 {
                assert!(small.widen(sign).is_nan());
            } else {
                assert_eq!(small.widen(code | sign).to_bits(), (-small.widen(code)).to_bits());
            }
        }
        for code in special..sign {
            let infinite = code == special && mantissa != 3;
            assert_eq!(small.widen(code).is_infinite(), infinite);
            assert_eq!(small.widen(code).is_nan(), !infinite);
        }
    }
}

#[test]
fn processors_convert_f16_as_we_do() {
    #[cfg(target_arch = "x86_64")]
    {
        let model = Model::new("f16", |code| HALF.widen(code), 0x7c00);
        let points = model.points();
        for chunk in points.chunks_exact(16) {
            let wide: &[f32; 16] = chunk.try_into().unwrap();
            // SAFETY: the instructions are asked for, and the arrays are long enough.
            unsafe {
                let ours = Baseline::narrow_f16(wide);
                if super::has_avx2() {
                    assert_eq!(super::isa::Avx2::narrow_f16(wide), ours);
                    assert_eq!(
                        super::isa::Avx2::widen_f16::<16>(ours.as_ptr()),
                        Baseline::widen_f16(ours.as_ptr())
                    );
                }
                if super::has_avx512() {
                    assert_eq!(super::isa::Avx512::narrow_f16(wide), ours);
                    assert_eq!(
                        super::isa::Avx512::widen_f16::<16>(ours.as_ptr()),
                        Baseline::widen_f16(ours.as_ptr())
                    );
                }
            }
        }
    }
}

#[test]
fn bf16_is_rounded_to_the_nearest() {
    let mut bits: Vec<u32> = (0..0x1_0000u32).step_by(7).map(|upper| upper << 16).collect();
    bits.extend([0x7f7f_0000, 0x7f80_0000, 0xff80_0000, 0, 0x8000_0000, 0x0001_0000]);
    for base in bits.into_iter().filter(|&bits| !f32::from_bits(bits).is_nan()) {
        let exponent = base & 0x7f80_0000;
        let lower: &[u32] =
            if exponent == 0x7f80_0000 { &[0] } else { &[0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] };
        for &lower in lower {
            let x = f32::from_bits(base | lower);
            narrowed::<Bf16, u16>(x, bf16::from_f32(x).to_bits());
        }
    }
}

#[test]
fn every_instruction_set_rounds_to_8_bits_as_we_do() {
    let points = |small: &Small, special| Model::new("", |code| small.widen(code), special).points();
    for x in points(&E4M3FN, 0x7f) {
        narrowed::<F8E4M3Fn, u8>(x, E4M3FN.narrow(x) as u8);
    }
    for x in points(&E5M2, 0x7c) {
        narrowed::<F8E5M2, u8>(x, E5M2.narrow(x) as u8);
    }
    for x in points(&E4M3FNUZ, 0x80) {
        narrowed::<F8E4M3Fnuz, u8>(x, E4M3FNUZ.narrow(x) as u8);
    }
    for x in points(&E5M2FNUZ, 0x80) {
        narrowed::<F8E5M2Fnuz, u8>(x, E5M2FNUZ.narrow(x) as u8);
    }
    for code in 0..=0xfe {
        let power = power_of_two(code);
        for x in [power, power.next_up(), power.next_down(), 1.5 * power, (1.5 * power).next_down(), -power] {
            narrowed::<F8E8M0Fnu, u8>(x, nearest_power_of_two(x));
        }
    }
}

#[test]
fn powers_of_two_are_rounded_as_in_torch() {
    for code in 0..=0xfe_u8 {
        assert_eq!(f64::from(power_of_two(code)), 2f64.powi(i32::from(code) - 127));
        assert_eq!(nearest_power_of_two(power_of_two(code)), code);
        if code > 0 {
            let middle = 1.5 * f64::from(power_of_two(code));
            assert_eq!(nearest_power_of_two((middle as f32).next_down()), code);
            // From the last one that is NaN.
            assert_eq!(nearest_power_of_two(middle as f32), code + 1);
        }
    }
    assert!(power_of_two(0xff).is_nan());
    for (x, code) in [(0.0, 0), (-0.0, 0), (1e-45, 0), (power_of_two(0).next_up(), 1)] {
        assert_eq!(nearest_power_of_two(x), code, "{x:e}");
    }
    for x in [f32::MAX, f32::INFINITY, f32::NAN, -f32::NAN, -1.0, -1e-45, f32::NEG_INFINITY] {
        assert_eq!(nearest_power_of_two(x), 0xff, "{x:e}");
    }
}

/// A thread that takes subnormal numbers for zero, as torch.set_flush_denormal makes it, gives the same results, and stays
/// as it was.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_thread_that_flushes_subnormal_numbers_is_no_different() {
    const FLUSH: u32 = 0x8040;
    let reduced = |dtype: Dtype, with: Instructions| {
        let bytes: Vec<u8> = (0..600 * dtype.size())
            .map(|i| if dtype.size() == 1 || i % dtype.size() == 0 { 1 } else { 0 })
            .collect();
        let mut output = vec![0; bytes.len()];
        // SAFETY: all are as long, and apart.
        let done = unsafe {
            let (ins, count) = ([bytes.as_ptr(); 3], bytes.len() / dtype.size());
            with.reduce(ReduceOp::Sum, dtype, &ins, &[output.as_mut_ptr()], count, Caching::Keep)
        };
        done.unwrap();
        output
    };
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_float() || dtype.is_complex()) {
        for with in Instructions::available() {
            let expected = reduced(dtype, with);
            assert!(expected.iter().any(|&byte| byte > 1), "{dtype}");
            let before = control();
            set_control(before | FLUSH);
            let got = reduced(dtype, with);
            let after = control();
            set_control(before);
            assert_eq!(after & FLUSH, FLUSH, "{dtype}, {with}");
            assert_eq!(got, expected, "{dtype}, {with}");
        }
    }
}

#[test]
fn every_sum_of_two_8_bit_floats() {
    let (left, right): (Vec<u8>, Vec<u8>) =
        (0..=u16::MAX).map(|pair| ((pair >> 8) as u8, pair as u8)).unzip();
    for dtype in [Dtype::F8E4M3Fn, Dtype::F8E5M2, Dtype::F8E4M3Fnuz, Dtype::F8E5M2Fnuz, Dtype::F8E8M0Fnu] {
        for with in Instructions::available() {
            let mut sums = vec![0u8; left.len()];
            // SAFETY: all are as long, and apart.
            let done = unsafe {
                let ins = [left.as_ptr(), right.as_ptr()];
                with.reduce(ReduceOp::Sum, dtype, &ins, &[sums.as_mut_ptr()], sums.len(), Caching::Keep)
            };
            done.unwrap();
            for ((a, b), sum) in left.iter().zip(&right).zip(sums) {
                let expected = model(ReduceOp::Sum, dtype, &[&[*a], &[*b]]);
                assert!(same(dtype, &[sum], &expected), "{dtype}, {with}: {a:02x} + {b:02x} is {sum:02x}");
            }
        }
    }
}

/// Checks what becomes of it at every place of a step.
fn narrowed<E, R>(x: f32, expected: R)
where
    E: Element<Raw = R, Wide = f32>,
    R: Copy + PartialEq + std::fmt::Debug,
{
    /// # Safety
    /// The processor has the instructions.
    unsafe fn check<I: Isa, E: Element<Raw = R, Wide = f32>, R: Copy + PartialEq + std::fmt::Debug>(
        x: f32,
        expected: R,
    ) {
        // SAFETY: the caller's promise is the same.
        let (long, short) = unsafe { (E::narrow::<I, 64>(&[x; 64]), E::narrow::<I, 16>(&[x; 16])) };
        assert_eq!((long, short), ([expected; 64], [expected; 16]), "{x:e}");
    }
    // SAFETY: the instructions are asked for.
    unsafe {
        check::<Baseline, E, R>(x, expected);
        #[cfg(target_arch = "x86_64")]
        if super::has_avx2() {
            check::<super::isa::Avx2, E, R>(x, expected);
        }
        #[cfg(target_arch = "x86_64")]
        if super::has_avx512() {
            check::<super::isa::Avx512, E, R>(x, expected);
        }
    }
}

/// The numbers of a small float in order, and the one that would come next.
struct Model(Vec<f64>);

impl Model {
    fn new(name: &str, widen: impl Fn(u32) -> f32, special: u32) -> Self {
        let mut numbers: Vec<_> = (0..special).map(|code| f64::from(widen(code))).collect();
        let last = numbers.len() - 1;
        numbers.push(2.0 * numbers[last] - numbers[last - 1]);
        assert!(numbers.is_sorted(), "{name}");
        Self(numbers)
    }

    fn points(&self) -> Vec<f32> {
        let middles = self.0.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let points = self.0.iter().copied().chain(middles).chain([1e30, 1e-45]).map(|x| x as f32);
        let points = points.flat_map(|x| [x, x.next_up(), x.next_down()]).chain([f32::MAX, f32::INFINITY]);
        points.flat_map(|x| [x, -x]).collect()
    }

    /// The code of the nearest number, by looking at all of them.
    fn nearest(&self, x: f32) -> u32 {
        let special = self.0.len() - 1;
        let bits = if special > 0x100 { 15 } else { 7 };
        let size = f64::from(x.abs());
        let above = self.0.partition_point(|&number| number < size);
        let code = match above {
            0 => 0,
            _ if above > special => special,
            _ => match (size - self.0[above - 1]).total_cmp(&(self.0[above] - size)) {
                std::cmp::Ordering::Less => above - 1,
                std::cmp::Ordering::Equal => above - above % 2,
                std::cmp::Ordering::Greater => above,
            },
        };
        code as u32 | u32::from(x.is_sign_negative()) << bits
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Kernels against one element at a time, for any operation, type, size, alignment and place.
    #[test]
    fn kernels_agree_with_a_scalar_model(
        (op, dtype) in select(pairs()),
        inputs in 1usize..10,
        count in 0usize..1500,
        offset in 0usize..4,
        // Two outputs, which may lie in their cache lines in the same way or not.
        places in (0usize..64, 0usize..64),
        caching in select(vec![Caching::Keep, Caching::Bypass, Caching::Give]),
        seed in any::<u64>(),
        // Bits that are never set: random bytes of 8-bit floats are seldom without a NaN for long.
        clear in select(vec![0u8, 0x20, 0x40]),
    ) {
        let size = dtype.size();
        let mut state = seed | 1;
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        let data: Vec<Vec<u8>> = (0..inputs).map(|_| (0..offset + count * size).map(|_| byte() & !clear).collect()).collect();
        let ins: Vec<_> = data.iter().map(|bytes| bytes[offset..].as_ptr()).collect();
        let at = |input: usize, i: usize| &data[input][offset + i * size..][..size];
        for with in Instructions::available() {
            let mut outputs = [places.0, places.1].map(|place| (place, vec![0xa5u8; place + count * size + 64]));
            let outs = outputs.each_mut().map(|(place, bytes)| bytes[*place..].as_mut_ptr());
            // SAFETY: all have `count` elements and are apart.
            unsafe { with.reduce(op, dtype, &ins, &outs, count, caching) }.unwrap();
            for (place, output) in &outputs {
                let (before, after) = (&output[..*place], &output[place + count * size..]);
                prop_assert!(before.iter().chain(after).all(|&byte| byte == 0xa5), "bytes beside were written");
            }
            for i in 0..count {
                let column: Vec<_> = (0..inputs).map(|input| at(input, i)).collect();
                let expected = model(op, dtype, &column);
                for (place, output) in &outputs {
                    let got = &output[place + i * size..][..size];
                    prop_assert!(same(dtype, got, &expected), "{op} of {dtype}, {with}: {column:02x?} gives \
                        {got:02x?}, should be {expected:02x?}");
                }
            }
        }
    }
}

fn pairs() -> Vec<(ReduceOp, Dtype)> {
    use ReduceOp::*;
    let ops = [Sum, Product, Min, Max, Avg, PremulSum(0.3), PremulSum(-7e4), Band, Bor, Bxor];
    let all = ops.into_iter().flat_map(|op| Dtype::ALL.map(|dtype| (op, dtype)));
    all.filter(|(op, dtype)| op.check(*dtype).is_ok()).collect()
}

/// One element, the slow way.
fn model(op: ReduceOp, dtype: Dtype, column: &[&[u8]]) -> Vec<u8> {
    let integer = |bytes: &[u8]| {
        let mut cell =
            [if dtype.name().starts_with('i') && bytes[bytes.len() - 1] > 127 { 255 } else { 0 }; 16];
        cell[..bytes.len()].copy_from_slice(bytes);
        i128::from_le_bytes(cell)
    };
    match dtype {
        Dtype::Bool => {
            let op = match op {
                ReduceOp::Sum | ReduceOp::Max => ReduceOp::Bor,
                ReduceOp::Product | ReduceOp::Min => ReduceOp::Band,
                op => op,
            };
            vec![fold(column.iter().map(|cell| i128::from(cell[0] != 0)), |a, b| integers(op, a, b)) as u8]
        }
        Dtype::F64 => f64s(op, column, 0).to_le_bytes().to_vec(),
        Dtype::Complex128 if op == ReduceOp::Product => {
            let pairs = column.iter().map(|cell| [f64_at(cell, 0), f64_at(cell, 8)]);
            let [re, im] = fold(pairs, |[a, b], [c, d]| [a * c - b * d, a * d + b * c]);
            [re.to_le_bytes(), im.to_le_bytes()].concat()
        }
        Dtype::Complex128 => [f64s(op, column, 0).to_le_bytes(), f64s(op, column, 8).to_le_bytes()].concat(),
        Dtype::Complex64 if op == ReduceOp::Product => {
            let pairs =
                column.iter().map(|cell| [widen(Dtype::F32, &cell[..4]), widen(Dtype::F32, &cell[4..])]);
            let [re, im] = fold(pairs, |[a, b], [c, d]| [a * c - b * d, a * d + b * c]);
            [re.to_le_bytes(), im.to_le_bytes()].concat()
        }
        Dtype::Complex64 => [0, 4].map(|start| f32s(op, Dtype::F32, column, start, 4)).concat(),
        Dtype::Complex32 if op == ReduceOp::Product => {
            let pairs =
                column.iter().map(|cell| [widen(Dtype::F16, &cell[..2]), widen(Dtype::F16, &cell[2..])]);
            let parts = fold(pairs, |[a, b], [c, d]| [a * c - b * d, a * d + b * c]);
            parts.map(|part| narrow(Dtype::F16, part)).concat()
        }
        Dtype::Complex32 => [0, 2].map(|start| f32s(op, Dtype::F16, column, start, 2)).concat(),
        _ if dtype.is_float() => f32s(op, dtype, column, 0, dtype.size()),
        _ => fold(column.iter().map(|cell| integer(cell)), |a, b| {
            // Wrapped after every step, as the order of integers depends on it.
            integer(&integers(op, a, b).to_le_bytes()[..dtype.size()])
        })
        .to_le_bytes()[..dtype.size()]
            .to_vec(),
    }
}

fn floats<T: Copy + PartialOrd + Add<Output = T> + Mul<Output = T>>(op: ReduceOp, acc: T, x: T, nan: T) -> T {
    match (op, acc.partial_cmp(&x)) {
        (ReduceOp::Product, _) => acc * x,
        (ReduceOp::Min | ReduceOp::Max, None) => nan,
        (ReduceOp::Min, Some(Ordering::Greater)) | (ReduceOp::Max, Some(Ordering::Less)) => x,
        (ReduceOp::Min | ReduceOp::Max, _) => acc,
        _ => acc + x,
    }
}

fn f32s(op: ReduceOp, dtype: Dtype, column: &[&[u8]], start: usize, size: usize) -> Vec<u8> {
    let values = column.iter().map(|cell| widen(dtype, &cell[start..start + size])).map(|x| match op {
        ReduceOp::PremulSum(factor) => widen(dtype, &narrow(dtype, x * factor as f32)),
        _ => x,
    });
    let acc = fold(values, |acc, x| floats(op, acc, x, f32::NAN));
    narrow(dtype, if op == ReduceOp::Avg { acc / column.len() as f32 } else { acc })
}

fn f64s(op: ReduceOp, column: &[&[u8]], start: usize) -> f64 {
    let values = column.iter().map(|cell| f64_at(cell, start)).map(|x| match op {
        ReduceOp::PremulSum(factor) => x * factor,
        _ => x,
    });
    let acc = fold(values, |acc, x| floats(op, acc, x, f64::NAN));
    if op == ReduceOp::Avg { acc / column.len() as f64 } else { acc }
}

fn integers(op: ReduceOp, a: i128, b: i128) -> i128 {
    match op {
        ReduceOp::Sum => a + b,
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Band => a & b,
        ReduceOp::Bor => a | b,
        _ => a ^ b,
    }
}

fn fold<T>(values: impl Iterator<Item = T>, combine: impl Fn(T, T) -> T) -> T {
    values.reduce(combine).unwrap()
}

fn f64_at(cell: &[u8], start: usize) -> f64 {
    f64::from_le_bytes(cell[start..start + 8].try_into().unwrap())
}

fn widen(dtype: Dtype, cell: &[u8]) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_le_bytes([cell[0], cell[1]]).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes([cell[0], cell[1]]).to_f32(),
        Dtype::F8E4M3Fn => E4M3FN.widen(cell[0].into()),
        Dtype::F8E5M2 => f16::from_le_bytes([0, cell[0]]).to_f32(),
        Dtype::F8E4M3Fnuz => E4M3FNUZ.widen(cell[0].into()),
        Dtype::F8E5M2Fnuz => E5M2FNUZ.widen(cell[0].into()),
        Dtype::F8E8M0Fnu => power_of_two(cell[0]),
        _ => f32::from_le_bytes(cell.try_into().unwrap()),
    }
}

fn narrow(dtype: Dtype, x: f32) -> Vec<u8> {
    let small = |small: Small| vec![small.narrow(x) as u8];
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        Dtype::F8E4M3Fn => small(E4M3FN),
        Dtype::F8E5M2 => small(E5M2),
        Dtype::F8E4M3Fnuz => small(E4M3FNUZ),
        Dtype::F8E5M2Fnuz => small(E5M2FNUZ),
        Dtype::F8E8M0Fnu => vec![nearest_power_of_two(x)],
        _ => x.to_le_bytes().to_vec(),
    }
}

/// Bit by bit; any NaN is a NaN.
fn same(dtype: Dtype, got: &[u8], expected: &[u8]) -> bool {
    let part = match dtype {
        Dtype::Complex32 => Dtype::F16,
        Dtype::Complex64 => Dtype::F32,
        Dtype::Complex128 => Dtype::F64,
        dtype => dtype,
    };
    let nan = |cell: &[u8]| match part {
        Dtype::F64 => f64_at(cell, 0).is_nan(),
        part if part.is_float() => widen(part, cell).is_nan(),
        _ => false,
    };
    got.chunks(part.size())
        .zip(expected.chunks(part.size()))
        .all(|(got, expected)| if nan(expected) { nan(got) } else { got == expected })
}

//! The kernels give the bits of the golden vectors, with every instruction set that is here.
// A test that cannot read its vectors may end loudly, in its helpers too.
#![allow(clippy::unwrap_used)]

mod golden_cases;

use golden_cases::{Case, cases};
use tensorwire_device::host::reduce::Instructions;
use tensorwire_device::{Caching, Dtype, ReduceOp};

#[test]
fn every_pair_that_has_a_meaning_is_there() {
    let cases: Vec<_> = cases().collect();
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL {
            let found =
                cases.iter().filter(|case| case.dtype == dtype && case.op.name() == op.name()).count();
            assert_eq!(found > 0, op.check(dtype).is_ok(), "{op} of {dtype}");
        }
    }
}

#[test]
fn kernels_agree() {
    for (line, case) in cases().enumerate() {
        for with in Instructions::available() {
            let (got, _) = run(&case, with, Caching::Keep, 0, &[None], |bytes| bytes.to_vec());
            case.compare(&got, &case.output, &format!("line {}, {with}", line + 1));
        }
    }
}

/// Whole steps and a rest, unaligned, in place, to several outputs.
#[test]
fn kernels_agree_wherever_the_elements_lie() {
    for (line, case) in cases().enumerate() {
        let size = case.dtype.size();
        for with in Instructions::available() {
            // Longer than two steps of the widest kernel and than the part that is looked at before its form is chosen,
            // and not a multiple of any.
            let count = 1024 + 2 * 256 + 16 + 5 + line % 7;
            let cycle = |bytes: &[u8]| bytes.iter().copied().cycle().take(count * size).collect::<Vec<_>>();
            let expected = cycle(&case.output);
            let places = [Some(line % case.inputs.len()), None, None];
            // Past the caches goes only what can come to the start of a line.
            for (caching, offset) in [(Caching::Keep, 1 + line % 3), (Caching::Bypass, line % 3 * size)] {
                let what = format!("line {}, {with}, {caching:?}", line + 1);
                let (got, untouched) = run(&case, with, caching, offset, &places, cycle);
                case.compare(&got, &expected, &what);
                assert!(untouched, "{what}: bytes beside an output were written");
            }
        }
    }
}

/// Lays the inputs out at `offset` bytes from an aligned address and reduces them to one output for each of
/// `places`: in place of an input, or apart. Returns all outputs one after the other, and whether the bytes
/// around them are as they were.
fn run(
    case: &Case,
    with: Instructions,
    caching: Caching,
    offset: usize,
    places: &[Option<usize>],
    layout: impl Fn(&[u8]) -> Vec<u8>,
) -> (Vec<u8>, bool) {
    const GUARD: u8 = 0xa5;
    let lay = |bytes: &[u8]| [&vec![GUARD; offset][..], bytes, &[GUARD; 64]].concat();
    let mut inputs: Vec<_> = case.inputs.iter().map(|input| lay(&layout(input))).collect();
    let len = inputs[0].len() - offset - 64;
    let mut apart: Vec<_> = places.iter().map(|_| lay(&vec![GUARD; len])).collect();
    let ins: Vec<_> = inputs.iter_mut().map(|input| input.as_mut_ptr().wrapping_add(offset)).collect();
    let outs: Vec<_> = places
        .iter()
        .zip(&mut apart)
        .map(|(place, apart)| place.map_or(apart.as_mut_ptr().wrapping_add(offset), |input| ins[input]))
        .collect();
    let ins: Vec<_> = ins.iter().map(|input| input.cast_const()).collect();
    // SAFETY: all have `len` bytes and are apart, or the same.
    unsafe { with.reduce(case.op, case.dtype, &ins, &outs, len / case.dtype.size(), caching) }.unwrap();
    let written = places.iter().zip(&apart).map(|(place, apart)| place.map_or(apart, |input| &inputs[input]));
    let (mut got, mut untouched) = (Vec::new(), true);
    for bytes in written {
        got.extend_from_slice(&bytes[offset..offset + len]);
        untouched &= bytes[..offset].iter().chain(&bytes[offset + len..]).all(|&byte| byte == GUARD);
    }
    (got, untouched)
}

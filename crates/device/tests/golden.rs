//! The kernels give the bits of the golden vectors, with every instruction set that is here.
// A test that cannot read its vectors may end loudly, in its helpers too.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use tensorwire_device::host::reduce::Instructions;
use tensorwire_device::{Caching, Dtype, ReduceOp};

const VECTORS: &str = include_str!("golden/reduce.jsonl");

struct Case {
    op: ReduceOp,
    dtype: Dtype,
    inputs: Vec<Vec<u8>>,
    output: Vec<u8>,
}

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
            let (got, _) = case.run(with, Caching::Keep, 0, &[None], |bytes| bytes.to_vec());
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
                let (got, untouched) = case.run(with, caching, offset, &places, cycle);
                case.compare(&got, &expected, &what);
                assert!(untouched, "{what}: bytes beside an output were written");
            }
        }
    }
}

impl Case {
    /// Lays the inputs out at `offset` bytes from an aligned address and reduces them to one output for each of
    /// `places`: in place of an input, or apart. Returns all outputs one after the other, and whether the bytes
    /// around them are as they were.
    fn run(
        &self,
        with: Instructions,
        caching: Caching,
        offset: usize,
        places: &[Option<usize>],
        layout: impl Fn(&[u8]) -> Vec<u8>,
    ) -> (Vec<u8>, bool) {
        const GUARD: u8 = 0xa5;
        let lay = |bytes: &[u8]| [&vec![GUARD; offset][..], bytes, &[GUARD; 64]].concat();
        let mut inputs: Vec<_> = self.inputs.iter().map(|input| lay(&layout(input))).collect();
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
        unsafe { with.reduce(self.op, self.dtype, &ins, &outs, len / self.dtype.size(), caching) }.unwrap();
        let written =
            places.iter().zip(&apart).map(|(place, apart)| place.map_or(apart, |input| &inputs[input]));
        let (mut got, mut untouched) = (Vec::new(), true);
        for bytes in written {
            got.extend_from_slice(&bytes[offset..offset + len]);
            untouched &= bytes[..offset].iter().chain(&bytes[offset + len..]).all(|&byte| byte == GUARD);
        }
        (got, untouched)
    }

    /// `got` is `expected`, once or several times; any NaN is a NaN.
    fn compare(&self, got: &[u8], expected: &[u8], what: &str) {
        let size = if self.dtype.is_complex() { self.dtype.size() / 2 } else { self.dtype.size() };
        assert_eq!(got.len() % expected.len(), 0);
        for (i, got) in got.chunks(size).enumerate() {
            let start = i * size % expected.len();
            let expected = &expected[start..start + size];
            let nan = self.is_nan(expected);
            assert!(
                if nan { self.is_nan(got) } else { got == expected },
                "{what}: {} of {}, element {i}: {got:02x?} should be {expected:02x?}",
                self.op,
                self.dtype
            );
        }
    }

    /// Of one part.
    fn is_nan(&self, bytes: &[u8]) -> bool {
        let mut code = [0; 8];
        code[..bytes.len()].copy_from_slice(bytes);
        let code = u64::from_le_bytes(code);
        match self.dtype {
            Dtype::F8E4M3Fn => code & 0x7f == 0x7f,
            Dtype::F8E5M2 => code & 0x7f > 0x7c,
            Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => code == 0x80,
            Dtype::F8E8M0Fnu => code == 0xff,
            Dtype::F16 | Dtype::Complex32 => code & 0x7fff > 0x7c00,
            Dtype::Bf16 => code & 0x7fff > 0x7f80,
            Dtype::F32 | Dtype::Complex64 => f32::from_bits(code as u32).is_nan(),
            Dtype::F64 | Dtype::Complex128 => f64::from_bits(code).is_nan(),
            _ => false,
        }
    }
}

fn cases() -> impl Iterator<Item = Case> {
    VECTORS.lines().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        let name = line["op"].as_str().unwrap();
        let op = match ReduceOp::ALL.into_iter().find(|op| op.name() == name).unwrap() {
            ReduceOp::PremulSum(_) => ReduceOp::PremulSum(line["factor"].as_f64().unwrap()),
            op => op,
        };
        Case {
            op,
            dtype: line["dtype"].as_str().unwrap().parse().unwrap(),
            inputs: line["inputs"].as_array().unwrap().iter().map(hex).collect(),
            output: hex(&line["output"]),
        }
    })
}

fn hex(text: &Value) -> Vec<u8> {
    let digits = text.as_str().unwrap().as_bytes();
    let digit = |c: u8| (c as char).to_digit(16).unwrap() as u8;
    digits.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

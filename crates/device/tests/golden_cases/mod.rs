//! The golden vectors: what a reduction gives, bit by bit, on every device.

#![allow(clippy::unwrap_used, unreachable_pub)]

use serde_json::Value;
use tensorwire_device::{Dtype, ReduceOp};

const VECTORS: &str = include_str!("../golden/reduce.jsonl");

/// One line of the vectors.
#[derive(Debug)]
pub struct Case {
    pub op: ReduceOp,
    pub dtype: Dtype,
    pub inputs: Vec<Vec<u8>>,
    pub output: Vec<u8>,
}

impl Case {
    /// `got` is `expected`, once or several times; any NaN is a NaN.
    pub fn compare(&self, got: &[u8], expected: &[u8], what: &str) {
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

/// All of them.
pub fn cases() -> impl Iterator<Item = Case> {
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

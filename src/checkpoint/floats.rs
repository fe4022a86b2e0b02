//! Stored floats to and from f32.

use half::{bf16, f16};

use super::dtype::DType;
use crate::error::{Error, Result};

/// The f32 value of each element of a little-endian tensor; exact. `None` if `dtype` is not F32,
/// F16 or BF16.
pub fn to_f32(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        DType::F16 => Some(pairs().map(|pair| f16::from_le_bytes(pair).to_f32()).collect()),
        DType::BF16 => Some(pairs().map(|pair| bf16::from_le_bytes(pair).to_f32()).collect()),
        DType::F32 => {
            Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
        _ => None,
    }
}

/// The nearest value that f16 has, ties to even. Beyond ±65504 that is an infinity, below about
/// 3·10⁻⁸ it is 0: a scale needs a look after this.
pub fn round_to_f16(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

/// The nearest value that `dtype` has, ties to even; `value` itself for other types than F16 and BF16.
pub fn round_to(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => round_to_f16(value),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Little-endian values of `dtype`, which must be F16, BF16 or F32 and have each of them.
///
/// # Errors
/// [`Error::Internal`] naming the first value that is not one of the type: it must have been rounded
/// before it was used.
pub fn exact_bytes(name: &str, dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size() as usize);
    for (index, &value) in values.iter().enumerate() {
        let back = match dtype {
            DType::F16 => {
                let half = f16::from_f32(value);
                bytes.extend_from_slice(&half.to_le_bytes());
                half.to_f32()
            }
            DType::BF16 => {
                let half = bf16::from_f32(value);
                bytes.extend_from_slice(&half.to_le_bytes());
                half.to_f32()
            }
            DType::F32 => {
                bytes.extend_from_slice(&value.to_le_bytes());
                value
            }
            _ => return Err(Error::Internal(format!("{name} is to be written as {dtype}"))),
        };
        if back != value || !value.is_finite() {
            return Err(Error::Internal(format!("{name}[{index}] = {value} is not a value of {dtype}")));
        }
    }
    Ok(bytes)
}

/// Whether `dtype` has every one of `values`, so that [`exact_bytes`] takes them.
pub fn has_all(dtype: DType, values: &[f32]) -> bool {
    values.iter().all(|&value| {
        value.is_finite()
            && match dtype {
                DType::F16 => f16::from_f32(value).to_f32() == value,
                DType::BF16 => bf16::from_f32(value).to_f32() == value,
                DType::F32 => true,
                _ => false,
            }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_bit_patterns() {
        assert_eq!(to_f32(DType::F16, &[0x00, 0x3c, 0x00, 0xc0]).unwrap(), [1.0, -2.0]);
        assert_eq!(to_f32(DType::BF16, &[0x80, 0x3f, 0x00, 0xc0]).unwrap(), [1.0, -2.0]);
        assert_eq!(to_f32(DType::F32, &1.5f32.to_le_bytes()).unwrap(), [1.5]);
        assert_eq!(to_f32(DType::I32, &[0; 4]), None);
    }

    #[test]
    fn every_finite_f16_survives_and_nothing_else_does() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            let value = half.to_f32();
            if half.is_finite() {
                assert_eq!(round_to_f16(value), value);
                assert_eq!(exact_bytes("x", DType::F16, &[value]).unwrap(), bits.to_le_bytes());
            } else {
                assert!(exact_bytes("x", DType::F16, &[0.0, value]).is_err());
            }
        }
        let refused = exact_bytes("x", DType::F16, &[1.0, 0.1]).unwrap_err().to_string();
        assert!(refused.contains("x[1] = 0.1"), "{refused}");
        assert_eq!(exact_bytes("x", DType::BF16, &[1.5]).unwrap(), [0xc0, 0x3f]);
        assert!(exact_bytes("x", DType::BF16, &[1.0 + 1.0 / 1024.0]).is_err());
        let large = [2f32.powi(100)];
        assert!(has_all(DType::BF16, &large) && !has_all(DType::F16, &large));
        assert_eq!(round_to_f16(1.0 + 1.0 / 2048.0), 1.0, "ties go to even");
        assert_eq!(round_to_f16(1.0 + 3.0 / 2048.0), 1.0 + 2.0 / 1024.0);
        assert_eq!(round_to_f16(70000.0), f32::INFINITY);
        assert_eq!(round_to_f16(1e-8), 0.0);
    }
}

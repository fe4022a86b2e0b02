//! Stored floats to and from f32.

use half::{bf16, f16};

use super::dtype::DType;

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

/// Little-endian f16 of each value. `Err` gives the index of a value that f16 does not have.
pub fn exact_f16_bytes(values: &[f32]) -> Result<Vec<u8>, usize> {
    let mut bytes = Vec::with_capacity(2 * values.len());
    for (index, &value) in values.iter().enumerate() {
        let half = f16::from_f32(value);
        if half.to_f32() != value || !value.is_finite() {
            return Err(index);
        }
        bytes.extend_from_slice(&half.to_le_bytes());
    }
    Ok(bytes)
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
                assert_eq!(exact_f16_bytes(&[value]).unwrap(), bits.to_le_bytes());
            } else {
                assert_eq!(exact_f16_bytes(&[0.0, value]), Err(1));
            }
        }
        assert_eq!(exact_f16_bytes(&[1.0, 0.1]), Err(1));
        assert_eq!(round_to_f16(1.0 + 1.0 / 2048.0), 1.0, "ties go to even");
        assert_eq!(round_to_f16(1.0 + 3.0 / 2048.0), 1.0 + 2.0 / 1024.0);
        assert_eq!(round_to_f16(70000.0), f32::INFINITY);
        assert_eq!(round_to_f16(1e-8), 0.0);
    }
}

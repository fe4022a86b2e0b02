//! Element types of stored tensors, by their safetensors names.

use std::fmt;

/// The type of a tensor's elements. All are little-endian and whole bytes wide; the 4 and 6 bit
/// floats of newer files are not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    Bool,
    U8,
    I8,
    /// 8 bit float, 5 exponent bits.
    F8E5M2,
    /// 8 bit float, 4 exponent bits.
    F8E4M3,
    /// Power-of-two scale without sign or mantissa.
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    /// Complex number of two F32.
    C64,
    F64,
    I64,
    U64,
}

impl DType {
    pub const ALL: [Self; 19] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::F8E5M2,
        Self::F8E4M3,
        Self::F8E8M0,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::BF16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::C64,
        Self::F64,
        Self::I64,
        Self::U64,
    ];

    /// Bytes per element.
    pub const fn size(self) -> u64 {
        match self {
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Self::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::C64 => "C64",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
        }
    }

    /// The type with a safetensors name, `None` if there is none or it is not supported.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes of a tensor of this type and `shape`; `None` if that exceeds 64 bits.
    pub fn bytes_of(self, shape: &[u64]) -> Option<u64> {
        shape.iter().try_fold(self.size(), |bytes, &extent| bytes.checked_mul(extent))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The crate that defines the format knows each of these names, with the same width.
    #[test]
    fn names_and_sizes_are_those_of_safetensors() {
        for dtype in DType::ALL {
            let name = serde_json::Value::from(dtype.name());
            let theirs: safetensors::Dtype = serde_json::from_value(name).unwrap();
            assert_eq!(theirs.bitsize() as u64, 8 * dtype.size(), "{dtype}");
            assert_eq!(DType::parse(dtype.name()), Some(dtype));
        }
        assert_eq!(DType::parse("F4"), None);
        assert_eq!(DType::parse("f32"), None);
    }

    #[test]
    fn the_size_of_a_shape_is_checked_for_overflow() {
        assert_eq!(DType::F32.bytes_of(&[]), Some(4));
        assert_eq!(DType::BF16.bytes_of(&[3, 0, 5]), Some(0));
        assert_eq!(DType::U8.bytes_of(&[u64::MAX]), Some(u64::MAX));
        assert_eq!(DType::F16.bytes_of(&[u64::MAX / 2, 2]), None);
    }
}

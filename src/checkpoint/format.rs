//! The file formats of quantized layers, behind one name.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::config::Scheme;
use super::dtype::DType;
use super::linear::GptqLinear;
use super::pack::ZeroFormat;
use super::writer::TensorSpec;
use super::{compressed, gptq};
use crate::error::Result;

/// How quantized layers are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Format {
    /// GPTQ, `checkpoint_format: "gptq"`: stores zero points less one.
    #[default]
    #[serde(rename = "gptq")]
    Gptq,
    /// GPTQ, `checkpoint_format: "gptq_v2"`: stores zero points.
    #[serde(rename = "gptq_v2")]
    GptqV2,
    /// compressed-tensors, `format: "pack-quantized"`.
    #[serde(rename = "compressed-tensors")]
    CompressedTensors,
}

/// A quantized linear layer as a file holds it.
#[derive(Debug, Clone, Copy)]
pub struct StoredLayer<'a> {
    /// The module's full name.
    pub prefix: &'a str,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    pub scheme: Scheme,
    pub scale: DType,
    /// `None` for a layer without bias.
    pub bias: Option<DType>,
}

impl Format {
    pub const ALL: [Self; 3] = [Self::Gptq, Self::GptqV2, Self::CompressedTensors];

    /// The name on the command line and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gptq => "gptq",
            Self::GptqV2 => "gptq_v2",
            Self::CompressedTensors => "compressed-tensors",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// How zero points are stored, `None` where the format is not GPTQ.
    pub const fn zeros(self) -> Option<ZeroFormat> {
        match self {
            Self::Gptq => Some(ZeroFormat::V1),
            Self::GptqV2 => Some(ZeroFormat::V2),
            Self::CompressedTensors => None,
        }
    }

    /// The part of a layer's name that only this format has: its packed codes.
    pub const fn codes_part(self) -> &'static str {
        match self {
            Self::Gptq | Self::GptqV2 => "qweight",
            Self::CompressedTensors => "weight_packed",
        }
    }

    /// The layer's tensors, in the order in which they are written.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::error::Error::Unsupported) for a width or numbers of features
    /// that the format cannot hold.
    pub fn specs(self, layer: &StoredLayer) -> Result<Vec<TensorSpec>> {
        match self {
            Self::Gptq | Self::GptqV2 => gptq::specs(layer),
            Self::CompressedTensors => compressed::specs(layer),
        }
    }

    /// The bytes of the tensors of [`Format::specs`], in their order.
    ///
    /// # Errors
    /// [`Error::Internal`](crate::error::Error::Internal) if the parts do not fit each other or the
    /// types that `layer` says; a zero point of 0 in [`Format::Gptq`] is one.
    pub fn tensors(self, quantized: &GptqLinear, layer: &StoredLayer) -> Result<Vec<(String, Vec<u8>)>> {
        quantized.check(layer.prefix)?;
        match self.zeros() {
            Some(zeros) => gptq::tensors(quantized, layer, zeros),
            None => compressed::tensors(quantized, layer),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

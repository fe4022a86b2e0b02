//! One quantized linear layer in memory, whatever file it came from or goes to.

use super::config::{QuantConfig, Scheme};
use super::dtype::DType;
use super::floats::to_f32;
use super::format::Format;
use super::reader::Checkpoint;
use super::{compressed, gptq};
use crate::error::{Error, Result};

/// Number of groups of `k` input features; `group_size` −1 is one group.
///
/// # Errors
/// [`Error::Internal`] for a group size that is neither −1 nor positive.
pub fn group_count(k: usize, group_size: i64) -> Result<usize> {
    match usize::try_from(group_size) {
        Err(_) if group_size == -1 => Ok(1),
        Ok(size) if size > 0 => Ok(k.div_ceil(size)),
        _ => Err(Error::Internal(format!("a group size of {group_size}"))),
    }
}

/// The group of each of `k` input features in natural order: `k // group_size`.
///
/// # Errors
/// As [`group_count`].
pub fn natural_g_idx(k: usize, group_size: i64) -> Result<Vec<u32>> {
    group_count(k, group_size)?;
    // A group wider than u32 is wider than any row.
    let size = u32::try_from(group_size).unwrap_or(u32::MAX);
    Ok((0..k as u32).map(|column| column / size).collect())
}

/// A linear layer that GPTQ quantized, unpacked. The weight is
/// `scales[g_idx[k]][n] · (code[n][k] − zero[g_idx[k]][n])`.
#[derive(Debug, Clone, PartialEq)]
pub struct GptqLinear {
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// `[n, k]`, unsigned.
    pub codes: Vec<u8>,
    /// `[groups, n]`; may be negative. To be written they must be values that the file's type has.
    pub scales: Vec<f32>,
    /// `[groups, n]`, the zero points themselves whatever the file stores.
    pub zeros: Vec<u8>,
    /// `[k]`
    pub g_idx: Vec<u32>,
    /// `[n]`
    pub bias: Option<Vec<f32>>,
}

impl GptqLinear {
    pub fn groups(&self) -> usize {
        self.scales.len().checked_div(self.n).unwrap_or(0)
    }

    /// Whether loaders must look at `g_idx`: `desc_act` has to be true exactly then.
    ///
    /// # Errors
    /// As [`group_count`].
    pub fn is_act_ordered(&self, group_size: i64) -> Result<bool> {
        Ok(self.g_idx != natural_g_idx(self.k, group_size)?)
    }

    pub(super) fn check(&self, prefix: &str) -> Result<()> {
        let groups = self.groups();
        let fits = self.codes.len() == self.n * self.k
            && self.scales.len() == groups * self.n
            && self.zeros.len() == groups * self.n
            && self.g_idx.len() == self.k
            && self.g_idx.iter().all(|&group| (group as usize) < groups)
            && self.bias.as_ref().is_none_or(|bias| bias.len() == self.n);
        if fits {
            Ok(())
        } else {
            Err(Error::Internal(format!("the parts of {prefix} do not fit each other")))
        }
    }

    /// The weight `[n, k]` that the layer stands for. A product of an f16 scale and a difference of
    /// codes is exact in f32.
    ///
    /// # Errors
    /// [`Error::Internal`] if the parts do not fit each other.
    pub fn dequantize(&self) -> Result<Vec<f32>> {
        self.check("the layer")?;
        let mut weight = vec![0.0; self.n * self.k];
        if self.k == 0 {
            return Ok(weight);
        }
        let fill = |(row, weight): (usize, &mut [f32])| {
            let codes = &self.codes[row * self.k..(row + 1) * self.k];
            for ((weight, &code), &group) in weight.iter_mut().zip(codes).zip(&self.g_idx) {
                let at = group as usize * self.n + row;
                *weight = self.scales[at] * (f32::from(code) - f32::from(self.zeros[at]));
            }
        };
        #[cfg(not(target_arch = "wasm32"))]
        {
            use rayon::prelude::*;
            weight.par_chunks_mut(self.k).enumerate().for_each(fill);
        }
        #[cfg(target_arch = "wasm32")]
        weight.chunks_mut(self.k).enumerate().for_each(fill);
        Ok(weight)
    }

    /// Whether a checkpoint holds the layer `prefix` quantized.
    pub fn is_in(checkpoint: &Checkpoint, prefix: &str) -> bool {
        Format::ALL
            .iter()
            .any(|format| checkpoint.info(&format!("{prefix}.{}", format.codes_part())).is_some())
    }

    /// The layer whose rows are those of `self`, then those of `other`; `None` where the two cannot be one.
    pub fn above(self, other: Self) -> Option<Self> {
        let alike = (self.k, self.bits, self.groups()) == (other.k, other.bits, other.groups())
            && self.g_idx == other.g_idx
            && self.bias.is_some() == other.bias.is_some();
        if !alike {
            return None;
        }
        let (n, m) = (self.n, other.n);
        let both = |a: &[f32], b: &[f32]| a.iter().chain(b).copied().collect::<Vec<f32>>();
        let scales =
            self.scales.chunks(n).zip(other.scales.chunks(m)).flat_map(|(a, b)| both(a, b)).collect();
        let zeros = self.zeros.chunks(n).zip(other.zeros.chunks(m));
        Some(Self {
            n: n + m,
            zeros: zeros.flat_map(|(a, b)| a.iter().chain(b).copied()).collect(),
            codes: [self.codes, other.codes].concat(),
            scales,
            bias: self.bias.zip(other.bias).map(|(a, b)| both(&a, &b)),
            ..self
        })
    }

    /// Reads the layer `prefix` in the format of `config`. Scales and bias may be F16, BF16 or F32; a
    /// `g_idx` in the file is followed whatever the config says, and without one groups are natural.
    ///
    /// # Errors
    /// [`Error::Model`] naming the tensor that is absent or does not have the type, shape or values
    /// that the scheme asks for; [`Error::Unsupported`] for a pattern of the config that cannot be used.
    pub async fn read(checkpoint: &Checkpoint, prefix: &str, config: &QuantConfig) -> Result<Self> {
        let parts = Parts { checkpoint, prefix };
        let Some(scheme) = config.scheme_of(prefix)? else {
            return Err(Error::model(
                checkpoint.source().describe(),
                format_args!("{prefix} is quantized, but the config says that it is left alone"),
                "The config does not belong to these weights; fetch the model again",
            ));
        };
        match config.format.zeros() {
            Some(zeros) => gptq::read(&parts, scheme, zeros).await,
            None => compressed::read(&parts, scheme).await,
        }
    }
}

/// The small tensors of a layer, as far as they can be read: for a check that believes nothing.
pub struct LayerParts {
    pub n: usize,
    pub k: usize,
    /// As the scheme makes them.
    pub groups: usize,
    /// In the file's order, finite or not; empty if the tensor is not there or has another shape.
    pub scales: Vec<f32>,
    /// `[groups, n]`; empty likewise, and where a symmetric layer needs none.
    pub zeros: Vec<u8>,
    /// Whatever it says; `None` without one.
    pub g_idx: Option<Vec<u32>>,
}

/// The [`LayerParts`] of `prefix`.
///
/// # Errors
/// [`Error::Model`] if not even the layer's shape can be told; [`Error::Io`].
pub async fn parts_of(
    checkpoint: &Checkpoint,
    prefix: &str,
    format: Format,
    scheme: Scheme,
) -> Result<LayerParts> {
    let parts = Parts { checkpoint, prefix };
    let (n, k) = match format.zeros() {
        Some(_) => gptq::features(&parts, scheme.bits).map(|(k, n)| (n, k))?,
        None => compressed::features(&parts).await?,
    };
    let groups = group_count(k, scheme.group_size)?;
    let (zeros, scales, g_idx) = match format.zeros() {
        Some(zeros) => (gptq::zeros(&parts, groups, n, scheme.bits, zeros).await, "scales", "g_idx"),
        None => match parts.has("weight_zero_point") {
            true => (compressed::zeros(&parts, n, groups, scheme).await, "weight_scale", "weight_g_idx"),
            false => (Ok(Vec::new()), "weight_scale", "weight_g_idx"),
        },
    };
    let mut found =
        LayerParts { n, k, groups, scales: Vec::new(), zeros: zeros.unwrap_or_default(), g_idx: None };
    if let Some(info) = checkpoint.info(&parts.name(scales)) {
        found.scales = to_f32(info.dtype, &checkpoint.read(&info.name).await?).unwrap_or_default();
    }
    if parts.has(g_idx) {
        found.g_idx = parts.words(g_idx, &[k]).await.ok().filter(|g_idx| !g_idx.contains(&u32::MAX));
    }
    Ok(found)
}

/// The tensors of one layer in a checkpoint.
pub(super) struct Parts<'a> {
    pub checkpoint: &'a Checkpoint,
    pub prefix: &'a str,
}

impl Parts<'_> {
    pub(super) fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }

    pub(super) fn has(&self, part: &str) -> bool {
        self.checkpoint.info(&self.name(part)).is_some()
    }

    pub(super) fn wrong(&self, part: &str, problem: impl std::fmt::Display) -> Error {
        let name = self.name(part);
        let place = self
            .checkpoint
            .info(&name)
            .map_or_else(|| self.checkpoint.source().describe(), |info| self.checkpoint.place(&info.file));
        Error::model(
            place,
            format_args!("tensor {name:?} {problem}"),
            "The weights do not fit the model's quantization config; fetch both again",
        )
    }

    /// The bytes of a tensor of one of `dtypes` and of `shape`.
    pub(super) async fn bytes(
        &self,
        part: &str,
        dtypes: &[DType],
        shape: &[usize],
    ) -> Result<(DType, Vec<u8>)> {
        let name = self.name(part);
        let info = self.checkpoint.require(&name)?;
        let same = info.shape.len() == shape.len()
            && info.shape.iter().zip(shape).all(|(&stored, &wanted)| stored == wanted as u64);
        if !same || !dtypes.contains(&info.dtype) {
            let wanted: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
            return Err(self.wrong(
                part,
                format_args!(
                    "is {} {:?} where {} {shape:?} is needed",
                    info.dtype,
                    info.shape,
                    wanted.join(" or ")
                ),
            ));
        }
        Ok((info.dtype, self.checkpoint.read(&name).await?))
    }

    pub(super) async fn words(&self, part: &str, shape: &[usize]) -> Result<Vec<u32>> {
        let (_, bytes) = self.bytes(part, &[DType::I32, DType::U32], shape).await?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    pub(super) async fn floats(&self, part: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let (dtype, bytes) = self.bytes(part, &[DType::F16, DType::BF16, DType::F32], shape).await?;
        let values = to_f32(dtype, &bytes).unwrap_or_default();
        match values.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(self.wrong(part, format_args!("is {} at element {index}", values[index]))),
            None => Ok(values),
        }
    }

    /// The group of each input.
    pub(super) async fn g_idx(&self, part: &str, k: usize, groups: usize) -> Result<Vec<u32>> {
        let g_idx = self.words(part, &[k]).await?;
        match g_idx.iter().position(|&group| group as usize >= groups) {
            None => Ok(g_idx),
            Some(column) => Err(self.wrong(
                part,
                format_args!("puts input {column} in group {}, but there are {groups}", g_idx[column] as i32),
            )),
        }
    }

    pub(super) async fn bias(&self, n: usize) -> Result<Option<Vec<f32>>> {
        match self.has("bias") {
            true => self.floats("bias", &[n]).await.map(Some),
            false => Ok(None),
        }
    }
}

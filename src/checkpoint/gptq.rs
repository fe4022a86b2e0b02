//! One quantized linear layer as the GPTQ format stores it.
//!
//! | tensor | type, shape | content |
//! |---|---|---|
//! | `P.qweight` | I32 `[K·bits/32, N]` | codes, packed along K |
//! | `P.qzeros` | I32 `[G, N·bits/32]` | zero points, packed along N |
//! | `P.scales` | F16 `[G, N]` | |
//! | `P.g_idx` | I32 `[K]` | group of each input feature |
//! | `P.bias` | F16 `[N]` | only if the layer has one |
//!
//! K input features, N output features, G groups. The weight is
//! `scales[g_idx[k]][n] · (code[n][k] − zero[g_idx[k]][n])`.

use super::config::{QuantConfig, Scheme};
use super::dtype::DType;
use super::floats::{exact_f16_bytes, to_f32};
use super::pack::{self, ZeroFormat, pack_qweight, pack_qzeros, unpack_qweight, unpack_qzeros};
use super::reader::Checkpoint;
use super::writer::TensorSpec;
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

/// The tensors of the layer `prefix` in the order of [`GptqLinear::tensors`].
///
/// # Errors
/// [`Error::Unsupported`] for a width or numbers of features that the format cannot hold.
pub fn specs(
    prefix: &str,
    n: usize,
    k: usize,
    bits: u32,
    group_size: i64,
    has_bias: bool,
) -> Result<Vec<TensorSpec>> {
    let spec = |name, dtype, shape: &[usize]| {
        let shape: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
        TensorSpec::new(format!("{prefix}.{name}"), dtype, shape)
    };
    let groups = group_count(k, group_size)?;
    let mut specs = vec![
        spec("qweight", DType::I32, &[pack::packed_words(k, bits)?, n]),
        spec("qzeros", DType::I32, &[groups, pack::packed_words(n, bits)?]),
        spec("scales", DType::F16, &[groups, n]),
        spec("g_idx", DType::I32, &[k]),
    ];
    if has_bias {
        specs.push(spec("bias", DType::F16, &[n]));
    }
    Ok(specs)
}

/// A quantized linear layer, unpacked.
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
    /// `[groups, n]`; may be negative. To be written they must be values that f16 has.
    pub scales: Vec<f32>,
    /// `[groups, n]`, the zero points themselves whatever the file stores.
    pub zeros: Vec<u8>,
    /// `[k]`
    pub g_idx: Vec<u32>,
    /// `[n]`; to be written, values that f16 has.
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

    /// The layer's tensors, named under `prefix`, in the order of [`specs`].
    ///
    /// # Errors
    /// [`Error::Internal`] if lengths do not fit each other, a code does not fit its bits, a group
    /// does not exist, a zero point is 0 in [`ZeroFormat::V1`], or a scale or bias is not a value
    /// of f16: it must have been rounded (see [`round_to_f16`](super::floats::round_to_f16)) before
    /// it was used. [`Error::Unsupported`] for features that the format cannot hold.
    pub fn tensors(&self, prefix: &str, format: ZeroFormat) -> Result<Vec<(String, Vec<u8>)>> {
        self.check(prefix)?;
        let halves = |name: &str, values: &[f32]| {
            exact_f16_bytes(values).map_err(|index| {
                Error::Internal(format!("{prefix}.{name}[{index}] = {} is not a value of f16", values[index]))
            })
        };
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let qweight = pack_qweight(&self.codes, self.n, self.k, self.bits)?;
        let qzeros = pack_qzeros(&self.zeros, self.groups(), self.n, self.bits, format)?;
        let mut tensors = vec![
            (format!("{prefix}.qweight"), words(&qweight)),
            (format!("{prefix}.qzeros"), words(&qzeros)),
            (format!("{prefix}.scales"), halves("scales", &self.scales)?),
            (format!("{prefix}.g_idx"), words(&self.g_idx)),
        ];
        if let Some(bias) = &self.bias {
            tensors.push((format!("{prefix}.bias"), halves("bias", bias)?));
        }
        Ok(tensors)
    }

    fn check(&self, prefix: &str) -> Result<()> {
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
        checkpoint.info(&format!("{prefix}.qweight")).is_some()
    }

    /// Reads the layer `prefix`. Scales and bias may also be BF16 or F32, and `g_idx` may be absent
    /// (natural order); a `g_idx` in the file is followed whatever `desc_act` says.
    ///
    /// # Errors
    /// [`Error::Model`] naming the tensor that is absent or does not have the type, shape or values
    /// that the scheme asks for.
    pub async fn read(checkpoint: &Checkpoint, prefix: &str, config: &QuantConfig) -> Result<Self> {
        let layer = Stored { checkpoint, prefix };
        let Some(Scheme { bits, group_size, .. }) = config.scheme_of(prefix)? else {
            return Err(Error::model(
                checkpoint.source().describe(),
                format_args!("{prefix} is quantized, but the config says that it is left alone"),
                "The config does not belong to these weights; fetch the model again",
            ));
        };
        let (k, n) = layer.features(bits)?;
        let groups = group_count(k, group_size)?;
        let qweight = layer.words("qweight", &[pack::packed_words(k, bits)?, n]).await?;
        let codes = unpack_qweight(&qweight, n, k, bits)?;
        drop(qweight);
        let qzeros = layer.words("qzeros", &[groups, pack::packed_words(n, bits)?]).await?;
        let zeros = unpack_qzeros(&qzeros, groups, n, bits, config.format)?;
        let scales = layer.floats("scales", &[groups, n]).await?;
        let g_idx = match layer.has("g_idx") {
            true => layer.words("g_idx", &[k]).await?,
            false => natural_g_idx(k, group_size)?,
        };
        if let Some(column) = g_idx.iter().position(|&group| group as usize >= groups) {
            return Err(layer.wrong(
                "g_idx",
                format_args!("puts input {column} in group {}, but there are {groups}", g_idx[column] as i32),
            ));
        }
        let bias = match layer.has("bias") {
            true => Some(layer.floats("bias", &[n]).await?),
            false => None,
        };
        Ok(Self { n, k, bits, codes, scales, zeros, g_idx, bias })
    }
}

/// The tensors of one layer in a checkpoint.
struct Stored<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'a str,
}

impl Stored<'_> {
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }

    fn has(&self, part: &str) -> bool {
        self.checkpoint.info(&self.name(part)).is_some()
    }

    fn wrong(&self, part: &str, problem: impl std::fmt::Display) -> Error {
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

    /// K and N, as the shape of `qweight` gives them at `bits`.
    fn features(&self, bits: u32) -> Result<(usize, usize)> {
        let info = self.checkpoint.require(&self.name("qweight"))?;
        let features = match info.shape[..] {
            [rows, n] => rows
                .checked_mul(32)
                .filter(|stream| stream.is_multiple_of(u64::from(bits)))
                .and_then(|stream| usize::try_from(stream / u64::from(bits)).ok())
                .zip(usize::try_from(n).ok()),
            _ => None,
        };
        let fits = features.filter(|&(k, n)| {
            u32::try_from(k).is_ok()
                && pack::packed_words(k, bits).is_ok()
                && pack::packed_words(n, bits).is_ok()
        });
        fits.ok_or_else(|| {
            self.wrong(
                "qweight",
                format_args!("has the shape {:?}, which cannot hold {bits} bit codes", info.shape),
            )
        })
    }

    /// The bytes of a tensor of one of `dtypes` and of `shape`.
    async fn bytes(&self, part: &str, dtypes: &[DType], shape: &[usize]) -> Result<(DType, Vec<u8>)> {
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

    async fn words(&self, part: &str, shape: &[usize]) -> Result<Vec<u32>> {
        let (_, bytes) = self.bytes(part, &[DType::I32, DType::U32], shape).await?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    async fn floats(&self, part: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let (dtype, bytes) = self.bytes(part, &[DType::F16, DType::BF16, DType::F32], shape).await?;
        let values = to_f32(dtype, &bytes).unwrap_or_default();
        match values.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(self.wrong(part, format_args!("is {} at element {index}", values[index]))),
            None => Ok(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::pack::ZeroFormat::{V1, V2};
    use crate::checkpoint::{CONFIG, SINGLE, header};
    use crate::storage::memory::MemorySource;
    use pollster::block_on;
    use serde_json::json;
    use std::rc::Rc;

    type Tensor = (&'static str, DType, Vec<u64>, Vec<u8>);

    fn open(tensors: &[Tensor]) -> Checkpoint {
        let mut file =
            header::write(tensors.iter().map(|(name, dtype, shape, _)| (*name, *dtype, &shape[..]))).unwrap();
        tensors.iter().for_each(|(.., bytes)| file.extend_from_slice(bytes));
        let files = [(SINGLE, file), (CONFIG, b"{}".to_vec())];
        block_on(Checkpoint::open(Rc::new(MemorySource::new("dir", files)))).unwrap()
    }

    fn config(bits: u32, group_size: i64, format: &str) -> QuantConfig {
        let object = json!({"bits": bits, "group_size": group_size, "checkpoint_format": format});
        QuantConfig::parse("test", &object).unwrap()
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn halves(values: &[f32]) -> Vec<u8> {
        exact_f16_bytes(values).unwrap()
    }

    fn read(tensors: &[Tensor], config: &QuantConfig) -> Result<GptqLinear> {
        block_on(GptqLinear::read(&open(tensors), "P", config))
    }

    /// K = 16 inputs, N = 8 outputs, two groups of 8. Output n has the codes n, n, …, n in group 0
    /// and 0, 1, …, 7 in group 1. Zero points: 8 in group 0; 1, 2, …, 8 in group 1.
    /// Scales: 0.5 in group 0; −2 in group 1.
    fn four_bits(qzeros: [u32; 2], g_idx: Option<[u32; 16]>) -> Vec<Tensor> {
        let mut qweight: Vec<u32> = (0..8).map(|n| n * 0x1111_1111).collect();
        qweight.extend([0x7654_3210; 8]);
        let mut scales = vec![0.5; 8];
        scales.extend([-2.0; 8]);
        let mut tensors = vec![
            ("P.qweight", DType::I32, vec![2, 8], words(&qweight)),
            ("P.qzeros", DType::I32, vec![2, 1], words(&qzeros)),
            ("P.scales", DType::F16, vec![2, 8], halves(&scales)),
        ];
        if let Some(g_idx) = g_idx {
            tensors.push(("P.g_idx", DType::I32, vec![16], words(&g_idx)));
        }
        tensors
    }

    const V1_ZEROS: [u32; 2] = [0x7777_7777, 0x7654_3210];
    const V2_ZEROS: [u32; 2] = [0x8888_8888, 0x8765_4321];

    #[test]
    fn four_bits_decode_to_values_worked_out_by_hand_in_both_formats() {
        for (format, zeros) in [("gptq", V1_ZEROS), ("gptq_v2", V2_ZEROS)] {
            let layer = read(&four_bits(zeros, None), &config(4, 8, format)).unwrap();
            assert_eq!((layer.n, layer.k, layer.groups()), (8, 16, 2));
            assert_eq!(layer.zeros[8..], [1, 2, 3, 4, 5, 6, 7, 8]);
            assert!(!layer.is_act_ordered(8).unwrap());
            let weight = layer.dequantize().unwrap();
            // Output 3: 0.5·(3 − 8) eight times, then −2·(0..8 − 4).
            assert_eq!(weight[3 * 16..3 * 16 + 8], [-2.5; 8]);
            assert_eq!(weight[3 * 16 + 8..4 * 16], [8.0, 6.0, 4.0, 2.0, -0.0, -2.0, -4.0, -6.0]);
            // Output 0: 0.5·(0 − 8), then −2·(0..8 − 1).
            assert_eq!(weight[0], -4.0);
            assert_eq!(weight[8..16], [2.0, -0.0, -2.0, -4.0, -6.0, -8.0, -10.0, -12.0]);
        }
    }

    #[test]
    fn groups_in_permuted_order_follow_g_idx() {
        let mut g_idx = [0; 16];
        (0..16).step_by(2).for_each(|column| g_idx[column] = 1);
        let layer = read(&four_bits(V1_ZEROS, Some(g_idx)), &config(4, 8, "gptq")).unwrap();
        assert!(layer.is_act_ordered(8).unwrap());
        let weight = layer.dequantize().unwrap();
        // Output 5, zero point 6 in group 1: input 0 is in group 1, input 1 in group 0.
        assert_eq!(weight[5 * 16], -2.0 * (5.0 - 6.0));
        assert_eq!(weight[5 * 16 + 1], 0.5 * (5.0 - 8.0));
        assert_eq!(weight[5 * 16 + 14], -2.0 * (6.0 - 6.0));
        assert_eq!(weight[5 * 16 + 15], 0.5 * (7.0 - 8.0));
    }

    #[test]
    fn three_bits_and_one_group_decode_to_values_worked_out_by_hand() {
        // K = N = 32. Codes 0..8 four times for every output: 8 codes are the 24 bits of
        // 0o76543210 = 0xfac688, and four times those the words below.
        let qweight: Vec<u32> =
            [0x88fa_c688, 0xc688_fac6, 0xfac6_88fa].into_iter().flat_map(|word| [word; 32]).collect();
        // Zero points 4, stored as 3 (0b011) in v1.
        let qzeros = [0xdb6d_b6db, 0xb6db_6db6, 0x6db6_db6d];
        let scales: Vec<f32> = (0..32).map(|n| n as f32 * 0.25).collect();
        let tensors = [
            ("P.qweight", DType::I32, vec![3, 32], words(&qweight)),
            ("P.qzeros", DType::I32, vec![1, 3], words(&qzeros)),
            ("P.scales", DType::F16, vec![1, 32], halves(&scales)),
            ("P.bias", DType::F16, vec![32], halves(&[1.5; 32])),
        ];
        let layer = read(&tensors, &config(3, -1, "gptq")).unwrap();
        assert_eq!(layer.zeros, [4; 32]);
        assert_eq!(layer.g_idx, [0; 32]);
        assert_eq!(layer.bias.as_deref(), Some(&[1.5; 32][..]));
        let weight = layer.dequantize().unwrap();
        for n in 0..32 {
            for k in 0..32 {
                assert_eq!(weight[n * 32 + k], n as f32 * 0.25 * ((k % 8) as f32 - 4.0));
            }
        }
    }

    #[test]
    fn scales_of_other_types_are_read_exactly() {
        let mut tensors = four_bits(V1_ZEROS, None);
        let scale = half::bf16::from_f32(1e30);
        tensors[2] = ("P.scales", DType::BF16, vec![2, 8], scale.to_le_bytes().repeat(16));
        let layer = read(&tensors, &config(4, 8, "gptq")).unwrap();
        assert_eq!(layer.scales, [scale.to_f32(); 16]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let good = config(4, 8, "gptq");
        let refusal =
            |tensors: &[Tensor], config: &QuantConfig| read(tensors, config).unwrap_err().to_string();
        let mut bad_group = [0; 16];
        bad_group[3] = 2;
        let group = refusal(&four_bits(V1_ZEROS, Some(bad_group)), &good);
        assert!(group.contains("dir/model.safetensors") && group.contains("input 3 in group 2"), "{group}");
        let sizes = refusal(&four_bits(V1_ZEROS, None), &config(4, 4, "gptq"));
        assert!(sizes.contains("P.qzeros") && sizes.contains("[2, 1] where I32 or U32 [4, 1]"), "{sizes}");
        let bits = refusal(&four_bits(V1_ZEROS, None), &config(3, 8, "gptq"));
        assert!(bits.contains("P.qweight") && bits.contains("3 bit"), "{bits}");
        let mut infinite = four_bits(V1_ZEROS, None);
        infinite[2].3[4..6].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        assert!(refusal(&infinite, &good).contains("inf at element 2"));
        let mut floats = four_bits(V1_ZEROS, None);
        floats[2].1 = DType::I16;
        assert!(refusal(&floats, &good).contains("I16"));
        let mut flat = four_bits(V1_ZEROS, None);
        flat[0].2 = vec![16];
        assert!(refusal(&flat, &good).contains("[16]"));
        let absent = refusal(&four_bits(V1_ZEROS, None)[..2], &good);
        assert!(absent.contains("P.scales") && absent.contains("missing"), "{absent}");
        let alone = QuantConfig::parse("test", &json!({"bits": 4, "group_size": 8, "dynamic": {"-:P": {}}}));
        assert!(refusal(&four_bits(V1_ZEROS, None), &alone.unwrap()).contains("left alone"));
    }

    fn sample(bits: u32, group_size: i64) -> GptqLinear {
        let (n, k) = (64, 96);
        let groups = group_count(k, group_size).unwrap();
        let max = (1usize << bits) - 1;
        let spread = |index: usize| index.wrapping_mul(2_654_435_761) >> 7;
        GptqLinear {
            n,
            k,
            bits,
            codes: (0..n * k).map(|index| (spread(index) % (max + 1)) as u8).collect(),
            scales: (0..groups * n).map(|index| (spread(index) % 255) as f32 / 64.0 - 2.0).collect(),
            zeros: (0..groups * n).map(|index| (1 + spread(index + 3) % max) as u8).collect(),
            g_idx: (0..k).map(|index| (spread(index) % groups) as u32).collect(),
            bias: Some((0..n).map(|index| index as f32 * 0.5).collect()),
        }
    }

    #[test]
    fn a_layer_comes_back_through_its_planned_tensors_at_every_width_and_group() {
        for bits in [2, 3, 4, 8] {
            for (format, name) in [(V1, "gptq"), (V2, "gptq_v2")] {
                for group_size in [-1, 16, 32, 40] {
                    let layer = sample(bits, group_size);
                    let tensors = layer.tensors("P", format).unwrap();
                    let specs = specs("P", layer.n, layer.k, bits, group_size, true).unwrap();
                    assert_eq!(specs.len(), tensors.len());
                    let stored: Vec<Tensor> = specs
                        .iter()
                        .zip(tensors)
                        .map(|(spec, (name, bytes))| {
                            assert_eq!(spec.name, name);
                            let name: &'static str = name.leak();
                            (name, spec.dtype, spec.shape.clone(), bytes)
                        })
                        .collect();
                    let back = read(&stored, &config(bits, group_size, name)).unwrap();
                    assert_eq!(back, layer);
                }
            }
        }
    }

    #[test]
    fn only_what_the_format_holds_is_written() {
        let refusal = |change: &dyn Fn(&mut GptqLinear)| {
            let mut layer = sample(4, 32);
            change(&mut layer);
            layer.tensors("P", V1).unwrap_err().to_string()
        };
        assert!(refusal(&|layer| layer.scales[5] = 0.1).contains("P.scales[5] = 0.1"));
        assert!(refusal(&|layer| layer.bias = Some(vec![1e9; 64])).contains("P.bias[0]"));
        assert!(refusal(&|layer| layer.zeros[2] = 0).contains("zero point 0"));
        assert!(refusal(&|layer| layer.codes[9] = 16).contains("do not fit 4 bits"));
        assert!(refusal(&|layer| layer.g_idx[0] = 3).contains("do not fit each other"));
        assert!(refusal(&|layer| layer.codes.truncate(5)).contains("do not fit each other"));
        assert!(specs("P", 64, 33, 4, 32, false).is_err());
        assert!(specs("P", 64, 64, 4, 0, false).is_err());
        assert_eq!(specs("P", 64, 64, 4, -1, false).unwrap().len(), 4);
    }
}

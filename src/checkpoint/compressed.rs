//! A quantized linear layer as compressed-tensors stores it (`format: "pack-quantized"`).
//!
//! | tensor | type, shape | content |
//! |---|---|---|
//! | `P.weight_packed` | I32 `[N, ⌈K·bits/32⌉]` | codes, a bit stream along each row |
//! | `P.weight_scale` | model's type `[N, G]` | |
//! | `P.weight_zero_point` | I32 `[⌈N·bits/32⌉, G]` | a bit stream down each column; asymmetric only |
//! | `P.weight_shape` | I64 `[2]` | N, K |
//! | `P.weight_g_idx` | I32 `[K]` | group of each input feature; `actorder: "group"` only |
//! | `P.bias` | any `[N]` | only if the layer has one |
//!
//! K input features, N output features, G groups. Codes and zero points are signed there and stored
//! with 2^(bits−1) added, which makes them the unsigned ones that GPTQ has: only the arrangement
//! differs.
//!
//! Earlier versions are read too: 3-bit codes ten to a word, zero points as I8 `[N, G]` (also for
//! symmetric layers), scales of one group as `[N]`, a `weight_g_idx` of −1 for natural order.

use super::config::Scheme;
use super::dtype::DType;
use super::floats::exact_bytes;
use super::format::StoredLayer;
use super::linear::{GptqLinear, Parts, group_count, natural_g_idx};
use super::pack::Stream;
use super::writer::TensorSpec;
use crate::error::{Error, Result};

/// See [`Format::specs`](super::Format::specs).
pub(super) fn specs(layer: &StoredLayer) -> Result<Vec<TensorSpec>> {
    let StoredLayer { n, k, scheme, .. } = *layer;
    let stream = Stream::dense(scheme.bits)?;
    let groups = group_count(k, scheme.group_size)?;
    let spec = |name, dtype, shape: &[usize]| {
        let shape: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
        TensorSpec::new(format!("{}.{name}", layer.prefix), dtype, shape)
    };
    let mut specs = vec![
        spec("weight_packed", DType::I32, &[n, stream.words(k)]),
        spec("weight_scale", layer.scale, &[n, groups]),
    ];
    if !scheme.sym {
        specs.push(spec("weight_zero_point", DType::I32, &[stream.words(n), groups]));
    }
    specs.push(spec("weight_shape", DType::I64, &[2]));
    if scheme.desc_act {
        specs.push(spec("weight_g_idx", DType::I32, &[k]));
    }
    specs.extend(layer.bias.map(|dtype| spec("bias", dtype, &[n])));
    Ok(specs)
}

/// See [`Format::tensors`](super::Format::tensors).
pub(super) fn tensors(quantized: &GptqLinear, layer: &StoredLayer) -> Result<Vec<(String, Vec<u8>)>> {
    let GptqLinear { n, k, bits, .. } = *quantized;
    let (scheme, groups) = (layer.scheme, quantized.groups());
    let stream = Stream::dense(bits)?;
    let name = |part: &str| format!("{}.{part}", layer.prefix);
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let scales = transposed(&quantized.scales, groups, n);
    let mut tensors = vec![
        (name("weight_packed"), words(&stream.pack(&quantized.codes, n, k)?)),
        (name("weight_scale"), exact_bytes(&name("weight_scale"), layer.scale, &scales)?),
    ];
    if !scheme.sym {
        let packed = stream.pack(&quantized.zeros, groups, n)?;
        tensors.push((name("weight_zero_point"), words(&transposed(&packed, groups, stream.words(n)))));
    } else if quantized.zeros.iter().any(|&zero| u32::from(zero) != 1 << (bits - 1)) {
        return Err(Error::Internal(format!("{} is symmetric but has other zero points", layer.prefix)));
    }
    let shape = [n as i64, k as i64].map(i64::to_le_bytes).concat();
    tensors.push((name("weight_shape"), shape));
    if scheme.desc_act {
        tensors.push((name("weight_g_idx"), words(&quantized.g_idx)));
    } else if quantized.is_act_ordered(scheme.group_size)? {
        return Err(Error::Internal(format!("{} needs a weight_g_idx that is not planned", layer.prefix)));
    }
    if let (Some(bias), Some(dtype)) = (&quantized.bias, layer.bias) {
        tensors.push((name("bias"), exact_bytes(&name("bias"), dtype, bias)?));
    }
    Ok(tensors)
}

/// Reads a layer; see [`GptqLinear::read`].
pub(super) async fn read(parts: &Parts<'_>, scheme: Scheme) -> Result<GptqLinear> {
    let Scheme { bits, group_size, .. } = scheme;
    let (n, k) = features(parts).await?;
    let groups = group_count(k, group_size)?;
    let codes = {
        let stream = code_stream(parts, bits, k)?;
        let packed = parts.words("weight_packed", &[n, stream.words(k)]).await?;
        stream.unpack(&packed, n, k)?
    };
    let scales = match shape_of(parts, "weight_scale")? {
        [only] if groups == 1 && *only == n as u64 => parts.floats("weight_scale", &[n]).await?,
        _ => parts.floats("weight_scale", &[n, groups]).await?,
    };
    let scales = transposed(&scales, n, groups);
    let zeros = zeros(parts, n, groups, scheme).await?;
    let g_idx = match parts.has("weight_g_idx") {
        false => natural_g_idx(k, group_size)?,
        // What a layer without an order of its own is initialized with.
        true if parts.words("weight_g_idx", &[k]).await?.contains(&u32::MAX) => natural_g_idx(k, group_size)?,
        true => parts.g_idx("weight_g_idx", k, groups).await?,
    };
    Ok(GptqLinear { n, k, bits, codes, scales, zeros, g_idx, bias: parts.bias(n).await? })
}

/// N and K, as `weight_shape` says, which the shape of `weight_packed` only bounds.
pub(super) async fn features(parts: &Parts<'_>) -> Result<(usize, usize)> {
    let (dtype, bytes) = parts.bytes("weight_shape", &[DType::I64, DType::I32], &[2]).await?;
    let values: Vec<i64> = match dtype {
        DType::I32 => {
            bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()).collect()
        }
        _ => bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
    };
    let fits = |value: i64| u32::try_from(value).ok().and_then(|value| usize::try_from(value).ok());
    match values[..] {
        [n, k] => fits(n).zip(fits(k)),
        _ => None,
    }
    .ok_or_else(|| parts.wrong("weight_shape", format_args!("says {values:?}")))
}

fn shape_of<'a>(parts: &Parts<'a>, part: &str) -> Result<&'a [u64]> {
    Ok(&parts.checkpoint.require(&parts.name(part))?.shape)
}

/// Dense, unless the tensor is as wide as an earlier version makes it; in rows of less than a hundred
/// codes, which no real model has, both may be of one width.
fn code_stream(parts: &Parts<'_>, bits: u32, k: usize) -> Result<Stream> {
    let dense = Stream::dense(bits)?;
    let loose = Stream::whole(bits)?;
    let width = shape_of(parts, "weight_packed")?.get(1).copied().unwrap_or(0);
    Ok(if width != dense.words(k) as u64 && width == loose.words(k) as u64 { loose } else { dense })
}

/// Zero points `[groups, n]`.
pub(super) async fn zeros(parts: &Parts<'_>, n: usize, groups: usize, scheme: Scheme) -> Result<Vec<u8>> {
    let middle = 1 << (scheme.bits - 1);
    let part = "weight_zero_point";
    if !parts.has(part) {
        return match scheme.sym {
            true => Ok(vec![middle; groups * n]),
            false => Err(parts.wrong(part, "is missing, though the config says that the grid is asymmetric")),
        };
    }
    let info = parts.checkpoint.require(&parts.name(part))?;
    if info.dtype == DType::I8 {
        let shape = if info.shape.len() == 1 { vec![n] } else { vec![n, groups] };
        let (_, bytes) = parts.bytes(part, &[DType::I8], &shape).await?;
        let unsigned = |byte: u8| byte.wrapping_add(middle) & (2 * (middle - 1) + 1);
        return Ok(transposed(&bytes, n, groups).into_iter().map(unsigned).collect());
    }
    let stream = match info.shape.first() {
        Some(&rows) if rows != Stream::dense(scheme.bits)?.words(n) as u64 => Stream::whole(scheme.bits)?,
        _ => Stream::dense(scheme.bits)?,
    };
    let packed = parts.words(part, &[stream.words(n), groups]).await?;
    stream.unpack(&transposed(&packed, stream.words(n), groups), groups, n)
}

/// `[cols, rows]` of `[rows, cols]`.
fn transposed<T: Copy>(values: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..cols).flat_map(|col| (0..rows).map(move |row| values[row * cols + col])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Format::CompressedTensors;
    use crate::checkpoint::{CONFIG, Checkpoint, QuantConfig, SINGLE, header};
    use crate::storage::memory::MemorySource;
    use pollster::block_on;
    use serde_json::json;
    use std::rc::Rc;

    type Tensor = (String, DType, Vec<u64>, Vec<u8>);

    fn open(tensors: &[Tensor]) -> Checkpoint {
        let names = tensors.iter().map(|(name, dtype, shape, _)| (name.as_str(), *dtype, &shape[..]));
        let mut file = header::write(names).unwrap();
        tensors.iter().for_each(|(.., bytes)| file.extend_from_slice(bytes));
        let files = [(SINGLE, file), (CONFIG, b"{}".to_vec())];
        block_on(Checkpoint::open(Rc::new(MemorySource::new("dir", files)))).unwrap()
    }

    fn config(scheme: Scheme) -> QuantConfig {
        let weights = json!({"num_bits": scheme.bits, "type": "int", "symmetric": scheme.sym,
            "group_size": if scheme.group_size < 0 { json!(null) } else { json!(scheme.group_size) },
            "strategy": if scheme.group_size < 0 { "channel" } else { "group" },
            "actorder": scheme.desc_act.then_some("group")});
        let object = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]});
        QuantConfig::parse("test", &object).unwrap()
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn shape(n: i64, k: i64) -> Tensor {
        ("P.weight_shape".into(), DType::I64, vec![2], [n, k].map(i64::to_le_bytes).concat())
    }

    /// Signed codes −8 −7 0 1 2 3 4 7 are the word 0xfcba9810.
    #[test]
    fn four_bits_decode_to_values_worked_out_by_hand() {
        let tensors = [
            ("P.weight_packed".into(), DType::I32, vec![2, 1], words(&[0xfcba_9810, 0x8888_8888])),
            ("P.weight_scale".into(), DType::F32, vec![2, 1], words(&[0.5f32.to_bits(), 2.0f32.to_bits()])),
            shape(2, 8),
        ];
        let scheme = Scheme { bits: 4, group_size: -1, desc_act: false, sym: true };
        let layer = block_on(GptqLinear::read(&open(&tensors), "P", &config(scheme))).unwrap();
        let weight = layer.dequantize().unwrap();
        assert_eq!(weight[..8], [-4.0, -3.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.5]);
        assert_eq!(weight[8..], [0.0; 8]);
    }

    fn sample(n: usize, k: usize, scheme: Scheme) -> GptqLinear {
        let groups = group_count(k, scheme.group_size).unwrap();
        let max = (1usize << scheme.bits) - 1;
        let spread = |index: usize| index.wrapping_mul(2_654_435_761) >> 7;
        let zero =
            |index| if scheme.sym { 1 << (scheme.bits - 1) } else { (spread(index + 3) % (max + 1)) as u8 };
        let natural = natural_g_idx(k, scheme.group_size).unwrap();
        GptqLinear {
            n,
            k,
            bits: scheme.bits,
            codes: (0..n * k).map(|index| (spread(index) % (max + 1)) as u8).collect(),
            scales: (0..groups * n).map(|index| (spread(index) % 255) as f32 / 64.0 - 2.0).collect(),
            zeros: (0..groups * n).map(zero).collect(),
            g_idx: if scheme.desc_act { natural.into_iter().rev().collect() } else { natural },
            bias: Some((0..n).map(|index| index as f32 * 0.5).collect()),
        }
    }

    fn written(layer: &GptqLinear, scheme: Scheme) -> Vec<Tensor> {
        let GptqLinear { n, k, .. } = *layer;
        let stored = StoredLayer { prefix: "P", n, k, scheme, scale: DType::BF16, bias: Some(DType::BF16) };
        let tensors = CompressedTensors.tensors(layer, &stored).unwrap();
        let specs = CompressedTensors.specs(&stored).unwrap();
        assert_eq!(specs.len(), tensors.len());
        specs
            .into_iter()
            .zip(tensors)
            .map(|(spec, (name, bytes))| {
                assert_eq!(spec.name, name);
                (name, spec.dtype, spec.shape, bytes)
            })
            .collect()
    }

    /// Rows and columns that leave words unfilled included.
    #[test]
    fn a_layer_comes_back_at_every_width_group_and_grid() {
        for bits in [2, 3, 4, 8] {
            for (group_size, desc_act) in [(-1, false), (16, false), (20, true)] {
                for sym in [true, false] {
                    let scheme = Scheme { bits, group_size, desc_act, sym };
                    for (n, k) in [(64, 96), (7, 45)] {
                        let layer = sample(n, k, scheme);
                        let tensors = written(&layer, scheme);
                        assert_eq!(tensors.iter().any(|t| t.0.ends_with("zero_point")), !sym);
                        assert_eq!(tensors.iter().any(|t| t.0.ends_with("g_idx")), desc_act);
                        let back = block_on(GptqLinear::read(&open(&tensors), "P", &config(scheme))).unwrap();
                        assert_eq!(back, layer, "{scheme:?}");
                    }
                }
            }
        }
    }

    fn replace(tensors: &mut [Tensor], part: &str, dtype: DType, shape: Vec<u64>, bytes: Vec<u8>) {
        let tensor = tensors.iter_mut().find(|tensor| tensor.0.ends_with(part)).unwrap();
        *tensor = (tensor.0.clone(), dtype, shape, bytes);
    }

    #[test]
    fn what_earlier_versions_wrote_is_read() {
        let scheme = Scheme { bits: 3, group_size: -1, desc_act: false, sym: false };
        let layer = sample(7, 96, scheme);
        let mut tensors = written(&layer, scheme);
        let packed = Stream::whole(3).unwrap().pack(&layer.codes, 7, 96).unwrap();
        replace(&mut tensors, "weight_packed", DType::I32, vec![7, 10], words(&packed));
        let zeros = layer.zeros.iter().map(|&zero| zero.wrapping_sub(4)).collect();
        replace(&mut tensors, "weight_zero_point", DType::I8, vec![7, 1], zeros);
        let scales: Vec<u8> = layer.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        replace(&mut tensors, "weight_scale", DType::F32, vec![7], scales);
        tensors.push(("P.weight_g_idx".into(), DType::I32, vec![96], words(&[u32::MAX; 96])));
        let back = block_on(GptqLinear::read(&open(&tensors), "P", &config(scheme))).unwrap();
        assert_eq!(back, layer);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let scheme = Scheme { bits: 4, group_size: 16, desc_act: false, sym: false };
        let refusal = |change: &dyn Fn(&mut Vec<Tensor>)| {
            let mut tensors = written(&sample(8, 32, scheme), scheme);
            change(&mut tensors);
            block_on(GptqLinear::read(&open(&tensors), "P", &config(scheme))).unwrap_err().to_string()
        };
        let absent = refusal(&|tensors| tensors.retain(|tensor| !tensor.0.ends_with("zero_point")));
        assert!(absent.contains("P.weight_zero_point") && absent.contains("asymmetric"), "{absent}");
        let absent = refusal(&|tensors| tensors.retain(|tensor| !tensor.0.ends_with("shape")));
        assert!(absent.contains("P.weight_shape") && absent.contains("missing"), "{absent}");
        let narrow = refusal(&|tensors| {
            replace(tensors, "weight_packed", DType::I32, vec![8, 3], vec![0; 96]);
        });
        assert!(narrow.contains("P.weight_packed") && narrow.contains("[8, 4]"), "{narrow}");
        let negative = refusal(&|tensors| {
            replace(tensors, "weight_shape", DType::I64, vec![2], [-1i64, 32].map(i64::to_le_bytes).concat());
        });
        assert!(negative.contains("says [-1, 32]"), "{negative}");
    }
}

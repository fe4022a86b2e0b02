//! A quantized linear layer as the GPTQ formats store it.
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

use super::config::Scheme;
use super::dtype::DType;
use super::floats::exact_bytes;
use super::format::StoredLayer;
use super::linear::{GptqLinear, Parts, group_count, natural_g_idx};
use super::pack::{self, ZeroFormat, pack_qweight, pack_qzeros, unpack_qweight, unpack_qzeros};
use super::writer::TensorSpec;
use crate::error::Result;

/// See [`Format::specs`](super::Format::specs).
pub(super) fn specs(layer: &StoredLayer) -> Result<Vec<TensorSpec>> {
    let StoredLayer { n, k, scheme: Scheme { bits, group_size, .. }, .. } = *layer;
    let spec = |name, dtype, shape: &[usize]| {
        let shape: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
        TensorSpec::new(format!("{}.{name}", layer.prefix), dtype, shape)
    };
    let groups = group_count(k, group_size)?;
    let mut specs = vec![
        spec("qweight", DType::I32, &[pack::packed_words(k, bits)?, n]),
        spec("qzeros", DType::I32, &[groups, pack::packed_words(n, bits)?]),
        spec("scales", layer.scale, &[groups, n]),
        spec("g_idx", DType::I32, &[k]),
    ];
    specs.extend(layer.bias.map(|dtype| spec("bias", dtype, &[n])));
    Ok(specs)
}

/// See [`Format::tensors`](super::Format::tensors).
pub(super) fn tensors(
    quantized: &GptqLinear,
    layer: &StoredLayer,
    format: ZeroFormat,
) -> Result<Vec<(String, Vec<u8>)>> {
    let name = |part: &str| format!("{}.{part}", layer.prefix);
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let GptqLinear { n, k, bits, .. } = *quantized;
    let qweight = pack_qweight(&quantized.codes, n, k, bits)?;
    let qzeros = pack_qzeros(&quantized.zeros, quantized.groups(), n, bits, format)?;
    let mut tensors = vec![
        (name("qweight"), words(&qweight)),
        (name("qzeros"), words(&qzeros)),
        (name("scales"), exact_bytes(&name("scales"), layer.scale, &quantized.scales)?),
        (name("g_idx"), words(&quantized.g_idx)),
    ];
    if let (Some(bias), Some(dtype)) = (&quantized.bias, layer.bias) {
        tensors.push((name("bias"), exact_bytes(&name("bias"), dtype, bias)?));
    }
    Ok(tensors)
}

/// Reads a layer; see [`GptqLinear::read`].
pub(super) async fn read(parts: &Parts<'_>, scheme: Scheme, format: ZeroFormat) -> Result<GptqLinear> {
    let Scheme { bits, group_size, .. } = scheme;
    let (k, n) = features(parts, bits)?;
    let groups = group_count(k, group_size)?;
    let qweight = parts.words("qweight", &[pack::packed_words(k, bits)?, n]).await?;
    let codes = unpack_qweight(&qweight, n, k, bits)?;
    drop(qweight);
    let zeros = zeros(parts, groups, n, bits, format).await?;
    let scales = parts.floats("scales", &[groups, n]).await?;
    let g_idx = match parts.has("g_idx") {
        true => parts.g_idx("g_idx", k, groups).await?,
        false => natural_g_idx(k, group_size)?,
    };
    Ok(GptqLinear { n, k, bits, codes, scales, zeros, g_idx, bias: parts.bias(n).await? })
}

/// Zero points `[groups, n]`.
pub(super) async fn zeros(
    parts: &Parts<'_>,
    groups: usize,
    n: usize,
    bits: u32,
    format: ZeroFormat,
) -> Result<Vec<u8>> {
    let qzeros = parts.words("qzeros", &[groups, pack::packed_words(n, bits)?]).await?;
    unpack_qzeros(&qzeros, groups, n, bits, format)
}

/// K and N, as the shape of `qweight` gives them at `bits`.
pub(super) fn features(parts: &Parts<'_>, bits: u32) -> Result<(usize, usize)> {
    let info = parts.checkpoint.require(&parts.name("qweight"))?;
    let features = match info.shape[..] {
        [rows, n] => rows
            .checked_mul(32)
            .filter(|stream| stream.is_multiple_of(u64::from(bits)))
            .and_then(|stream| usize::try_from(stream / u64::from(bits)).ok())
            .zip(usize::try_from(n).ok()),
        _ => None,
    };
    let fits = features.filter(|&(k, n)| {
        u32::try_from(k).is_ok() && pack::packed_words(k, bits).is_ok() && pack::packed_words(n, bits).is_ok()
    });
    fits.ok_or_else(|| {
        parts.wrong(
            "qweight",
            format_args!("has the shape {:?}, which cannot hold {bits} bit codes", info.shape),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Format::{self, Gptq, GptqV2};
    use crate::checkpoint::{CONFIG, Checkpoint, QuantConfig, SINGLE, header};
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
        exact_bytes("x", DType::F16, values).unwrap()
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

    fn stored(layer: &GptqLinear, group_size: i64) -> StoredLayer<'static> {
        let GptqLinear { n, k, bits, .. } = *layer;
        let scheme = Scheme { bits, group_size, desc_act: false, sym: false };
        StoredLayer { prefix: "P", n, k, scheme, scale: DType::F16, bias: Some(DType::F16) }
    }

    #[test]
    fn a_layer_comes_back_through_its_planned_tensors_at_every_width_and_group() {
        for bits in [2, 3, 4, 8] {
            for format in [Gptq, GptqV2] {
                for group_size in [-1, 16, 32, 40] {
                    let layer = sample(bits, group_size);
                    let spec = stored(&layer, group_size);
                    let tensors = format.tensors(&layer, &spec).unwrap();
                    let specs = format.specs(&spec).unwrap();
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
                    let back = read(&stored, &config(bits, group_size, format.name())).unwrap();
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
            Format::Gptq.tensors(&layer, &stored(&layer, 32)).unwrap_err().to_string()
        };
        assert!(refusal(&|layer| layer.scales[5] = 0.1).contains("P.scales[5] = 0.1"));
        assert!(refusal(&|layer| layer.bias = Some(vec![1e9; 64])).contains("P.bias[0]"));
        assert!(refusal(&|layer| layer.zeros[2] = 0).contains("zero point 0"));
        assert!(refusal(&|layer| layer.codes[9] = 16).contains("do not fit 4 bits"));
        assert!(refusal(&|layer| layer.g_idx[0] = 3).contains("do not fit each other"));
        assert!(refusal(&|layer| layer.codes.truncate(5)).contains("do not fit each other"));
        let layer = sample(4, 32);
        let spec = stored(&layer, 32);
        assert!(specs(&StoredLayer { k: 33, ..spec }).is_err());
        assert!(specs(&stored(&layer, 0)).is_err());
        assert_eq!(specs(&StoredLayer { bias: None, ..stored(&layer, -1) }).unwrap().len(), 4);
    }
}

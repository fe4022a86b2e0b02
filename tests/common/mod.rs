//! The tiny golden models as inputs of whole runs, and the adapter that GPU tests run on.

#![allow(dead_code)] // Each test program uses a part.

pub mod job;

use std::collections::BTreeMap;
use std::path::PathBuf;

use halftone::device::{AdapterChoice, Device, Gpu, GpuOptions, pick_adapter};
use pollster::block_on;
use safetensors::SafeTensors;

pub const MODELS: [&str; 16] = [
    "llama",
    "llama_tied_rope3",
    "mistral_sliding",
    "qwen2",
    "qwen3",
    "phi3",
    "phi3_longrope",
    "gpt_neox",
    "opt",
    "gpt2",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
];
/// Of every golden model.
pub const VOCAB: usize = 320;

pub type Files = BTreeMap<String, Vec<u8>>;

pub fn directory(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(name)
}

/// config.json and model.safetensors.
pub fn model(name: &str) -> Files {
    let read = |file: &str| (file.to_owned(), std::fs::read(directory(name).join(file)).unwrap());
    ["config.json", "model.safetensors"].map(read).into()
}

/// Rows of token ids from a small generator.
pub fn rows(count: usize, len: usize, seed: u32) -> Vec<Vec<u32>> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % VOCAB as u32
    };
    (0..count).map(|_| (0..len).map(|_| next()).collect()).collect()
}

pub fn jsonl(rows: &[Vec<u32>]) -> String {
    rows.iter().map(|row| format!("{}\n", serde_json::json!({ "input_ids": row }))).collect()
}

/// The ids [2, 40] that the golden logits [2, 40, vocab] belong to, and those.
pub fn expected(name: &str) -> (Vec<Vec<u32>>, Vec<f32>) {
    expected_of(name, "")
}

/// The same of tensors whose names begin otherwise.
pub fn expected_of(name: &str, prefix: &str) -> (Vec<Vec<u32>>, Vec<f32>) {
    let bytes = std::fs::read(directory(name).join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| tensors.tensor(&format!("{prefix}{name}")).unwrap();
    let ids: Vec<u32> = bytemuck::pod_collect_to_vec(tensor("input_ids").data());
    let logits = bytemuck::pod_collect_to_vec(tensor("logits").data());
    (ids.chunks(tensor("input_ids").shape()[1]).map(<[u32]>::to_vec).collect(), logits)
}

/// exp of the mean of −ln p over what each row predicts, from its logits.
pub fn perplexity_of(rows: &[Vec<u32>], logits: &[f32]) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    let mut logits = logits.chunks(VOCAB);
    for row in rows {
        for at in 0..row.len() {
            let logits = logits.next().unwrap();
            let Some(&target) = row.get(at + 1) else { continue };
            let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            sum += total.ln() - f64::from(logits[target as usize]);
            count += 1;
        }
    }
    (sum / f64::from(count)).exp()
}

/// A changed copy of one tensor's bytes in a safetensors file.
pub fn change_tensor(files: &mut Files, name: &str, change: impl FnOnce(&mut [u8])) {
    let file = files.get_mut("model.safetensors").unwrap();
    let (header, metadata) = SafeTensors::read_metadata(file).unwrap();
    let (begin, end) = metadata.info(name).unwrap().data_offsets;
    change(&mut file[8 + header + begin..8 + header + end]);
}

/// `quant_log.csv` without its last column, the seconds: all else must repeat exactly.
pub fn without_seconds(files: Files) -> Files {
    files
        .into_iter()
        .map(|(name, bytes)| {
            if name != "quant_log.csv" {
                return (name, bytes);
            }
            let text = String::from_utf8(bytes).unwrap();
            let rows = text.lines().map(|line| format!("{}\n", line.rsplit_once(',').unwrap().0));
            (name, rows.collect::<String>().into_bytes())
        })
        .collect()
}

/// Names and lengths, when two directories differ: their bytes are no reading matter.
pub fn assert_same(a: &Files, b: &Files, what: &str) {
    let names = |files: &Files| files.iter().map(|(n, b)| (n.clone(), b.len())).collect::<Vec<_>>();
    assert_eq!(names(a), names(b), "{what}");
    for (name, bytes) in a {
        assert!(bytes == &b[name], "{what}: {name} differs");
    }
}

/// The software adapter under WebGPU's default limits (or the adapter that `HALFTONE_TEST_ADAPTER`
/// names); `None` where there is none, unless `HALFTONE_REQUIRE_ADAPTER` is set.
pub fn gpu() -> Option<Device> {
    let name = std::env::var("HALFTONE_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let choice = AdapterChoice { name: Some(name), allow_software: true };
    let opened = block_on(async {
        let adapter = pick_adapter(&choice).await?;
        Gpu::open(&adapter, &GpuOptions { default_limits: true }).await
    });
    match opened {
        Ok(gpu) => Some(Device::Gpu(gpu)),
        Err(error) => {
            assert!(std::env::var_os("HALFTONE_REQUIRE_ADAPTER").is_none(), "no test adapter: {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

//! Whole models against the logits of Hugging Face Transformers (tests/goldens/models).

mod common;

use std::ops::Range;
use std::path::PathBuf;

use common::{MODELS, gpu};
use halftone::device::Device;
use halftone::error::Result;
use halftone::model::{Block, Embedding, Head, ModelConfig, Weights, arch};
use halftone::storage::LocalFuture;
use halftone::tensor::Elem;
use pollster::block_on;
use safetensors::{Dtype, SafeTensors};

const SEQ_LEN: usize = 40;

struct Golden {
    config: ModelConfig,
    model: Vec<u8>,
    ids: Vec<u32>,
    logits: Vec<f32>,
}

impl Golden {
    fn load(name: &str) -> Self {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(name);
        let config = std::fs::read(directory.join("config.json")).unwrap();
        let expected = std::fs::read(directory.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        Self {
            config: ModelConfig::parse(&serde_json::from_slice(&config).unwrap()).unwrap(),
            model: std::fs::read(directory.join("model.safetensors")).unwrap(),
            ids: bytemuck::pod_collect_to_vec(expected.tensor("input_ids").unwrap().data()),
            logits: bytemuck::pod_collect_to_vec(expected.tensor("logits").unwrap().data()),
        }
    }

    fn weights(&self) -> SafeWeights<'_> {
        SafeWeights(SafeTensors::deserialize(&self.model).unwrap())
    }
}

struct SafeWeights<'a>(SafeTensors<'a>);

impl Weights for SafeWeights<'_> {
    fn info(&self, name: &str) -> Result<Option<(Elem, Vec<usize>)>> {
        Ok(self.0.tensor(name).ok().map(|view| {
            let elem = match view.dtype() {
                Dtype::BF16 => Elem::BF16,
                Dtype::F32 => Elem::F32,
                other => panic!("{name} is {other:?}"),
            };
            (elem, view.shape().to_vec())
        }))
    }

    fn read_rows<'a>(&'a self, name: &'a str, rows: Range<usize>) -> LocalFuture<'a, Result<Vec<u8>>> {
        let view = self.0.tensor(name).unwrap();
        let row_bytes = view.data().len() / view.shape()[0];
        let bytes = view.data()[rows.start * row_bytes..rows.end * row_bytes].to_vec();
        Box::pin(async move { Ok(bytes) })
    }
}

/// The last block's output.
fn hidden(golden: &Golden, device: &Device) -> halftone::tensor::Tensor {
    let (config, weights) = (&golden.config, golden.weights());
    let embedding = block_on(Embedding::load(config, &weights, device)).unwrap();
    let rope = config.rope_tables(device, SEQ_LEN).unwrap();
    let mut h = embedding.embed(&golden.ids, SEQ_LEN, 0).unwrap();
    for layer in 0..config.layers {
        let block = block_on(Block::load(config, layer, &weights, device)).unwrap();
        h = block_on(block.forward(h, SEQ_LEN, &rope)).unwrap();
    }
    h
}

fn check(name: &str, device: &Device) {
    let golden = Golden::load(name);
    let h = hidden(&golden, device);
    let head = block_on(Head::load(&golden.config, &golden.weights(), device)).unwrap();
    let logits = block_on(head.logits(&h).unwrap().to_f32()).unwrap();
    assert_eq!(logits.len(), golden.logits.len());
    let worst = logits
        .iter()
        .zip(&golden.logits)
        .map(|(a, b)| (a - b).abs())
        .fold(0f32, |a, b| if b.is_nan() { f32::INFINITY } else { a.max(b) });
    println!("{name} on {}: largest difference {worst:e}", device.describe());
    assert!(worst <= 2e-3, "{name}: logits differ by {worst}");

    // Each token predicts the next; what the last of a sequence predicts is of no matter here.
    let vocab = golden.config.vocab_size;
    let targets: Vec<u32> = golden.ids.iter().cycle().skip(1).take(golden.ids.len()).copied().collect();
    let got = block_on(head.nll(&h, &targets)).unwrap();
    for ((logits, &target), got) in golden.logits.chunks(vocab).zip(&targets).zip(got) {
        let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        let want = total.ln() - f64::from(logits[target as usize]);
        assert!((f64::from(got) - want).abs() < 1e-3, "{name}: nll {got}, not {want}");
    }
}

#[test]
fn logits_equal_those_of_transformers_on_the_cpu() {
    for name in MODELS {
        check(name, &Device::Cpu);
    }
}

#[test]
fn logits_equal_those_of_transformers_on_a_gpu() {
    let Some(device) = gpu() else { return };
    for name in MODELS {
        check(name, &device);
    }
}

/// A text no longer than those of the first training turns by other factors, beside longer ones too.
#[test]
fn short_texts_of_a_stretched_model_turn_as_they_did_before() {
    let golden = Golden::load("phi3_longrope");
    let (rows, want) = common::expected_of("phi3_longrope", "short_");
    let (config, weights) = (&golden.config, golden.weights());
    for positions in [rows[0].len(), SEQ_LEN] {
        let embedding = block_on(Embedding::load(config, &weights, &Device::Cpu)).unwrap();
        let rope = config.rope_tables(&Device::Cpu, positions).unwrap();
        let mut h = embedding.embed(&rows.concat(), rows[0].len(), 0).unwrap();
        for layer in 0..config.layers {
            let block = block_on(Block::load(config, layer, &weights, &Device::Cpu)).unwrap();
            h = block_on(block.forward(h, rows[0].len(), &rope)).unwrap();
        }
        let head = block_on(Head::load(config, &weights, &Device::Cpu)).unwrap();
        let logits = block_on(head.logits(&h).unwrap().to_f32()).unwrap();
        let worst = logits.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(logits.len() == want.len() && worst <= 2e-3, "{positions}: {worst}");
    }
}

#[test]
fn the_architecture_table_names_every_tensor_of_a_checkpoint() {
    for name in MODELS {
        let golden = Golden::load(name);
        let weights = golden.weights();
        let mut found: Vec<(String, Vec<usize>)> =
            weights.0.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect();
        let mut expected = arch::expected_tensors(&golden.config);
        found.sort();
        expected.sort();
        assert_eq!(expected, found, "{name}");
    }
}

#[test]
fn rows_of_the_table_embed_as_the_whole_does() {
    let golden = Golden::load("llama");
    let weights = golden.weights();
    let whole = block_on(Embedding::load(&golden.config, &weights, &Device::Cpu)).unwrap();
    let rows = Embedding::load_rows(&golden.config, &weights, &Device::Cpu, golden.ids.iter().copied());
    let rows = block_on(rows).unwrap();
    assert_eq!(
        rows.embed(&golden.ids, SEQ_LEN, 0).unwrap().f32s().unwrap(),
        whole.embed(&golden.ids, SEQ_LEN, 0).unwrap().f32s().unwrap()
    );
    let outside = Embedding::load_rows(&golden.config, &weights, &Device::Cpu, [1, 320]);
    let error = block_on(outside).err().unwrap().to_string();
    assert!(error.contains("320"), "{error}");
}

#[test]
fn a_tensor_that_is_absent_or_has_another_shape_is_named() {
    let mut golden = Golden::load("llama");
    golden.config.intermediate_size = 130;
    let error = block_on(Block::load(&golden.config, 0, &golden.weights(), &Device::Cpu)).err().unwrap();
    let error = error.to_string();
    assert!(error.contains("model.layers.0.mlp.gate_proj.weight: its shape is [128, 64]"), "{error}");
    let error = block_on(Block::load(&golden.config, 7, &golden.weights(), &Device::Cpu)).err().unwrap();
    assert!(error.to_string().contains("model.layers.7.input_layernorm.weight"), "{error}");
}

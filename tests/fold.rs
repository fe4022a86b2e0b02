//! Factors folded into a model that is not quantized: it must compute what it did, in every family.

mod common;

use std::ops::Range;

use common::job::{config_of, distance, open};
use common::{MODELS, expected, model};
use halftone::device::Device;
use halftone::error::Result;
use halftone::model::arch::{self, LinearSpec};
use halftone::model::fold::{Fold, Into, folds};
use halftone::model::{Block, Embedding, Folded, Head, ModelConfig, Stored, Weights};
use halftone::storage::LocalFuture;
use halftone::tensor::{Elem, Tensor};
use pollster::block_on;

/// The same model in f32.
struct Wide<'a>(&'a Stored);

impl Weights for Wide<'_> {
    fn info(&self, name: &str) -> Result<Option<(Elem, Vec<usize>)>> {
        Ok(self.0.info(name)?.map(|(_, shape)| (Elem::F32, shape)))
    }

    fn read_rows<'a>(&'a self, name: &'a str, rows: Range<usize>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let (elem, shape) = self.0.info(name)?.unwrap();
            let bytes = self.0.read_rows(name, rows.clone()).await?;
            let count = rows.len() * shape[1..].iter().product::<usize>();
            let values = Tensor::from_bytes(&Device::Cpu, elem, &[count], &bytes)?.to_f32().await?;
            Ok(values.iter().flat_map(|x| x.to_le_bytes()).collect())
        })
    }
}

/// Factors from a quarter to four, one for each row that makes the inputs.
fn wished(fold: &Fold, n: usize, seed: usize) -> Vec<f32> {
    let factor = |at: usize| 4f32.powf(((at * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0);
    match &fold.into {
        Into::Norm { .. } => (0..n).map(factor).collect(),
        Into::Rows { rows, .. } => rows.iter().map(|&row| factor(row)).collect(),
    }
}

/// Makes every fold of every block; how many there are, and how many stages stay as they were.
fn fold_all(config: &ModelConfig, folded: &mut Folded) -> (usize, usize) {
    let (mut count, mut left) = (0, 0);
    for layer in 0..config.layers {
        let block = arch::block(config, layer);
        let stages = arch::stages(config, layer);
        let (folds, others) = folds(config, &block);
        left += others.len();
        for (seed, fold) in folds.iter().enumerate() {
            let readers: Vec<&LinearSpec> =
                fold.stages.iter().flat_map(|&stage| &stages[stage].linears).collect();
            let s = wished(fold, readers[0].in_features, seed);
            let s = block_on(folded.effective(config, fold, &s)).unwrap();
            block_on(folded.divide(config, fold, &readers, &s)).unwrap();
            count += 1;
        }
    }
    (count, left)
}

fn logits(config: &ModelConfig, weights: &dyn Weights, rows: &[Vec<u32>]) -> Vec<f32> {
    let (device, seq_len) = (&Device::Cpu, rows[0].len());
    block_on(async {
        let rope = config.rope_tables(device, seq_len).unwrap();
        let embedding = Embedding::load(config, weights, device).await.unwrap();
        let mut h = embedding.embed(&rows.concat(), seq_len, 0).unwrap();
        for layer in 0..config.layers {
            let block = Block::load(config, layer, weights, device).await.unwrap();
            h = block.forward(h, seq_len, &rope).await.unwrap();
        }
        let head = Head::load(config, weights, device).await.unwrap();
        head.logits(&h).unwrap().to_f32().await.unwrap()
    })
}

#[test]
fn a_folded_model_gives_the_same_logits() {
    for name in MODELS {
        let stored = open(&model(name));
        let config = config_of(&stored);
        let rows = expected(name).0;
        for wide in [true, false] {
            let source = Wide(&stored);
            let source: &dyn Weights = if wide { &source } else { &stored };
            let before = logits(&config, source, &rows);
            let mut folded = Folded::new(source);
            let (count, left) = fold_all(&config, &mut folded);
            let bends = ["gpt2", "gpt_neox"].contains(&name);
            assert_eq!(left, if bends { config.layers } else { 0 }, "{name}");
            assert!(count >= 3 * config.layers, "{name}: {count}");
            let apart = distance(&logits(&config, &folded, &rows), &before);
            println!("{name}, wide {wide}: {count} folds, {apart:e}");
            // Routers keep their type, so that in 16 bits theirs is a rounding more.
            let routed = config.experts.is_some() && !wide;
            assert!(apart < if routed { 2e-2 } else { 2e-5 }, "{name}, wide {wide}: {apart:e}");
        }
    }
}

/// What is written has the types of the source, and is not what it was.
#[test]
fn norms_and_routers_keep_their_types() {
    for (name, tensors) in [
        ("llama", vec!["model.layers.0.input_layernorm.weight"]),
        ("opt", vec!["model.decoder.layers.0.final_layer_norm.bias"]),
        ("gemma3", vec![]),
        ("qwen2_moe", vec!["model.layers.0.mlp.gate.weight", "model.layers.0.mlp.shared_expert_gate.weight"]),
    ] {
        let stored = open(&model(name));
        let config = config_of(&stored);
        let mut folded = Folded::new(&stored);
        fold_all(&config, &mut folded);
        let norm = arch::block(&config, 0).sections[0].branches[0].norm.clone() + ".weight";
        for tensor in tensors.into_iter().chain([norm.as_str()]) {
            let (elem, shape) = stored.info(tensor).unwrap().unwrap();
            let was = block_on(stored.read_rows(tensor, 0..shape[0])).unwrap();
            assert_eq!(folded.info(tensor).unwrap(), Some((elem, shape)), "{tensor}");
            let bytes = folded.stored(tensor).unwrap();
            assert!(bytes.len() == was.len() && bytes != was, "{tensor}");
        }
        assert!(folded.stored("model.norm.weight").is_none());
    }
}

#[test]
fn factors_that_do_not_fit_are_refused() {
    let stored = open(&model("llama"));
    let config = config_of(&stored);
    let stages = arch::stages(&config, 0);
    let (folds, _) = folds(&config, &arch::block(&config, 0));
    let mut folded = Folded::new(&stored);
    let mut divide = |fold: usize, s: &[f32]| {
        let readers: Vec<&LinearSpec> = stages[folds[fold].stages[0]].linears.iter().collect();
        block_on(folded.divide(&config, &folds[fold], &readers, s))
    };
    let n = stages[0].linears[0].in_features;
    assert!(divide(0, &vec![1.0; n - 1]).is_err());
    assert!(divide(0, &vec![0.0; n]).is_err());
    // Query heads that share values need one factor.
    let own: Vec<f32> = (0..stages[1].linears[0].in_features).map(|j| 1.0 + j as f32).collect();
    assert!(divide(1, &own).unwrap_err().to_string().contains("two factors"));
    divide(0, &vec![2.0; n]).unwrap();
    assert!(divide(0, &vec![2.0; n]).unwrap_err().to_string().contains("twice"));
}

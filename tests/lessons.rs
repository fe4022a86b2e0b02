//! Lessons on layers of the tiny golden models: what they show is what a run has to do with.

mod common;

use std::rc::Rc;

use common::job::Job;
use common::{Files, VOCAB, change_tensor, jsonl, rows};
use half::bf16;
use halftone::gptq::scheme::{Preset, Scheme};
use halftone::lesson::layer::{Layer, Place, Subject};
use halftone::lesson::methods::{Setting, Taken};
use halftone::lesson::order::{Ordering, Orders};
use halftone::model::{ModelConfig, Stored};
use halftone::storage::memory::MemorySource;
use halftone::text::{ModelText, TextFile};
use pollster::block_on;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// Tokens of a calibration text, eight rows of 128.
const TOKENS: usize = 1024;
const SETTING: Setting = Setting { bits: 4, group_size: 32, sym: true, search: true, damp_percent: 0.01 };

fn text(seed: u32) -> TextFile {
    TextFile { name: "rows.jsonl".into(), content: jsonl(&rows(8, 128, seed)).into_bytes() }
}

/// A layer as the page's lessons see it, with what is said of the list that it is chosen from.
fn layer(files: &Files, module: &str) -> Layer {
    let stored = block_on(Stored::open(Rc::new(MemorySource::new("model", files.clone())))).unwrap();
    let config = ModelConfig::of(&stored.checkpoint).unwrap();
    let listed = Subject::layers("model", &config).layers;
    assert!(
        listed.iter().any(|of| of.module == module && of.routed == module.contains(".experts.")),
        "{module}"
    );
    let none = ModelText::new(None, None, VOCAB, "model");
    let mut subject = Subject::new("model", Rc::new(stored), &none, text(1), &text(2), TOKENS).unwrap();
    block_on(subject.layer(module, async |_, _| true)).unwrap()
}

fn orders(layer: &Layer) -> Orders {
    let place = Place { own: true, tokens: TOKENS, module: layer.module.clone() };
    block_on(Ordering { place, setting: SETTING }.solve(layer)).unwrap()
}

/// The losses of rounding and of GPTQ that a run reports for a layer, and its tokens. Only layers of the first
/// block whose inputs nothing quantized has changed are comparable.
fn run(files: Files, module: &str, skip: &[&str]) -> (f64, f64, usize) {
    let mut job = Job::new("llama", Scheme::preset(Preset::Fast, 4, Some(32)));
    job.files = files;
    job.rows = rows(8, 128, 1);
    job.output.skip = skip.iter().map(|name| (*name).to_owned()).collect();
    let (_, report) = job.run();
    let row = report.modules.into_iter().find(|row| row.module == module).unwrap();
    (row.rtn_loss.unwrap(), row.gptq_loss.unwrap(), row.tokens)
}

fn close(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-3
}

/// What the lesson says of a layer is what the run reports of it.
fn check(files: &Files, module: &str, skip: &[&str]) -> Layer {
    let (rtn, gptq, tokens) = run(files.clone(), module, skip);
    let layer = layer(files, module);
    assert_eq!(layer.inputs.tokens, tokens, "{module}");
    let plain = Setting { search: false, ..SETTING };
    let place = Place { own: true, tokens: TOKENS, module: module.to_owned() };
    let rounded = block_on(Ordering { place, setting: plain }.solve(&layer)).unwrap().rtn.loss;
    assert!(close(rounded, rtn), "{module}: rounding loses {rounded} in the lesson, {rtn} in the run");
    let found = &orders(&layer).orders[1];
    assert_eq!(found.taken, Some(Taken::Descending));
    assert!(close(found.loss, gptq), "{module}: GPTQ loses {} in the lesson, {gptq} in the run", found.loss);
    layer
}

#[test]
fn a_layer_loses_in_the_lesson_what_it_loses_in_a_run() {
    check(&common::model("llama"), "model.layers.0.self_attn.q_proj", &[]);
}

#[test]
fn transposed_weights_are_read_as_runs_read_them() {
    let layer = check(&common::model("gpt2"), "transformer.h.0.attn.c_attn", &[]);
    // [in, out] in the file.
    assert_eq!((layer.weight.shape(), layer.rows), (&[192, 64][..], 192));
}

#[test]
fn a_model_in_a_model_is_read_under_its_longer_names() {
    let plain = common::model("gemma3");
    let tensors = SafeTensors::deserialize(&plain["model.safetensors"]).unwrap();
    let views: Vec<(String, TensorView)> = tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| (name.replacen("model.", "model.language_model.", 1), view))
        .collect();
    let text: serde_json::Value = serde_json::from_slice(&plain["config.json"]).unwrap();
    let config = serde_json::json!({ "model_type": "gemma3", "text_config": text, "vision_config": {} });
    let nested = Files::from([
        ("config.json".to_owned(), config.to_string().into_bytes()),
        ("model.safetensors".to_owned(), safetensors::serialize(views, None).unwrap()),
    ]);
    let found = check(&nested, "model.language_model.layers.0.self_attn.q_proj", &[]);
    let same = layer(&plain, "model.layers.0.self_attn.q_proj");
    assert_eq!(found.inputs.diagonal, same.inputs.diagonal);
    assert_eq!(found.weight.f32s().unwrap(), same.weight.f32s().unwrap());
}

#[test]
fn an_expert_is_judged_by_the_tokens_that_come_to_it() {
    let skip = ["self_attn"];
    let layer = check(&common::model("mixtral"), "model.layers.0.block_sparse_moe.experts.1.w1", &skip);
    let (seen, held) = (layer.inputs.tokens, layer.inputs.held_tokens);
    assert!(seen < TOKENS && held < TOKENS && seen > TOKENS / 8, "{seen} and {held} of {TOKENS} tokens");
    // The mean of |x| is that of the same tokens.
    for (magnitude, square) in layer.inputs.magnitude.iter().zip(&layer.inputs.diagonal) {
        assert!(magnitude.powi(2) <= square / 2.0 * 1.001 && magnitude.powi(2) > square / 2.0 * 0.2);
    }
}

#[test]
fn dead_and_outlier_channels_are_marked() {
    let mut files = common::model("llama");
    let (dead, loud) = (5, 9);
    change_tensor(&mut files, "model.layers.1.input_layernorm.weight", |bytes| {
        bytes[2 * dead..][..2].fill(0);
        let weight = bf16::from_le_bytes([bytes[2 * loud], bytes[2 * loud + 1]]).to_f32();
        bytes[2 * loud..][..2].copy_from_slice(&bf16::from_f32(30.0 * weight).to_le_bytes());
    });
    let module = "model.layers.1.self_attn.k_proj";
    let plain = orders(&layer(&common::model("llama"), module));
    assert!(plain.dead.is_empty() && plain.outliers.is_empty(), "{:?} {:?}", plain.dead, plain.outliers);
    let layer = layer(&files, module);
    let found = orders(&layer);
    assert_eq!((&found.dead[..], &found.outliers[..]), (&[dead][..], &[loud][..]));
    assert_eq!(found.diagonal[dead], 0.0);
    assert!(found.diagonal[loud] > found.outlier * found.median);
    for taking in found.orders.iter().chain([&found.rtn]) {
        assert!(taking.loss.is_finite() && taking.held_loss.is_finite() && taking.loss > 0.0, "{taking:?}");
    }
    // Taken first, the loud channel is as exact as its grid; taken last it has all others' errors to bear.
    assert!(found.orders[1].loss < found.orders[2].loss);
}

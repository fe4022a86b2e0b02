//! Output formats and what differs from layer to layer: whole runs and what is read back.

#![cfg(not(target_arch = "wasm32"))]

mod common;

use common::job::*;
use common::*;
use halftone::checkpoint::{DType, Format, GptqLinear};
use halftone::error::Error;
use halftone::gptq::scheme::{Preset, Scheme};
use halftone::model::arch::stages;
use halftone::pipeline::events::Silent;
use halftone::pipeline::{Event, Observer, Output, Override};
use halftone::storage::memory::MemorySink;
use pollster::block_on;
use serde_json::{Value, json};

fn in_format(format: Format) -> Output {
    Output { format, ..Output::default() }
}

fn with(overrides: &[&str], skip: &[&str]) -> Output {
    Output {
        overrides: overrides.iter().map(|text| Override::parse(text).unwrap()).collect(),
        skip: skip.iter().map(|text| text.to_string()).collect(),
        ..Output::default()
    }
}

fn config(files: &Files) -> Value {
    serde_json::from_slice(&files["config.json"]).unwrap()
}

fn modules(name: &str) -> Vec<String> {
    let stored = open(&model(name));
    let config = config_of(&stored);
    let stages = (0..config.layers).flat_map(|layer| stages(&config, layer));
    stages.flat_map(|stage| stage.linears).map(|spec| spec.module).collect()
}

/// Both GPTQ formats hold the same layers to the last bit.
#[test]
fn the_second_gptq_format_differs_in_zero_points_only() {
    for sym in [true, false] {
        let scheme = Scheme { sym, ..default4() };
        let first = Job::new("qwen2", scheme.clone());
        let second = Job { output: in_format(Format::GptqV2), ..Job::new("qwen2", scheme) };
        let (first, second) = (first.run().0, second.run().0);
        assert_eq!(config(&second)["quantization_config"]["checkpoint_format"], "gptq_v2");
        let (first, second) = (open(&first), open(&second));
        for module in modules("qwen2") {
            assert_eq!(layer(&first, &module), layer(&second, &module), "{module}");
            let zeros = |stored: &halftone::model::Stored| {
                block_on(stored.checkpoint.read(&format!("{module}.qzeros"))).unwrap()
            };
            if sym {
                assert!(zeros(&first).iter().all(|&byte| byte == 0x77));
                assert!(zeros(&second).iter().all(|&byte| byte == 0x88));
            } else {
                assert_ne!(zeros(&first), zeros(&second));
            }
        }
    }
}

#[test]
fn compressed_tensors_keeps_the_models_own_type_and_behaviour() {
    let (rows, golden) = expected("qwen2");
    let reference = Scheme::preset(Preset::Reference, 4, Some(32));
    for (scheme, actorder) in [
        (default4(), json!("weight")),
        (Scheme { sym: false, ..default4() }, json!("weight")),
        (reference.clone(), json!(null)),
        (Scheme { desc_act: true, ..reference.clone() }, json!("group")),
        (Scheme { group_size: None, desc_act: true, bits: 8, ..reference }, json!(null)),
        (Scheme::preset(Preset::Rtn, 3, Some(16)), json!(null)),
    ] {
        let job = Job { output: in_format(Format::CompressedTensors), ..Job::new("qwen2", scheme.clone()) };
        let (files, report) = job.run();
        assert!(!files.contains_key("quantize_config.json"));
        let weights = config(&files)["quantization_config"]["config_groups"]["group_0"]["weights"].clone();
        assert_eq!(weights["actorder"], actorder, "{scheme:?}");
        let stored = open(&files);
        let info = |name: &str| stored.checkpoint.info(&format!("model.layers.0.self_attn.q_proj.{name}"));
        assert_eq!(info("weight_scale").unwrap().dtype, DType::BF16);
        assert_eq!(info("bias").unwrap().dtype, DType::BF16);
        assert_eq!(info("weight_zero_point").is_some(), !scheme.sym);
        assert_eq!(info("weight_g_idx").is_some(), actorder == "group");
        let bias = "model.layers.0.self_attn.q_proj.bias";
        let before = job.stored().unwrap();
        let (was, is) = (before.checkpoint.read(bias), stored.checkpoint.read(bias));
        assert_eq!(block_on(was).unwrap(), block_on(is).unwrap());
        let moved = distance(&logits(&stored, &rows), &golden);
        let limit = if scheme.bits == 3 { 0.3 } else { 0.15 };
        assert!(moved > 1e-4 && moved < limit, "{scheme:?}: logits moved by {moved}");
        assert!(report.loss_ratio().is_none_or(|ratio| ratio < 1.0));
        let warned = job.plan(&before).unwrap().warnings;
        assert_eq!(warned.iter().any(|text| text.contains("actorder")), actorder == "group", "{warned:?}");
    }
}

/// Layers that the GPTQ formats cannot hold are refused there by name, and written as
/// compressed-tensors.
#[test]
fn what_a_format_cannot_hold_is_refused_at_plan_time() {
    let odd = |files: &mut Files| {
        let text = String::from_utf8(files["config.json"].clone()).unwrap();
        let changed = text.replace("\"vocab_size\": 320", "\"vocab_size\": 319");
        files.insert("config.json".into(), changed.into_bytes());
    };
    let mut files = model("llama");
    odd(&mut files);
    // Embedding and head of 319 tokens.
    let shrunk = shrink_rows(&files, &["model.embed_tokens.weight", "lm_head.weight"], 319);
    let head = Output { lm_head: true, ..Output::default() };
    let mut job = Job { files: shrunk, output: head, ..Job::new("llama", default4()) };
    job.rows.iter_mut().flatten().for_each(|id| *id %= 319);
    let error = job.refusal();
    assert_says(&error, 2, &["lm_head has 319 output features", "--format compressed-tensors"]);
    job.output.format = Format::CompressedTensors;
    let (files, _) = job.run();
    let head = layer(&open(&files), "lm_head");
    assert_eq!((head.n, head.k), (319, 64));
}

fn assert_says(error: &Error, code: u8, words: &[&str]) {
    assert_eq!(error.exit_code(), code, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} should say {word}");
    }
}

/// The file with only the first `rows` rows of some tensors.
fn shrink_rows(files: &Files, names: &[&str], rows: usize) -> Files {
    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;
    let tensors = SafeTensors::deserialize(&files["model.safetensors"]).unwrap();
    let views: Vec<(String, TensorView)> = tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            if !names.contains(&name.as_str()) {
                return (name, view);
            }
            let shape = vec![rows, view.shape()[1]];
            let bytes = &view.data()[..rows * shape[1] * 2];
            let view = TensorView::new(view.dtype(), shape, bytes).unwrap();
            (name, view)
        })
        .collect();
    let mut changed = files.clone();
    changed.insert("model.safetensors".into(), safetensors::serialize(views, None).unwrap());
    changed
}

const DOWN_8: &str = "down_proj=bits:8,group_size:64";
const FIRST_3: &str = r"layers\.0\.self_attn\.[qkv]=bits:3,asym";

#[test]
fn layers_differ_as_asked_in_every_format() {
    let (rows, golden) = expected("llama");
    let plain = distance(&logits(&open(&Job::new("llama", default4()).run().0), &rows), &golden);
    for format in Format::ALL {
        let output = Output { format, ..with(&[FIRST_3, DOWN_8], &["layers.1.mlp.(gate|up)"]) };
        let job = Job { output, ..Job::new("llama", default4()) };
        let (files, report) = job.run();
        let (stored, dense) = (open(&files), job.stored().unwrap());
        let quant = stored.quant.as_ref().unwrap();
        for module in modules("llama") {
            let scheme = quant.scheme_of(&module).unwrap();
            if module.contains("layers.1.mlp.gate") || module.contains("layers.1.mlp.up") {
                assert_eq!(scheme, None, "{module}");
                assert!(!GptqLinear::is_in(&stored.checkpoint, &module));
                let name = format!("{module}.weight");
                let (was, is) = (dense.checkpoint.read(&name), stored.checkpoint.read(&name));
                assert_eq!(block_on(was).unwrap(), block_on(is).unwrap());
                continue;
            }
            let scheme = scheme.unwrap();
            let expected = match &module {
                m if m.contains("down_proj") => (8, 64, true),
                m if m.contains("layers.0.self_attn") && !m.contains("o_proj") => (3, 32, false),
                _ => (4, 32, true),
            };
            assert_eq!((scheme.bits, scheme.group_size, scheme.sym), expected, "{module}");
            let quantized = layer(&stored, &module);
            assert_eq!(quantized.bits, scheme.bits);
            assert_eq!(quantized.groups(), quantized.k / scheme.group_size as usize);
            let row = report.modules.iter().find(|row| row.module == module).unwrap();
            assert_eq!((row.bits, row.group), (scheme.bits, scheme.group_size));
        }
        let moved = distance(&logits(&stored, &rows), &golden);
        assert!(moved < 3.0 * plain, "{format}: {moved}, plainly {plain}");
        let object = &config(&files)["quantization_config"];
        match format {
            Format::CompressedTensors => {
                assert_eq!(object["config_groups"].as_object().unwrap().len(), 3);
                let ignored = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head"];
                assert_eq!(object["ignore"], json!(ignored));
            }
            _ => {
                let dynamic = object["dynamic"].as_object().unwrap();
                assert_eq!(dynamic.len(), 3, "{dynamic:?}");
                // Serving engines ask for fused layers.
                let fused = r"-:^model\.layers\.1\.(?:mlp\.gate_proj|mlp\.gate_up_proj|mlp\.up_proj)$";
                let found = dynamic
                    .keys()
                    .any(|key| key == &fused.replace(r"\.(?:mlp", r"(?:\.mlp").replace("|mlp", r"|\.mlp"));
                assert!(found, "{dynamic:?}");
            }
        }
    }
}

#[test]
fn a_run_with_differences_stopped_anywhere_goes_on_to_the_same_bytes() {
    for format in [Format::Gptq, Format::CompressedTensors] {
        let lm_head = true;
        let output =
            Output { format, lm_head, ..with(&[FIRST_3], &["layers.1.mlp.(gate|up)", "layers.2.*o_proj"]) };
        let mut job = Job { output, shard_bytes: Some(20_000), ..Job::new("llama", default4()) };
        let want = without_seconds(job.run().0);
        for at in (0..200).step_by(11) {
            let sink = MemorySink::new();
            job.resume = false;
            if job.run_with(&sink, &mut StopAt::new(at)).is_ok() {
                assert!(at > 80, "a run of {at} steps");
                continue;
            }
            assert!(sink.get("config.json").is_none());
            job.resume = true;
            job.run_with(&sink, &mut Silent).unwrap();
            assert_same(&without_seconds(sink.files()), &want, &format!("{format}, stopped at {at}"));
        }
    }
}

#[test]
fn other_differences_are_another_run() {
    let stopped = Job { output: with(&[DOWN_8], &[]), ..Job::new("llama", default4()) };
    let sink = MemorySink::new();
    stopped.run_with(&sink, &mut StopAt::new(30)).err().unwrap();
    let refusal = |output: Output, shard_bytes: Option<u64>, words: &[&str]| {
        let job = Job { resume: true, output, shard_bytes, ..Job::new("llama", default4()) };
        assert_says(&job.run_with(&sink, &mut Silent).err().unwrap(), 7, words);
    };
    refusal(Output::default(), None, &["--override", "was down_proj=bits:8,group_size:64, is none"]);
    refusal(with(&[DOWN_8], &["o_proj"]), None, &["--skip", "is o_proj"]);
    refusal(Output { format: Format::GptqV2, ..with(&[DOWN_8], &[]) }, None, &["--format", "is gptq_v2"]);
    refusal(Output { lm_head: true, ..with(&[DOWN_8], &[]) }, None, &["--quantize-lm-head"]);
    refusal(with(&[DOWN_8], &[]), Some(20_000), &["--shard-size"]);
}

#[test]
fn a_head_of_its_own_is_quantized_and_a_tied_one_refused() {
    let lm_head = Output { lm_head: true, ..Output::default() };
    let (rows, golden) = expected("llama");
    let plain = distance(&logits(&open(&Job::new("llama", default4()).run().0), &rows), &golden);
    for format in Format::ALL {
        let output = Output { format, ..lm_head.clone() };
        let job = Job { output, ..Job::new("llama", default4()) };
        let (files, report) = job.run();
        let stored = open(&files);
        assert!(stored.checkpoint.info("lm_head.weight").is_none());
        let row = report.modules.last().unwrap();
        assert_eq!((row.module.as_str(), row.layer, row.input, row.output), ("lm_head", 3, 64, VOCAB));
        assert!(row.gptq_loss.unwrap() < row.rtn_loss.unwrap());
        let object = &config(&files)["quantization_config"];
        match format {
            Format::CompressedTensors => assert_eq!(object["ignore"], json!([])),
            _ => assert_eq!(object["lm_head"], true),
        }
        let moved = distance(&logits(&stored, &rows), &golden);
        assert!(moved > plain && moved < 2.5 * plain, "{format}: {moved}, with a dense head {plain}");
    }
    let tied = Job { output: lm_head, ..Job::new("qwen2", default4()) };
    assert_says(&tied.refusal(), 2, &["--quantize-lm-head", "tie_word_embeddings"]);
}

#[test]
fn differences_that_cannot_be_are_refused_before_the_work() {
    let refusal = |output: Output| Job { output, ..Job::new("llama", default4()) }.refusal();
    assert_says(
        &refusal(with(&["q_proj=bits:8"], &[])),
        2,
        &["q_proj (8 bits", "k_proj (4 bits", "one matrix"],
    );
    assert_says(&refusal(with(&[], &["up_proj"])), 2, &["gate_proj (4 bits", "up_proj (16 bits)"]);
    assert_says(&refusal(with(&["dwn=bits:8"], &[])), 2, &["matches no linear layer", "mlp.down_proj"]);
    let group = refusal(with(&["o_proj=group_size:48"], &[]));
    assert_says(&group, 2, &["--group-size 48 does not divide the 64 inputs", "o_proj", "16, 32, 64"]);
    assert_says(&refusal(with(&[], &["."])), 2, &["--skip leaves no layer"]);
    let rtn = Job {
        output: with(&["o_proj=desc_act"], &[]),
        ..Job::new("llama", Scheme::preset(Preset::Rtn, 4, None))
    };
    assert_says(&rtn.refusal(), 2, &["--override \"o_proj\"", "--preset rtn takes no order"]);
}

/// Changes a byte of a finished file when the last block is done.
struct Spoil {
    sink: MemorySink,
    file: &'static str,
}

impl Observer for Spoil {
    fn event(&mut self, event: Event) {
        if let Event::BlockDone { block: 2, .. } = event {
            let mut bytes = self.sink.get(self.file).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            self.sink.insert(self.file, bytes);
        }
    }
}

#[test]
fn a_file_that_does_not_read_as_it_was_written_is_no_result() {
    let job = Job { shard_bytes: Some(50_000), ..Job::new("llama", default4()) };
    let sink = MemorySink::new();
    let whole = job.run().0;
    let file = "model-00002-of-00005.safetensors";
    assert!(whole.contains_key(file), "{:?}", whole.keys());
    let mut observer = Spoil { sink: sink.clone(), file };
    let error = job.run_with(&sink, &mut observer).err().unwrap();
    assert_says(&error, 4, &["verify", file, "tensor", "does not read as it was written"]);
    assert!(sink.get("config.json").is_none(), "it does not look finished");
}

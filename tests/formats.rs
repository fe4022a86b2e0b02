//! Output formats and what differs from layer to layer: whole runs and what is read back.

#![cfg(not(target_arch = "wasm32"))]

mod common;

use std::rc::Rc;

use common::job::*;
use common::*;
use halftone::checkpoint::{DType, Format, GptqLinear};
use halftone::device::Device;
use halftone::error::Error;
use halftone::eval::perplexity;
use halftone::gptq::scheme::{Preset, Scheme};
use halftone::model::arch::stages;
use halftone::pipeline::check::{Findings, Severity, check};
use halftone::pipeline::convert;
use halftone::pipeline::events::Silent;
use halftone::pipeline::{Event, Observer, Output, Override};
use halftone::storage::memory::{MemorySink, MemorySource};
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
        let mut whole = StopAt::new(usize::MAX);
        let sink = MemorySink::new();
        job.run_with(&sink, &mut whole).unwrap();
        let want = without_seconds(sink.files());
        for at in 0..whole.passed.get() {
            let sink = MemorySink::new();
            job.resume = false;
            let error = job.run_with(&sink, &mut StopAt::new(at)).err().unwrap().to_string();
            let head = at + 1 == whole.passed.get();
            assert!(
                error.contains(if head { "in the output head" } else { "stopped on request" }),
                "{error}"
            );
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
        let scores = logits(&stored, &rows);
        let moved = distance(&scores, &golden);
        // A packed head has its own way to a text's loss.
        let text = segments(&rows).unwrap();
        let scored = block_on(perplexity(&stored, &text, &Device::Cpu, async |_, _| true)).unwrap();
        let want = perplexity_of(&rows, &scores);
        assert!((scored.perplexity / want - 1.0).abs() < 1e-5, "{} is not {want}", scored.perplexity);
        assert!(moved > plain && moved < 2.5 * plain, "{format}: {moved}, with a dense head {plain}");
    }
    let tied = Job { output: lm_head, ..Job::new("qwen2", default4()) };
    assert_says(&tied.refusal(), 2, &["--quantize-lm-head", "tie_word_embeddings"]);
}

/// Hidden size 64, intermediate size 128: each layer has the largest group that fits, an override its own.
#[test]
fn automatic_groups_are_the_largest_that_divide_each_layer() {
    for format in Format::ALL {
        let output =
            Output { format, auto_groups: true, ..with(&["o_proj=group_size:16", "gate|up=bits:8"], &[]) };
        let job = Job { output, ..Job::new("llama", Scheme::preset(Preset::Default, 4, Some(128))) };
        let plan = job.plan(&job.stored().unwrap()).unwrap();
        let sizes = |module: &str| {
            let found = plan.modules.iter().filter(|plan| plan.module.ends_with(module));
            found.map(|plan| (plan.bits, plan.group)).collect::<std::collections::BTreeSet<_>>()
        };
        for (module, size) in
            [("q_proj", (4, 64)), ("o_proj", (4, 16)), ("up_proj", (8, 64)), ("down_proj", (4, 128))]
        {
            assert_eq!(sizes(module), [size].into(), "{module}");
        }
        assert_eq!(plan.scheme.group_size, Some(64));
        let (files, _) = job.run();
        let stored = open(&files);
        let quant = stored.quant.as_ref().unwrap();
        for module in &plan.modules {
            assert_eq!(
                quant.scheme_of(&module.module).unwrap().unwrap().group_size,
                module.group,
                "{format}"
            );
        }
        let found = block_on(check(Rc::new(MemorySource::new("model", files)))).unwrap();
        assert_eq!(found.count(Severity::Error), 0, "{found:?}");
    }
    // One size for all needs no mention.
    let output = Output { auto_groups: true, ..with(&[], &["down_proj"]) };
    let job = Job { output, ..Job::new("llama", Scheme::preset(Preset::Rtn, 4, Some(128))) };
    let config = config(&job.run().0);
    assert_eq!(config["quantization_config"]["group_size"], 64);
    assert!(!config["quantization_config"]["dynamic"].to_string().contains("+:"), "{config}");
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
    assert_says(
        &group,
        2,
        &["--group-size 48 does not divide the 64 inputs", "o_proj", "16, 32, 64", "--group-size auto"],
    );
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
    let file = "model-00002-of-00004.safetensors";
    assert!(whole.contains_key(file), "{:?}", whole.keys());
    let mut observer = Spoil { sink: sink.clone(), file };
    let error = job.run_with(&sink, &mut observer).err().unwrap();
    assert_says(&error, 4, &["verify", file, "tensor", "does not read as it was written"]);
    assert!(sink.get("config.json").is_none(), "it does not look finished");
}

/// The llama model with q, k, v and gate, up stored as phi3 stores them.
fn as_phi3(files: &Files) -> Files {
    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;
    let tensors = SafeTensors::deserialize(&files["model.safetensors"]).unwrap();
    let bytes = |name: &str| tensors.tensor(name).unwrap().data().to_vec();
    let mut stacked: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, view) in tensors.tensors() {
        let Some((stem, _)) =
            name.split_once("q_proj.weight").or_else(|| name.split_once("gate_proj.weight"))
        else {
            if !["k_proj", "v_proj", "up_proj"].iter().any(|part| name.contains(part)) {
                stacked.push((name, view.shape().to_vec(), view.data().to_vec()));
            }
            continue;
        };
        let (parts, fused): (&[&str], _) = match name.contains("q_proj") {
            true => (&["q_proj", "k_proj", "v_proj"], "qkv_proj"),
            false => (&["gate_proj", "up_proj"], "gate_up_proj"),
        };
        let rows: Vec<u8> = parts.iter().flat_map(|part| bytes(&format!("{stem}{part}.weight"))).collect();
        let cols = view.shape()[1];
        stacked.push((format!("{stem}{fused}.weight"), vec![rows.len() / 2 / cols, cols], rows));
    }
    let views = stacked.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    let mut fused = files.clone();
    fused.insert("model.safetensors".into(), safetensors::serialize(views, None).unwrap());
    let text = String::from_utf8(files["config.json"].clone()).unwrap();
    fused.insert("config.json".into(), text.replace("\"llama\"", "\"phi3\"").into_bytes());
    fused
}

/// A model whose experts are stored with all of a layer's in one tensor, as Transformers 5 holds them.
fn with_fused_experts(files: &Files, mixtral: bool) -> Files {
    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;
    let tensors = SafeTensors::deserialize(&files["model.safetensors"]).unwrap();
    let [gate, up, down] = if mixtral { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
    let mut parts: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, view) in tensors.tensors() {
        let renamed = name.replace(".block_sparse_moe.", ".mlp.");
        let Some((prefix, rest)) = name.split_once(".experts.") else {
            parts.push((renamed, view.shape().to_vec(), view.data().to_vec()));
            continue;
        };
        // The first expert's stand for all.
        let fused = match rest {
            _ if rest == format!("0.{gate}.weight") => ("gate_up_proj", &[gate, up][..]),
            _ if rest == format!("0.{down}.weight") => ("down_proj", &[down][..]),
            _ => continue,
        };
        let mut bytes = Vec::new();
        let mut experts = 0;
        while tensors.tensor(&format!("{prefix}.experts.{experts}.{gate}.weight")).is_ok() {
            for part in fused.1 {
                let name = format!("{prefix}.experts.{experts}.{part}.weight");
                bytes.extend_from_slice(tensors.tensor(&name).unwrap().data());
            }
            experts += 1;
        }
        let shape = vec![experts, view.shape()[0] * fused.1.len(), view.shape()[1]];
        let (prefix, _) = renamed.split_once(".experts.").unwrap();
        parts.push((format!("{prefix}.experts.{}", fused.0), shape, bytes));
    }
    let views = parts.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    let mut fused = files.clone();
    fused.insert("model.safetensors".into(), safetensors::serialize(views, None).unwrap());
    fused
}

/// They are seen as layers of their own: equal logits, and the same result to the last byte.
#[test]
fn experts_in_one_tensor_are_read_as_they_are() {
    for name in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"] {
        let separate = Job::new(name, default4());
        let files = with_fused_experts(&separate.files, name == "mixtral");
        assert!(open(&files).checkpoint.source().files().len() == separate.files.len());
        let header = String::from_utf8_lossy(&files["model.safetensors"][..4000]);
        assert!(header.contains("mlp.experts.gate_up_proj") && !header.contains("experts.0."), "{name}");
        let (rows, golden) = expected(name);
        let (a, b) = (logits(&open(&separate.files), &rows), logits(&open(&files), &rows));
        assert_eq!(a, b, "{name}");
        assert!(distance(&b, &golden) < 1e-4, "{name}");
        let fused = Job { files, ..Job::new(name, default4()) };
        assert_same(&without_seconds(separate.run().0), &without_seconds(fused.run().0), name);
    }
}

/// Rows do not influence each other: a fused layer gets the codes of the layers that it is made of.
#[test]
fn fused_layers_are_quantized_as_separate_ones_are() {
    // Held-out rows choose for a matrix as a whole, so that the preset default may choose otherwise.
    let separate = Job::new("llama", fast4());
    let fused = Job { files: as_phi3(&separate.files), ..Job::new("llama", fast4()) };
    let (rows, _) = expected("llama");
    let (a, b) = (separate.run().0, fused.run().0);
    let (a, b) = (open(&a), open(&b));
    for (prefix, parts, whole) in [
        ("self_attn", &["q_proj", "k_proj", "v_proj"][..], "qkv_proj"),
        ("mlp", &["gate_proj", "up_proj"], "gate_up_proj"),
        ("mlp", &["down_proj"], "down_proj"),
    ] {
        for block in 0..3 {
            let of = |stored, part: &str| layer(stored, &format!("model.layers.{block}.{prefix}.{part}"));
            let codes: Vec<u8> = parts.iter().flat_map(|part| of(&a, part).codes).collect();
            assert!(codes == of(&b, whole).codes, "block {block}, {whole}");
            if let [gate, up] = parts {
                // As they are read where another program has taken the layer apart.
                assert_eq!(of(&a, gate).above(of(&a, up)), Some(of(&b, whole)));
                let down = of(&b, "down_proj");
                assert_eq!(of(&a, gate).above(down), None);
            }
        }
    }
    assert_eq!(logits(&a, &rows), logits(&b, &rows));
}

// From format to format.

fn convert_to(files: &Files, format: Format) -> halftone::error::Result<Files> {
    block_on(async {
        let stored = open(files);
        let quant = stored.quant.as_ref().unwrap();
        let mut steps = Vec::new();
        let mut progress = |done, all| {
            steps.push((done, all));
            true
        };
        let plan = convert::plan(&stored.checkpoint, quant, format, 40_000, &mut progress).await?;
        let sink = MemorySink::new();
        plan.write(Rc::new(sink.clone()), &mut progress).await?;
        let all = 2 * plan.layers();
        assert_eq!(steps, (0..all).map(|done| (done, all)).collect::<Vec<_>>());
        Ok(sink.files())
    })
}

/// Every tensor by its name.
fn tensors(files: &Files) -> Vec<(String, DType, Vec<u64>, Vec<u8>)> {
    let stored = open(files);
    let mut tensors: Vec<_> = stored
        .checkpoint
        .tensors()
        .iter()
        .map(|info| {
            let bytes = block_on(stored.checkpoint.read(&info.name)).unwrap();
            (info.name.clone(), info.dtype, info.shape.clone(), bytes)
        })
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

#[test]
fn a_round_trip_through_any_format_gives_the_same_tensors() {
    let reference = Scheme::preset(Preset::Reference, 4, Some(32));
    for (name, scheme, output) in [
        ("qwen2", default4(), Output::default()),
        ("qwen2", Scheme { sym: false, ..default4() }, Output::default()),
        ("llama", Scheme { desc_act: true, ..reference.clone() }, Output::default()),
        ("llama", Scheme { bits: 3, ..reference }, Output { lm_head: true, ..with(&[DOWN_8], &["o_proj"]) }),
    ] {
        let mut job = Job { output, ..Job::new(name, scheme.clone()) };
        job.files.insert("tokenizer.json".into(), b"not looked at".to_vec());
        let first = job.run().0;
        let (rows, _) = expected(name);
        let want = logits(&open(&first), &rows);
        for between in [Format::GptqV2, Format::CompressedTensors] {
            let other = convert_to(&first, between).unwrap();
            assert!(other.keys().filter(|name| name.ends_with(".safetensors")).count() > 1);
            assert_eq!(other["tokenizer.json"], b"not looked at");
            let (before, after) = (open(&first), open(&other));
            for module in modules(name) {
                if GptqLinear::is_in(&before.checkpoint, &module) {
                    assert_eq!(layer(&before, &module), layer(&after, &module), "{module}");
                }
                let scheme = |stored: &halftone::model::Stored| {
                    stored.quant.as_ref().unwrap().scheme_of(&module).unwrap()
                };
                assert_eq!(scheme(&before), scheme(&after), "{module}");
            }
            assert_eq!(logits(&after, &rows), want, "{scheme:?} as {between}");
            assert_eq!(errors(&other), Vec::<String>::new(), "{scheme:?} as {between}");
            let back = convert_to(&other, Format::Gptq).unwrap();
            assert_eq!(tensors(&back), tensors(&first), "{scheme:?} through {between}");
            let scheme_of = |files: &Files| {
                let object = config(files)["quantization_config"].clone();
                ["bits", "group_size", "sym", "desc_act", "lm_head", "dynamic"].map(|key| object[key].clone())
            };
            assert_eq!(scheme_of(&back), scheme_of(&first));
        }
    }
}

/// The scales that compressed-tensors has in the model's BF16 are numbers of F16 too.
#[test]
fn compressed_tensors_becomes_gptq_with_the_same_weights() {
    let output = in_format(Format::CompressedTensors);
    let (first, _) = Job { output, ..Job::new("qwen2", Scheme { sym: false, ..default4() }) }.run();
    let converted = convert_to(&first, Format::Gptq).unwrap();
    let (before, after) = (open(&first), open(&converted));
    for module in modules("qwen2") {
        assert_eq!(layer(&before, &module), layer(&after, &module), "{module}");
    }
    assert_eq!(config(&converted)["quantization_config"]["meta"]["converter"][0], "halftone:0.1.0");
}

/// What a loader is known to refuse of the result is told as `quantize` tells it of the same.
#[test]
fn a_conversion_knows_what_loaders_refuse() {
    let ordered = Scheme { desc_act: true, ..Scheme::preset(Preset::Reference, 4, Some(32)) };
    for (name, scheme, output, format, told) in [
        ("llama", default4(), Output::default(), Format::GptqV2, 0),
        ("llama", ordered, Output::default(), Format::CompressedTensors, 1),
        ("llama", Scheme { sym: false, ..default4() }, in_format(Format::GptqV2), Format::Gptq, 1),
        ("llama", default4(), Output { lm_head: true, ..with(&[DOWN_8], &[]) }, Format::GptqV2, 2),
        ("mixtral", default4(), in_format(Format::CompressedTensors), Format::Gptq, 2),
    ] {
        let files = Job { output: output.clone(), ..Job::new(name, scheme.clone()) }.run().0;
        let stored = open(&files);
        let quant = stored.quant.as_ref().unwrap();
        let notes = block_on(convert::plan(&stored.checkpoint, quant, format, 1 << 30, &mut |_, _| true));
        let mut notes = notes.unwrap().notes;
        notes.retain(|note| !note.starts_with("scales stay in F16"));
        let direct = Job { output: Output { format, ..output }, ..Job::new(name, scheme) };
        let warnings = direct.plan(&direct.stored().unwrap()).unwrap().warnings;
        assert_eq!(notes.len(), told, "{name} as {format}: {notes:?}");
        assert!(notes.iter().all(|note| warnings.contains(note)), "{notes:?}, not of {warnings:?}");
    }
}

fn edit_config(files: &mut Files, edit: impl FnOnce(&mut Value)) {
    let mut value = config(files);
    edit(&mut value["quantization_config"]);
    files.insert("config.json".into(), value.to_string().into_bytes());
    // It must not contradict the other one by accident.
    files.remove("quantize_config.json");
}

#[test]
fn what_another_format_cannot_hold_is_refused_by_name() {
    let refusal = |files: &Files, format, words: &[&str]| {
        assert_says(&convert_to(files, format).expect_err("must be refused"), 3, words);
    };
    let (gptq, _) = Job::new("llama", default4()).run();
    let error = convert_to(&gptq, Format::Gptq).err().unwrap();
    assert_says(&error, 2, &["in the format gptq already"]);
    let (gpt2, _) = Job::new("gpt2", default4()).run();
    refusal(&gpt2, Format::CompressedTensors, &["Conv1D", "--format gptq"]);

    let scheme = Scheme { sym: false, ..default4() };
    let (mut v2, _) = Job { output: in_format(Format::GptqV2), ..Job::new("llama", scheme) }.run();
    change_tensor(&mut v2, "model.layers.1.self_attn.o_proj.qzeros", |bytes| bytes[5] &= 0xf0);
    refusal(&v2, Format::Gptq, &["layers.1.self_attn.o_proj", "zero points of 0", "gptq_v2"]);
    convert_to(&v2, Format::CompressedTensors).unwrap();
    edit_config(&mut v2, |quant| quant["sym"] = json!(true));
    refusal(&v2, Format::Gptq, &["q_proj is symmetric, but its zero points are others", "inspect --check"]);

    let mut uneven = gptq.clone();
    change_tensor(&mut uneven, "model.layers.2.mlp.up_proj.g_idx", |bytes| bytes[0] = 1);
    refusal(
        &uneven,
        Format::CompressedTensors,
        &["layers.2.mlp.up_proj", "group 0 has 31 columns instead of 32"],
    );

    let (mut tiny, _) =
        Job { output: in_format(Format::CompressedTensors), ..Job::new("llama", default4()) }.run();
    change_tensor(&mut tiny, "model.layers.0.mlp.up_proj.weight_scale", |bytes| {
        bytes[..2].copy_from_slice(&half::bf16::from_f32(1e-9).to_le_bytes());
    });
    refusal(&tiny, Format::Gptq, &["layers.0.mlp.up_proj", "a scale is not a value of F16"]);
}

// What a loader would trip over.

fn found(files: &Files) -> Findings {
    block_on(check(Rc::new(MemorySource::new("dir", files.clone())))).unwrap()
}

fn errors(files: &Files) -> Vec<String> {
    let errors = found(files).findings.into_iter().filter(|finding| finding.severity == Severity::Error);
    errors.map(|finding| format!("{}: {}", finding.places.join(" "), finding.problem)).collect()
}

/// That there are no errors but one, which says all of `words`.
fn one_error(files: &Files, words: &[&str]) {
    let errors = errors(files);
    assert_eq!(errors.len(), 1, "{errors:#?}");
    for word in words {
        assert!(errors[0].contains(word), "{errors:#?} should say {word}");
    }
}

/// `files` without one tensor.
fn without(files: &Files, name: &str) -> Files {
    use safetensors::SafeTensors;
    let tensors = SafeTensors::deserialize(&files["model.safetensors"]).unwrap();
    let kept: Vec<_> = tensors.tensors().into_iter().filter(|(other, _)| other != name).collect();
    assert!(kept.len() < tensors.len(), "{name} is not there");
    let metadata = Some([("format".to_owned(), "pt".to_owned())].into());
    let mut changed = files.clone();
    changed.insert("model.safetensors".into(), safetensors::serialize(kept, metadata).unwrap());
    changed
}

#[test]
fn a_healthy_result_has_no_errors_in_any_format() {
    for format in Format::ALL {
        let output = Output { format, lm_head: true, ..with(&[FIRST_3], &["layers.1.mlp.(gate|up)"]) };
        let (files, _) = Job { output, ..Job::new("llama", default4()) }.run();
        let found = found(&files);
        assert_eq!(found.count(Severity::Error), 0, "{:#?}", found.findings);
        assert_eq!((found.format, found.modules), (Some(format), 20));
        let says = |severity, word: &str| {
            found
                .findings
                .iter()
                .any(|finding| finding.severity == severity && finding.problem.contains(word))
        };
        assert!(says(Severity::Warning, "no tokenizer"));
        assert!(says(Severity::Note, "Marlin) do not take 3 bits"), "{:#?}", found.findings);
        assert!(says(
            Severity::Note,
            "over 4, 8 devices does not divide o_proj: 64 input features in groups of 32"
        ));
    }
    let dense = found(&model("llama"));
    assert_eq!((dense.count(Severity::Error), dense.modules), (0, 0));
    assert!(dense.findings.iter().any(|finding| finding.problem.contains("not quantized")));
}

#[test]
fn a_broken_gptq_result_is_found_out() {
    let run = |scheme: Scheme, format| Job { output: in_format(format), ..Job::new("llama", scheme) }.run().0;
    let broken = |files: &Files, edit: &dyn Fn(&mut Value)| {
        let mut files = files.clone();
        edit_config(&mut files, edit);
        files
    };
    let good = run(default4(), Format::Gptq);
    // Zero points of the other version: 0x8888 in a v1 file.
    let v2 = broken(&run(default4(), Format::GptqV2), &|quant| quant["checkpoint_format"] = json!("gptq"));
    one_error(&v2, &["model.layers.0.self_attn.q_proj", "down_proj", "stored as gptq_v2 stores them"]);
    let v1 = broken(&good, &|quant| quant["checkpoint_format"] = json!("gptq_v2"));
    one_error(&v1, &["stored as gptq stores them"]);
    let ordered = Scheme { desc_act: true, ..Scheme::preset(Preset::Reference, 4, Some(32)) };
    let ordered = run(ordered, Format::Gptq);
    one_error(
        &broken(&ordered, &|quant| quant["desc_act"] = json!(false)),
        &["desc_act", "kernels ignore it"],
    );
    let natural = found(&broken(&good, &|quant| quant["desc_act"] = json!(true)));
    assert_eq!(natural.count(Severity::Error), 0);
    assert!(natural.findings.iter().any(|finding| finding.problem.contains("slower kernels for nothing")));
    let asym = run(Scheme { sym: false, ..default4() }, Format::Gptq);
    one_error(&broken(&asym, &|quant| quant["sym"] = json!(true)), &["symmetric", "not in the middle"]);

    let groups = errors(&broken(&good, &|quant| quant["group_size"] = json!(64)));
    assert!(
        groups.iter().any(|text| text.contains("qzeros is [2, 8] where the config asks for [1, 8]")),
        "{groups:#?}"
    );
    let bits = errors(&broken(&good, &|quant| quant["bits"] = json!(8)));
    assert!(bits.iter().any(|text| text.contains("is [") && text.contains("qzeros")), "{bits:#?}");
    one_error(
        &without(&good, "model.layers.1.mlp.up_proj.scales"),
        &["model.layers.1.mlp.up_proj", "scales is missing"],
    );
    one_error(&without(&good, "model.norm.weight"), &["model.norm.weight", "missing"]);
    one_error(&broken(&good, &|quant| quant["lm_head"] = json!(true)), &["lm_head", "not quantized"]);
    one_error(
        &broken(&good, &|quant| quant["dynamic"] = json!({"-:.*layers\\.0.*down_proj": {}})),
        &["model.layers.0.mlp.down_proj", "the config leaves it alone"],
    );
    let missing = errors(&broken(&good, &|quant| drop(quant.as_object_mut().unwrap().remove("group_size"))));
    assert!(missing.iter().any(|text| text.contains("\"group_size\" is missing")), "{missing:#?}");
    let mut nan = good.clone();
    change_tensor(&mut nan, "model.layers.0.mlp.up_proj.scales", |bytes| {
        bytes[..2].copy_from_slice(&[0, 0x7e])
    });
    one_error(&nan, &["model.layers.0.mlp.up_proj", "a scale is NaN"]);
    let mut index = good.clone();
    change_tensor(&mut index, "model.layers.0.mlp.up_proj.g_idx", |bytes| bytes[0] = 9);
    one_error(&index, &["group index has group 9, but there are 2"]);
    let mut two = good.clone();
    let mut other: Value = serde_json::from_slice(&two["quantize_config.json"]).unwrap();
    other["bits"] = json!(8);
    two.insert("quantize_config.json".into(), other.to_string().into_bytes());
    one_error(&two, &["quantize_config.json", "\"bits\" is 8, but 4"]);
    let mut torn = good.clone();
    torn.get_mut("model.safetensors").unwrap().pop();
    one_error(&torn, &["1 bytes shorter"]);
    let mut unfinished = good.clone();
    unfinished.insert("halftone-journal.json".into(), b"{}".to_vec());
    one_error(&unfinished, &["not finished"]);

    let skipping =
        Job { output: with(&["o_proj=bits:8"], &["down_proj"]), ..Job::new("llama", default4()) }.run().0;
    let all = errors(&broken(&skipping, &|quant| quant["dynamic"] = json!({"+:.*o_proj": {"bits": 8}})));
    assert_eq!(
        all,
        Vec::<String>::new(),
        "no layer of that name is quantized, so nothing tells that one should be"
    );
    let some =
        Job { output: with(&[], &["layers.1.mlp.down_proj"]), ..Job::new("llama", default4()) }.run().0;
    one_error(
        &broken(&some, &|quant| quant["dynamic"] = json!({})),
        &["layers.1.mlp.down_proj", "16 bits", "qweight"],
    );
}

#[test]
fn a_broken_compressed_tensors_result_is_found_out() {
    let run = |output: Output| {
        let output = Output { format: Format::CompressedTensors, ..output };
        Job { output, ..Job::new("llama", Scheme { sym: false, ..default4() }) }.run().0
    };
    let good = run(Output::default());
    let broken = |files: &Files, edit: &dyn Fn(&mut Value)| {
        let mut files = files.clone();
        edit_config(&mut files, edit);
        files
    };
    let weights = |edit: &'static (dyn Fn(&mut Value) + Sync)| {
        broken(&good, &|quant| edit(&mut quant["config_groups"]["group_0"]["weights"]))
    };
    one_error(&weights(&|weights| weights["own"] = json!(1)), &["group_0", "the key \"own\""]);
    one_error(&weights(&|weights| weights["num_bits"] = json!(5)), &["\"num_bits\" is 5"]);
    one_error(&weights(&|weights| weights["symmetric"] = json!(true)), &["symmetric", "not in the middle"]);
    let eight = errors(&weights(&|weights| weights["num_bits"] = json!(8)));
    assert!(
        eight.iter().any(|text| text.contains("weight_packed is [64, 8] where the config asks for [64, 16]")),
        "{eight:#?}"
    );
    let spelled = found(&weights(&|weights| weights["actorder"] = json!("static")));
    assert_eq!((spelled.count(Severity::Error), spelled.count(Severity::Warning)), (0, 2), "{spelled:#?}");
    one_error(
        &broken(&good, &|quant| quant["ignore"] = json!([])),
        &["lm_head", "\"ignore\" does not name it"],
    );
    one_error(
        &without(&good, "model.layers.0.mlp.up_proj.weight_shape"),
        &["up_proj", "weight_shape", "missing"],
    );
    one_error(
        &without(&good, "model.layers.0.mlp.up_proj.weight_zero_point"),
        &["up_proj", "weight_zero_point is missing"],
    );
    let gptq = Job::new("llama", default4()).run().0;
    let mut swapped = gptq.clone();
    swapped.insert("config.json".into(), good["config.json"].clone());
    let swapped = errors(&swapped);
    assert!(
        swapped
            .iter()
            .any(|text| text.contains("tensors are those of gptq, but the config says compressed-tensors")),
        "{swapped:#?}"
    );
    // q in 8 bits beside k and v in 4, as no plan allows it.
    let eight = run(with(&["layers.0.self_attn.[qkv]=bits:8"], &[]));
    let mut mixed = tensors(&good);
    for tensor in tensors(&eight) {
        if tensor.0.contains("layers.0.self_attn.q_proj") {
            let at = mixed.iter().position(|other| other.0 == tensor.0).unwrap();
            mixed[at] = tensor;
        }
    }
    let mut files = eight.clone();
    let header = halftone::checkpoint::header::write(
        mixed.iter().map(|(name, dtype, shape, _)| (name.as_str(), *dtype, &shape[..])),
    );
    let mut file = header.unwrap();
    mixed.iter().for_each(|tensor| file.extend_from_slice(&tensor.3));
    files.insert("model.safetensors".into(), file);
    edit_config(&mut files, |quant| {
        for group in quant["config_groups"].as_object_mut().unwrap().values_mut() {
            let eight = group["weights"]["num_bits"] == 8;
            group["targets"] =
                if eight { json!(["model.layers.0.self_attn.q_proj"]) } else { json!(["Linear"]) };
        }
    });
    let errors = errors(&files);
    assert!(
        errors.len() == 2 && errors.iter().all(|text| text.contains("engines make one matrix of them")),
        "{errors:#?}"
    );
}

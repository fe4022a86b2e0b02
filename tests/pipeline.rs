//! Whole runs over the tiny golden models: what comes out, stopping and going on, bad inputs.

#![cfg(not(target_arch = "wasm32"))]

mod common;

use common::job::*;
use common::*;
use halftone::checkpoint::GptqLinear;
use halftone::device::Device;
use halftone::error::Error;
use halftone::eval::perplexity;
use halftone::gptq::losses::Choice;
use halftone::gptq::scheme::{Alpha, Preset, Scheme};
use halftone::model::arch::{block, stages};
use halftone::model::{Block, Embedding, Flow, LinearSpec, Stored, Weights};
use halftone::pipeline::events::Silent;
use halftone::pipeline::plan::human_bytes;
use halftone::pipeline::{Event, ModuleRow, Observer, RunReport};
use halftone::storage::Sink;
use halftone::storage::memory::MemorySink;
use halftone::tensor::Tensor;
use pollster::block_on;
use serde_json::Value;

/// Sum of a column of the report.
fn sum(report: &RunReport, column: fn(&ModuleRow) -> Option<f64>) -> f64 {
    report.modules.iter().map(|row| column(row).unwrap()).sum()
}

// What comes out.

/// Warnings but for what some loader does not take, which is no matter of the run.
fn of_the_run(report: &RunReport) -> Vec<&String> {
    let loader = |text: &&String| text.contains("Transformers") || text.contains("GPTQModel");
    report.warnings.iter().filter(|text| !loader(text)).collect()
}

fn quantizes_every_family(device: &Device) {
    for name in MODELS {
        let job = Job::new(name, default4()).on(device);
        let (files, report) = job.run();
        let (dense, quantized) = (job.stored().unwrap(), open(&files));
        let config = config_of(&dense);
        assert_eq!(config_of(&quantized), config, "{name}");

        // Every linear layer is quantized, everything else is there as it was.
        let all = (0..config.layers).flat_map(|layer| stages(&config, layer)).flat_map(|s| s.linears);
        let linears: Vec<String> = all.map(|spec| spec.module).collect();
        assert!(report.modules.iter().map(|row| &row.module).eq(&linears), "{name}");
        for row in &report.modules {
            // Held-out rows may prefer rounding, where few tokens come to an expert.
            let rounded = row.held.is_some_and(|held| held.choice == Choice::Rtn && row.routed.is_some());
            assert!(rounded || row.gptq_loss < row.rtn_loss, "{name}: {row:?}");
        }
        for spec in (0..config.layers).flat_map(|layer| stages(&config, layer)).flat_map(|s| s.linears) {
            assert!(GptqLinear::is_in(&quantized.checkpoint, &spec.module), "{name}: {}", spec.module);
            assert!(quantized.checkpoint.info(&format!("{}.weight", spec.module)).is_none());
            assert_eq!(layer(&quantized, &spec.module).bias.is_some(), spec.bias, "{}", spec.module);
        }
        let of_linear = |tensor: &str| linears.iter().any(|m| tensor.rsplit_once('.').unwrap().0 == m);
        for tensor in dense.checkpoint.names().filter(|name| !of_linear(name)) {
            let (was, is) = (dense.checkpoint.read(tensor), quantized.checkpoint.read(tensor));
            assert!(block_on(was).unwrap() == block_on(is).unwrap(), "{name}: {tensor} changed");
        }

        assert_eq!(of_the_run(&report), Vec::<&String>::new(), "{name}");
        let (gptq, rtn) = (sum(&report, |row| row.gptq_loss), sum(&report, |row| row.rtn_loss));
        assert!(gptq < 0.75 * rtn, "{name}: loss {gptq}, of rounding {rtn}");
        assert!((report.loss_ratio().unwrap() - gptq / rtn).abs() < 1e-12);

        let (rows, golden) = expected(name);
        let quantized_logits = logits(&quantized, &rows);
        let moved = distance(&quantized_logits, &golden);
        let scored =
            block_on(perplexity(&quantized, &segments(&rows).unwrap(), device, async |_, _| true)).unwrap();
        let (was, is) = (perplexity_of(&rows, &golden), perplexity_of(&rows, &quantized_logits));
        println!(
            "{name}: loss {:.3} of rtn's, logits moved by {moved:.3}, perplexity {was:.1} to {is:.1}",
            gptq / rtn
        );
        assert!(moved > 0.001 && moved < 0.2, "{name}: logits moved by {moved}");
        assert!((is / was - 1.0).abs() < 0.15, "{name}: perplexity {was} became {is}");
        assert!((scored.perplexity / is - 1.0).abs() < 1e-3, "{name}: {} is not {is}", scored.perplexity);
        assert_eq!(scored.tokens, 2 * 39);
    }
}

#[test]
fn every_family_is_quantized_and_its_behaviour_survives() {
    quantizes_every_family(&Device::Cpu);
}

/// With the original model's activations beside the quantized one's, and scales refitted.
fn corrected4() -> Scheme {
    Scheme { alpha: Alpha::Measured, refit: true, ..default4() }
}

#[test]
fn a_corrected_run_keeps_what_held_out_rows_prefer() {
    for (name, experts) in [("llama", false), ("gpt_neox", false), ("qwen2_moe", true)] {
        let (files, report) = Job::new(name, corrected4()).run();
        let (mut corrected, mut judged) = (0, 0);
        for row in &report.modules {
            // One of the 16 rows is held out.
            assert_eq!(row.tokens == 600, row.routed.is_none() || row.tokens == 600, "{name}: {row:?}");
            let Some(held) = row.held else {
                assert!(row.routed.is_some(), "{name}: {row:?}");
                continue;
            };
            judged += 1;
            assert!(held.kept <= held.plain && held.kept <= held.rtn && held.kept > 0.0, "{name}: {row:?}");
            assert!((0.0..=1.0).contains(&held.alpha));
            // The original may send a token to another expert.
            assert!(row.routed.is_none() || held.alpha == 0.0);
            corrected += usize::from(held.alpha > 0.0);
        }
        assert!(corrected > 3, "{name}: {corrected} of {judged}");
        assert_eq!(report.modules.iter().any(|row| row.routed.is_some()), experts);
        let (rows, golden) = expected(name);
        let moved = distance(&logits(&open(&files), &rows), &golden);
        assert!(moved > 0.001 && moved < 0.2, "{name}: logits moved by {moved}");
    }
}

/// With 8 bits there is little to make up for: were a bias, a norm or a branch beside left out of what is
/// wanted of a layer, far more would seem lost than rounding loses.
#[test]
fn what_a_layer_is_wanted_to_give_fits_every_family() {
    for name in ["llama", "qwen2", "opt", "gpt2", "gpt_neox", "phi3", "gemma2"] {
        let scheme = Scheme { bits: 8, ..corrected4() };
        let (_, report) = Job::new(name, scheme).run();
        for row in &report.modules {
            let (held, loss) = (row.held.unwrap(), row.gptq_loss.unwrap());
            println!("{name} {}: {}", row.module, held.plain / loss);
            assert!(held.plain < 200.0 * loss, "{name}: {row:?}");
        }
    }
}

/// Behind a norm or a gate, and for experts, what a layer gives is not what comes to the stream.
#[test]
fn layers_that_write_to_the_stream_are_told_from_others() {
    for (name, ends) in [
        ("llama", &[false, true, false, true][..]),
        ("gpt_neox", &[false, true, false, true]),
        ("gemma2", &[false; 4]),
    ] {
        let config = config_of(&Job::new(name, default4()).stored().unwrap());
        assert!(block(&config, 0).ends_in_stream().eq(ends.iter().copied()), "{name}");
    }
    let config = config_of(&Job::new("qwen2_moe", default4()).stored().unwrap());
    let ends: Vec<bool> = block(&config, 0).ends_in_stream().collect();
    assert!(ends[1] && ends.len() > 4 && !ends[2..].contains(&true), "{ends:?}");
}

#[test]
fn perplexity_of_a_dense_model_is_that_of_the_golden_logits() {
    for name in MODELS {
        let (rows, logits) = expected(name);
        let stored = Job::new(name, default4()).stored().unwrap();
        let segments = segments(&rows).unwrap();
        let got = block_on(perplexity(&stored, &segments, &Device::Cpu, async |_, _| true)).unwrap();
        let want = perplexity_of(&rows, &logits);
        assert!((got.perplexity / want - 1.0).abs() < 1e-4, "{name}: {} is not {want}", got.perplexity);
        assert!((got.mean_nll.exp() / got.perplexity - 1.0).abs() < 1e-12);
        // A token alone predicts nothing; rows of other lengths are scored as they are.
        let uneven = [rows[0].clone(), rows[1][..7].to_vec()];
        let segments = self::segments(&uneven).unwrap();
        let got = block_on(perplexity(&stored, &segments, &Device::Cpu, async |_, _| true)).unwrap();
        let want = perplexity_of(&uneven, &logits[..47 * VOCAB]);
        assert!((got.perplexity / want - 1.0).abs() < 1e-4, "{name}: {} is not {want}", got.perplexity);
        assert_eq!(got.tokens, 39 + 6);
    }
}

#[test]
fn an_evaluation_stops_when_asked() {
    let stored = Job::new("llama", default4()).stored().unwrap();
    let segments = segments(&rows(2, 40, 3)).unwrap();
    let error =
        block_on(perplexity(&stored, &segments, &Device::Cpu, async |block, _| block < 1)).err().unwrap();
    assert_eq!(error.exit_code(), 130);
}

/// tr(E·H·Eᵀ) in f64 with H = (2/tokens)·XᵀX, so Σ over tokens of ‖E·x‖² · 2/tokens.
fn loss(weight: &[f32], decoded: &[f32], x: &[f32], k: usize) -> f64 {
    let error: Vec<f64> = weight.iter().zip(decoded).map(|(w, d)| f64::from(*w) - f64::from(*d)).collect();
    let mut sum = 0.0;
    for x in x.chunks(k) {
        for row in error.chunks(k) {
            let product: f64 = row.iter().zip(x).map(|(e, x)| e * f64::from(*x)).sum();
            sum += product * product;
        }
    }
    2.0 * sum / (x.len() / k) as f64
}

/// The rows' losses, computed again from the files alone: inputs of each stage by the finished model
/// (a stage sees all quantized layers before it), errors by its decoded weights.
fn losses_are_those_of_the_decoded_weights(name: &str, scheme: Scheme, device: &Device) {
    let job = Job::new(name, scheme.clone()).on(device);
    let (files, report) = job.run();
    let rtn = Scheme { sym: scheme.sym, ..Scheme::preset(Preset::Rtn, scheme.bits, scheme.group_size) };
    let rounded = open(&Job::new(name, rtn).run().0);
    let (dense, quantized) = (job.stored().unwrap(), open(&files));
    let (config, cpu, seq_len) = (config_of(&dense), Device::Cpu, job.rows[0].len());
    let rope = config.rope_tables(&cpu, seq_len).unwrap();
    let embedding = block_on(Embedding::load(&config, &dense, &cpu)).unwrap();
    let mut h = embedding.embed(&job.rows.concat(), seq_len, 0).unwrap();
    let mut rows = report.modules.iter();
    for layer in 0..config.layers {
        let block = block_on(Block::load(&config, layer, &quantized, &cpu)).unwrap();
        let mut flow = Flow::new(h);
        for (index, stage) in stages(&config, layer).iter().enumerate() {
            let x = block_on(block.input(index, &mut flow, seq_len, &rope)).unwrap().unwrap();
            for spec in &stage.linears {
                let row = rows.next().unwrap();
                assert_eq!((row.layer, &row.module, row.tokens), (layer, &spec.module, x.rows()));
                check_losses(name, row, spec, &x, [&dense, &quantized, &rounded]);
            }
        }
        h = block_on(block.finish(flow, seq_len, &rope)).unwrap();
    }
}

fn check_losses(
    name: &str,
    row: &ModuleRow,
    spec: &LinearSpec,
    x: &Tensor,
    [dense, quantized, rounded]: [&Stored; 3],
) {
    let weight = format!("{}.weight", spec.module);
    let (elem, shape) = dense.info(&weight).unwrap().unwrap();
    let bytes = block_on(dense.read_rows(&weight, 0..spec.out_features)).unwrap();
    let weight = Tensor::from_bytes(&Device::Cpu, elem, &shape, &bytes).unwrap();
    let weight = block_on(weight.to_f32()).unwrap();
    let x = block_on(x.to_f32()).unwrap();
    for (what, stored, said) in [("gptq", quantized, row.gptq_loss), ("rtn", rounded, row.rtn_loss)] {
        let decoded = layer(stored, &spec.module).dequantize().unwrap();
        let (said, found) = (said.unwrap(), loss(&weight, &decoded, &x, spec.in_features));
        assert!((said / found - 1.0).abs() < 0.01, "{name} {}: {what} loss {said}, not {found}", spec.module);
    }
}

#[test]
fn the_reported_losses_are_those_of_the_decoded_weights() {
    for name in ["llama", "qwen2", "qwen3", "gpt_neox", "gemma2", "qwen2_moe"] {
        losses_are_those_of_the_decoded_weights(name, fast4(), &Device::Cpu);
    }
    let ordered = Scheme { desc_act: true, ..Scheme::preset(Preset::Reference, 3, Some(32)) };
    losses_are_those_of_the_decoded_weights("mistral_sliding", ordered, &Device::Cpu);
    let asymmetric = Scheme { sym: false, ..Scheme::preset(Preset::Fast, 2, Some(32)) };
    losses_are_those_of_the_decoded_weights("llama_tied_rope3", asymmetric, &Device::Cpu);
}

/// Rows of experts: tokens that were routed to them, and tokens in their Hessians.
fn experts_of(report: &RunReport) -> Vec<(&ModuleRow, usize)> {
    report.modules.iter().filter_map(|row| Some((row, row.routed?))).collect()
}

#[test]
fn tokens_of_experts_are_counted_and_starved_ones_take_those_of_the_layer() {
    let mut job = Job::new("olmoe", fast4());
    let (files, report) = job.run();
    assert_eq!(of_the_run(&report), Vec::<&String>::new());
    let rows = experts_of(&report);
    assert_eq!(rows.len(), 3 * 4 * 3);
    assert!(rows.iter().all(|(row, routed)| row.tokens == *routed && (1..640).contains(routed)));
    // Two of four experts for each of 640 tokens, in three layers of three linear layers an expert.
    assert_eq!(rows.iter().map(|(_, routed)| routed).sum::<usize>(), 3 * 3 * 2 * 640);
    let log = String::from_utf8(files["quant_log.csv"].clone()).unwrap();
    let (row, routed) = rows[0];
    assert!(log.contains(&format!("{},64,128,4,32,{routed},{routed},", row.module)), "{log}");

    job.output.all_experts = true;
    let (of_all, report) = job.run();
    assert_eq!(of_the_run(&report), Vec::<&String>::new());
    assert!(experts_of(&report).iter().all(|(row, routed)| row.tokens == 640 && *routed < 640));
    assert!(files["model.safetensors"] != of_all["model.safetensors"]);

    job.output.all_experts = false;
    job.rows = common::rows(1, 12, 1);
    let (_, report) = job.run();
    let rows = experts_of(&report);
    let starved = |input: usize, routed: usize| 10 * routed < input;
    assert!(rows.iter().any(|(row, routed)| starved(row.input, *routed)));
    for (row, routed) in rows {
        let tokens = if starved(row.input, routed) { 12 } else { routed };
        assert_eq!(row.tokens, tokens, "{row:?}");
    }
    let said = report.warnings.iter().filter(|text| text.contains("those of the whole layer")).count();
    assert!(said > 0, "{:?}", report.warnings);
}

/// A model of text and pictures: its text's configuration and tensors lie deeper, and there are others.
#[test]
fn the_text_of_a_model_with_pictures_is_quantized_and_the_rest_left_alone() {
    let mut job = Job::new("gemma3", default4());
    let (plain, _) = job.run();
    let text: Value = serde_json::from_slice(&job.files["config.json"]).unwrap();
    let config = serde_json::json!({ "model_type": "gemma3", "text_config": text, "vision_config": {} });
    let model = job.files["model.safetensors"].clone();
    let tensors = safetensors::SafeTensors::deserialize(&model).unwrap();
    let pixels: Vec<u8> = (0..64 * 48 * 2).map(|i| (i % 97) as u8).collect();
    let vision = "model.vision_tower.layers.0.fc1";
    for prefix in ["model.language_model.", "language_model.model."] {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, vec![64, 48], &pixels).unwrap();
        let mut views = vec![(format!("{vision}.weight"), view)];
        for (name, view) in tensors.tensors() {
            views.push((name.replace("model.", prefix), view));
        }
        let weights = safetensors::serialize(views, None).unwrap();
        job.files =
            [("config.json".into(), config.to_string().into_bytes()), ("model.safetensors".into(), weights)]
                .into();
        job.output.format = halftone::checkpoint::Format::Gptq;
        let (files, _) = job.run();
        let (quantized, plain) = (open(&files), open(&plain));
        let module = |prefix: &str| format!("{prefix}layers.3.mlp.down_proj");
        let (got, want) = (layer(&quantized, &module(prefix)), layer(&plain, &module("model.")));
        assert_eq!((got.codes, got.scales), (want.codes, want.scales));
        let copied = block_on(quantized.checkpoint.read(&format!("{vision}.weight"))).unwrap();
        assert!(copied == pixels);
        let (rows, _) = expected("gemma3");
        assert_eq!(logits(&quantized, &rows), logits(&plain, &rows));

        job.output.format = halftone::checkpoint::Format::CompressedTensors;
        let quant = json(&job.run().0, "config.json")["quantization_config"].clone();
        let ignored: Vec<&str> =
            quant["ignore"].as_array().unwrap().iter().map(|x| x.as_str().unwrap()).collect();
        assert!(ignored.contains(&vision), "{ignored:?}");
    }
}

#[test]
fn routers_are_left_alone_by_name_and_heads_of_another_name_cannot_be_quantized() {
    let mut job = Job::new("qwen2_moe", default4());
    job.output.format = halftone::checkpoint::Format::CompressedTensors;
    let quant = json(&job.run().0, "config.json")["quantization_config"].clone();
    let ignored = quant["ignore"].to_string();
    for name in ["model.layers.0.mlp.gate", "model.layers.2.mlp.shared_expert_gate", "lm_head"] {
        assert!(ignored.contains(&format!("\"{name}\"")), "{ignored}");
    }
    assert!(!ignored.contains("embed_tokens") && !ignored.contains("experts."), "{ignored}");
    let mut job = Job::new("gpt_neox", default4());
    job.output.lm_head = true;
    assert_says(&job.refusal(), 3, &["embed_out", "--quantize-lm-head"]);
    let mut job = Job::new("gpt2", default4());
    job.output.format = halftone::checkpoint::Format::CompressedTensors;
    assert_says(&job.refusal(), 3, &["Conv1D", "--format gptq"]);
}

#[test]
fn a_mixture_goes_on_where_it_was_stopped() {
    let mut job = Job::new("qwen2_moe", default4());
    let (want, _) = job.run();
    let sink = MemorySink::new();
    job.run_with(&sink, &mut StopAt::new(60)).unwrap_err();
    assert_eq!(blocks_done(&sink), 1);
    job.resume = true;
    job.run_with(&sink, &mut Silent).unwrap();
    assert_same(&without_seconds(sink.files()), &without_seconds(want), "a resumed mixture");
    // Nothing depends on what is kept between stages.
    job.resume = false;
    let stored = job.stored().unwrap();
    let needed = job.plan(&stored).unwrap().memory;
    job.max_memory = needed.total() - 1;
    assert!(!job.plan(&stored).unwrap().keep_between);
    let (computed_again, _) = job.run();
    assert!(computed_again["model.safetensors"] == sink.files()["model.safetensors"]);
}

fn json(files: &Files, name: &str) -> Value {
    serde_json::from_slice(&files[name]).unwrap()
}

#[test]
fn groups_that_follow_the_order_are_told_to_loaders_and_others_are_not() {
    let reference = Scheme::preset(Preset::Reference, 4, Some(32));
    for (scheme, ordered) in [
        (Scheme { desc_act: true, ..reference.clone() }, true),
        (reference.clone(), false),
        (Scheme { desc_act: true, static_groups: true, ..reference.clone() }, false),
        (Scheme { desc_act: true, group_size: None, ..reference }, false),
        (default4(), false),
    ] {
        let (files, _) = Job::new("llama", scheme.clone()).run();
        let quant = json(&files, "config.json")["quantization_config"].clone();
        assert_eq!(quant["desc_act"], ordered, "{scheme:?}");
        assert_eq!(json(&files, "quantize_config.json"), quant);
        let down = layer(&open(&files), "model.layers.1.mlp.down_proj");
        let group = scheme.group_len(128) as u32;
        let natural: Vec<u32> = (0..128).map(|column| column / group).collect();
        assert_eq!(down.g_idx != natural, ordered, "{scheme:?}");
        // Whatever their order, groups have equal numbers of columns.
        let mut sorted = down.g_idx;
        sorted.sort_unstable();
        assert_eq!(sorted, natural, "{scheme:?}");
    }
}

#[test]
fn rounding_to_nearest_takes_no_calibration_and_the_nearest_codes() {
    let mut job = Job::new("qwen2", Scheme::preset(Preset::Rtn, 4, Some(32)));
    job.rows.clear();
    let (files, report) = job.run();
    assert!(
        report.modules.iter().all(|row| row.gptq_loss.is_none() && row.damp.is_none() && row.tokens == 0)
    );
    assert_eq!(report.loss_ratio(), None);
    let (dense, rounded) = (job.stored().unwrap(), open(&files));
    let bytes = block_on(dense.checkpoint.read("model.layers.2.mlp.up_proj.weight")).unwrap();
    let decoded = layer(&rounded, "model.layers.2.mlp.up_proj");
    for (at, (pair, got)) in bytes.chunks(2).zip(decoded.dequantize().unwrap()).enumerate() {
        let want = f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
        let (row, column) = (at / 64, at % 64);
        let scale = decoded.scales[decoded.g_idx[column] as usize * decoded.n + row].abs();
        assert!((got - want).abs() <= 0.505 * scale, "row {row}, column {column}: {want} became {got}");
    }
}

#[test]
fn every_width_grid_and_group_makes_a_model_and_more_bits_lose_less() {
    let (rows, golden) = expected("qwen2");
    for (preset, sym, group) in [
        (Preset::Default, true, Some(32)),
        (Preset::Default, false, Some(64)),
        (Preset::Reference, true, None),
        (Preset::Reference, false, Some(16)),
        (Preset::Rtn, false, None),
    ] {
        let mut last = f64::INFINITY;
        for bits in [2, 3, 4, 8] {
            let scheme = Scheme { sym, ..Scheme::preset(preset, bits, group) };
            let (files, report) = Job::new("qwen2", scheme.clone()).run();
            let stored = open(&files);
            let quant = stored.quant.as_ref().unwrap();
            assert_eq!((quant.scheme.bits, quant.scheme.sym), (bits, sym));
            assert_eq!(quant.scheme.group_size, group.map_or(-1, |size| size as i64));
            let q = layer(&stored, "model.layers.0.self_attn.q_proj");
            assert_eq!(q.groups(), group.map_or(1, |size| 64 / size));
            assert!(q.zeros.iter().all(|&zero| zero > 0 && u32::from(zero) < 1 << bits), "{scheme:?}");
            if sym {
                assert!(q.zeros.iter().all(|&zero| u32::from(zero) == 1 << (bits - 1)), "{scheme:?}");
            }
            let moved = distance(&logits(&stored, &rows), &golden);
            println!("{preset:?} sym {sym} group {group:?} bits {bits}: logits moved by {moved:.4}");
            assert!(moved < 0.7 * last, "{scheme:?}: {moved} after {last}");
            last = moved;
            let stored_bits: usize = bits as usize + group.map_or(0, |size| 16 / size);
            assert!(
                report.bits_per_weight > stored_bits as f64 && report.bits_per_weight < bits as f64 + 3.0
            );
        }
        assert!(last < 0.01, "8 bits moved the logits by {last}");
    }
}

/// Codes are widened on their way into a product; that changes nothing but the last bits.
#[test]
fn packed_weights_compute_what_widened_ones_do() {
    let act_order = Scheme { desc_act: true, ..Scheme::preset(Preset::Reference, 4, Some(32)) };
    let rtn = |bits, sym, group| Scheme { sym, ..Scheme::preset(Preset::Rtn, bits, group) };
    for (name, scheme) in [
        ("llama", rtn(4, true, Some(32))),
        ("qwen2", act_order),
        ("qwen3", rtn(3, false, Some(32))),
        ("mistral_sliding", rtn(8, false, None)),
        ("llama", rtn(2, false, Some(16))),
    ] {
        let (rows, _) = expected(name);
        let (files, _) = Job::new(name, scheme.clone()).run();
        for device in [Some(Device::Cpu), gpu()].into_iter().flatten() {
            let packed = logits_on(&device, &open(&files), &rows);
            let widened = logits_on(&device, &open(&files).widened(), &rows);
            let moved = distance(&packed, &widened);
            assert!(moved < 2e-6, "{name} {scheme:?} on {}: {moved:e}", device.describe());
        }
    }
}

#[test]
fn what_goes_with_the_weights_is_copied_and_config_keeps_its_order() {
    let mut job = Job::new("llama", fast4());
    let kept = [("tokenizer.json", "{\"not\": \"read\"}"), ("modeling.py", "x = 1\n"), ("vocab.txt", "")];
    let left = ["pytorch_model.bin", "quant_log.csv", "halftone-journal.json"];
    for (name, text) in kept {
        job.files.insert(name.into(), text.into());
    }
    for name in left {
        job.files.insert(name.into(), b"old".to_vec());
    }
    let (files, report) = job.run();
    for (name, text) in kept {
        assert_eq!(files[name], text.as_bytes(), "{name}");
    }
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let mut want = vec!["config.json", "model.safetensors", "quant_log.csv", "quantize_config.json"];
    want.extend(kept.map(|(name, _)| name));
    want.sort_unstable();
    assert_eq!(names, want);

    let was = json(&job.files, "config.json");
    let is = json(&files, "config.json");
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&is)[..keys(&was).len()], keys(&was));
    assert_eq!(keys(&is).last().unwrap(), "quantization_config");

    let log = String::from_utf8(files["quant_log.csv"].clone()).unwrap();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(
        lines[0],
        "layer,module,in,out,bits,group,tokens,routed,damp,rtn_loss,gptq_loss,alpha,held_rtn,held_plain,held_kept,kept,scaling,seconds"
    );
    assert_eq!(lines.len(), 22);
    for (line, row) in lines[1..].iter().zip(&report.modules) {
        let cells: Vec<&str> = line.split(',').collect();
        assert_eq!(cells.len(), 18, "{line}");
        assert_eq!(
            cells[..7].join(","),
            format!("{},{},{},{},4,32,640", row.layer, row.module, row.input, row.output)
        );
        assert_eq!(cells[10].parse::<f64>().unwrap(), row.gptq_loss.unwrap());
    }
}

#[test]
fn rows_of_different_lengths_count_by_their_tokens() {
    let mut job = Job::new("llama", fast4());
    job.rows = [40, 40, 3, 17, 17, 2].into_iter().flat_map(|len| rows(1, len, len as u32)).collect();
    let (files, report) = job.run();
    assert_eq!(report.modules[0].tokens, 119);
    // Cut into micro-batches of single sequences the sums round differently, and nothing else changes.
    job.batch_tokens = Some(1);
    let (cut, _) = job.run();
    let (rows, golden) = expected("llama");
    let (a, b) = (logits(&open(&files), &rows), logits(&open(&cut), &rows));
    assert!(distance(&a, &b) < 0.2 * distance(&a, &golden), "{} {}", distance(&a, &b), distance(&a, &golden));
}

// The same input gives the same bytes, stopped or not.

fn the_same_bytes_twice(device: &Device) {
    for scheme in [default4(), Scheme::preset(Preset::Reference, 3, None)] {
        let once = without_seconds(Job::new("mistral_sliding", scheme.clone()).on(device).run().0);
        let again = without_seconds(Job::new("mistral_sliding", scheme).on(device).run().0);
        assert_same(&once, &again, "a second run");
    }
}

#[test]
fn two_runs_give_the_same_bytes() {
    the_same_bytes_twice(&Device::Cpu);
}

/// Stops `job` at every `step`-th point there is, goes on, and compares.
fn stop_everywhere(mut job: Job, step: usize) {
    let mut whole = StopAt::new(usize::MAX);
    let sink = MemorySink::new();
    job.run_with(&sink, &mut whole).unwrap();
    let want = without_seconds(sink.files());
    let points = whole.passed.get();
    let mut seen = [false; 3];
    for at in (0..points).step_by(step) {
        let sink = MemorySink::new();
        job.resume = false;
        let error = job.run_with(&sink, &mut StopAt::new(at)).err().unwrap();
        assert_eq!(error.exit_code(), 130);
        assert!(error.to_string().contains("--resume"), "{error}");
        let done = blocks_done(&sink);
        seen[done as usize] = true;
        assert!(error.to_string().contains(&format!("block {} of 3", done + 1)), "{error}");
        let files = sink.files();
        assert!(!files.contains_key("config.json") && !files.contains_key("model.safetensors.index.json"));
        job.resume = true;
        job.run_with(&sink, &mut Silent).unwrap();
        assert_same(&without_seconds(sink.files()), &want, &format!("stopped at point {at} of {points}"));
    }
    assert_eq!(seen, [true; 3], "a stop in every block");
}

#[test]
fn a_run_stopped_anywhere_goes_on_to_the_same_bytes() {
    stop_everywhere(Job::new("llama", default4()), 1);
    stop_everywhere(Job::new("qwen3", corrected4()), 7);
    let ordered = Scheme { desc_act: true, ..Scheme::preset(Preset::Reference, 4, Some(32)) };
    stop_everywhere(Job::new("qwen2", ordered), 3);
    stop_everywhere(Job::new("llama_tied_rope3", Scheme::preset(Preset::Rtn, 3, Some(32))), 2);
}

#[test]
fn an_output_of_several_shards_is_stopped_and_resumed_too() {
    let mut job = Job::new("mistral_sliding", default4());
    job.shard_bytes = Some(30_000);
    let (files, _) = job.run();
    let shards = files.keys().filter(|name| name.ends_with(".safetensors")).count();
    assert!(shards >= 4, "{shards} shards");
    assert_eq!(
        distance(&logits(&open(&files), &expected("mistral_sliding").0), &{
            job.shard_bytes = None;
            logits(&open(&job.run().0), &expected("mistral_sliding").0)
        }),
        0.0
    );
    job.shard_bytes = Some(30_000);
    stop_everywhere(job, 2);
}

#[test]
fn a_run_stopped_again_and_again_ends_in_the_same_bytes() {
    let mut job = Job::new("qwen3", default4());
    let want = without_seconds(job.run().0);
    let (sink, mut sittings) = (MemorySink::new(), 0);
    // Far enough for one more block each time: reading finished tensors and replaying blocks passes stop points as well.
    while let Err(error) = job.run_with(&sink, &mut StopAt::new(13 + 36 * sittings)) {
        assert_eq!(error.exit_code(), 130);
        sittings += 1;
        job.resume = true;
        assert!(sittings < 20);
    }
    assert!(sittings >= 2, "{sittings}");
    assert_same(&without_seconds(sink.files()), &want, "a run in pieces");
}

#[test]
fn a_disk_that_fills_up_leaves_nothing_that_looks_finished_and_the_run_goes_on() {
    let mut job = Job::new("llama", default4());
    let sink = MemorySink::new();
    job.run_with(&sink, &mut Silent).unwrap();
    let want = without_seconds(sink.files());
    let total: usize = want.values().map(Vec::len).sum();
    let weights = want["model.safetensors"].len();
    let mut limits: Vec<usize> = (0..20).map(|step| step * weights / 20).collect();
    // Around the moment when the weights are whole, and while the rest is written.
    limits.extend((0..24).map(|step| weights - 8 + step * (total - weights + 4000) / 24));
    let (mut kept, mut whole) = (0, 0);
    for limit in limits {
        let sink = MemorySink::limited(limit as u64);
        job.resume = false;
        let Err(error) = job.run_with(&sink, &mut Silent) else { continue };
        assert_eq!(error.exit_code(), 4, "{error}");
        assert!(error.to_string().contains("no space left"), "{error}");
        let files = sink.files();
        assert!(!files.contains_key("config.json"), "room for {limit} bytes");
        match files.get("model.safetensors") {
            None => {}
            // All tensors had room: the name is earned.
            Some(bytes) => {
                assert!(bytes == &want["model.safetensors"], "room for {limit} bytes");
                whole += 1;
            }
        }
        sink.set_capacity(None);
        kept += u64::from(files.contains_key("halftone-journal.json") && blocks_done(&sink) > 0);
        job.resume = true;
        job.run_with(&sink, &mut Silent).unwrap();
        assert_same(&without_seconds(sink.files()), &want, &format!("room for {limit} bytes"));
    }
    assert!(kept > 5 && whole > 3, "{kept} runs went on after a block, {whole} had whole weights");
}

#[test]
fn a_changed_run_is_not_resumed_and_says_what_changed() {
    let stopped = || {
        let (job, sink) = (Job::new("llama", default4()), MemorySink::new());
        assert!(job.run_with(&sink, &mut StopAt::new(20)).is_err());
        assert_eq!(blocks_done(&sink), 1);
        (Job { resume: true, ..job }, sink)
    };
    let refused = |change: fn(&mut Job), words: &[&str]| {
        let (mut job, sink) = stopped();
        let before = sink.files();
        change(&mut job);
        let error = job.run_with(&sink, &mut Silent).expect_err("must be refused");
        assert_eq!(error.exit_code(), 7, "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "{error} should say {word}");
        }
        assert_same(&sink.files(), &before, "a refused run");
    };
    refused(|job| job.scheme.bits = 3, &["--bits", "was 4, is 3"]);
    refused(|job| job.scheme.group_size = Some(64), &["--group-size", "was 32, is 64"]);
    refused(|job| job.scheme.group_size = None, &["--group-size", "was 32, is -1"]);
    refused(|job| job.scheme.sym = false, &["--sym"]);
    refused(|job| job.scheme.damp_percent = 0.02, &["--damp-percent", "0.02"]);
    refused(|job| job.scheme.mse = false, &["--mse"]);
    refused(|job| job.scheme = Scheme::preset(Preset::Reference, 4, Some(32)), &["--preset"]);
    refused(|job| job.rows = rows(16, 40, 2), &["the calibration text changed"]);
    refused(|job| job.rows[3].truncate(39), &["the calibration text changed"]);
    refused(|job| job.calibration = "--seed 1".into(), &["the choice of calibration text", "--seed 1"]);
    refused(|job| job.batch_tokens = Some(80), &["micro-batch", "was 2048, is 80"]);
    refused(|job| job.files = model("llama_tied_rope3"), &["the model changed"]);
    // The same headers, other weights: a fine-tuned sibling.
    let other = |job: &mut Job| {
        change_tensor(&mut job.files, "model.layers.0.mlp.up_proj.weight", |bytes| bytes.reverse());
    };
    refused(other, &["the model changed"]);

    let (job, sink) = stopped();
    let mut torn = sink.get("halftone-journal.json").unwrap();
    torn.truncate(torn.len() / 2);
    sink.insert("halftone-journal.json", torn);
    let error = job.run_with(&sink, &mut Silent).err().unwrap();
    assert!(error.exit_code() == 7 && error.to_string().contains("halftone-journal.json"), "{error}");

    let (job, sink) = stopped();
    let mut cut = sink.get("model.safetensors.part").unwrap();
    cut.truncate(60_000);
    sink.insert("model.safetensors.part", cut);
    let error = job.run_with(&sink, &mut Silent).err().unwrap();
    assert!(error.exit_code() == 7 && error.to_string().contains("model.safetensors.part"), "{error}");
}

// Memory.

#[test]
fn a_tight_plan_computes_again_and_gives_the_same_bytes() {
    let mut job = Job::new("llama", default4());
    let want = without_seconds(job.run().0);
    let stored = job.stored().unwrap();
    let roomy = job.plan(&stored).unwrap();
    assert!(roomy.keep_between);
    job.max_memory = roomy.memory.total() - 1;
    let tight = job.plan(&stored).unwrap();
    assert!(!tight.keep_between);
    assert_eq!(tight.batch_tokens, roomy.batch_tokens);
    assert!(tight.memory.total() <= job.max_memory);
    assert_same(&without_seconds(job.run().0), &want, "a tight plan");

    job.max_memory = tight.memory.total() - 1;
    let tightest = job.plan(&stored).unwrap();
    assert_eq!(tightest.batch_tokens, 40);
    assert!(tightest.memory.total() <= job.max_memory);
    job.run();

    job.max_memory = 1000;
    let error = job.refusal();
    assert_eq!(error.exit_code(), 2);
    assert!(
        error.to_string().contains(&human_bytes(tightest.memory.total().next_multiple_of(100_000))),
        "{error}"
    );
    assert!(
        error.to_string().contains("1.0 kB is allowed") && error.to_string().contains("--max-memory"),
        "{error}"
    );
}

#[test]
fn weights_quantized_in_pieces_of_rows_are_the_same() {
    for scheme in [
        Scheme { sym: false, ..fast4() },
        Scheme { desc_act: true, ..Scheme::preset(Preset::Reference, 3, Some(32)) },
        Scheme::preset(Preset::Rtn, 4, None),
    ] {
        let mut job = Job::new("qwen2", scheme);
        let (whole, report) = job.run();
        // 64 rows at a time, of up to 128.
        job.piece_bytes = Some(1);
        let (pieces, cut) = job.run();
        assert!(whole["model.safetensors"] == pieces["model.safetensors"]);
        for (a, b) in report.modules.iter().zip(&cut.modules) {
            for (a, b) in [(a.gptq_loss, b.gptq_loss), (a.rtn_loss, b.rtn_loss)] {
                assert!(
                    a.is_none() == b.is_none() && a.zip(b).is_none_or(|(a, b)| (a / b - 1.0).abs() < 1e-5)
                );
            }
        }
    }
}

// Bad inputs.

#[track_caller]
fn assert_says(error: &Error, code: u8, words: &[&str]) {
    assert_eq!(error.exit_code(), code, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} should say {word}");
    }
}

#[test]
fn a_weight_that_is_not_a_number_is_named() {
    for preset in [Preset::Default, Preset::Rtn] {
        let mut job = Job::new("llama", Scheme::preset(preset, 4, Some(32)));
        // bf16 NaN in row 1, column 3 of [32, 64].
        change_tensor(&mut job.files, "model.layers.1.self_attn.k_proj.weight", |bytes| {
            bytes[2 * (64 + 3)..][..2].copy_from_slice(&[0xc0, 0x7f]);
        });
        let sink = MemorySink::new();
        let error = job.run_with(&sink, &mut Silent).err().unwrap();
        assert_says(&error, 6, &["model.layers.1.self_attn.k_proj.weight", "row 1, column 3"]);
        assert!(!sink.files().contains_key("config.json"));
    }
    for (tensor, value, words) in [
        ("model.layers.1.self_attn.v_proj.bias", [0x80, 0x7f], "not a finite number"),
        ("model.layers.1.self_attn.v_proj.bias", [0x00, 0x48], "beyond"),
    ] {
        let mut job = Job::new("qwen2", default4());
        change_tensor(&mut job.files, tensor, |bytes| bytes[4..6].copy_from_slice(&value));
        assert_says(&job.refusal(), 6, &[tensor, words, "row 2"]);
    }
    let mut job = Job::new("llama", default4());
    change_tensor(&mut job.files, "model.layers.2.input_layernorm.weight", |bytes| {
        bytes[..2].copy_from_slice(&[0xc0, 0x7f])
    });
    assert_says(&job.refusal(), 6, &["block 2, stage qkv"]);
}

#[test]
fn weights_that_are_cut_or_absent_are_refused_before_any_work() {
    let mut job = Job::new("llama", default4());
    job.files.get_mut("model.safetensors").unwrap().truncate(100_000);
    assert_says(&job.refusal(), 3, &["model.safetensors"]);

    let mut sharded = Job::new("llama", default4());
    sharded.shard_bytes = Some(100_000);
    let mut index: Value = serde_json::json!({"metadata": {}, "weight_map": {}});
    for tensor in sharded.stored().unwrap().checkpoint.names() {
        index["weight_map"][tensor] = "model-00001-of-00002.safetensors".into();
    }
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors".into();
    let weights = sharded.files.remove("model.safetensors").unwrap();
    sharded.files.insert("model-00001-of-00002.safetensors".into(), weights);
    sharded.files.insert("model.safetensors.index.json".into(), index.to_string().into_bytes());
    assert_says(&sharded.refusal(), 3, &["model-00002-of-00002.safetensors"]);

    let mut job = Job::new("qwen3", default4());
    let config = String::from_utf8(job.files["config.json"].clone()).unwrap();
    let edited = |from: &str, to: &str| config.replace(from, to).into_bytes();
    job.files.insert("config.json".into(), edited("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4"));
    assert_says(&job.refusal(), 3, &["model.layers.3", "missing"]);
    job.files
        .insert("config.json".into(), edited("\"intermediate_size\": 128", "\"intermediate_size\": 256"));
    assert_says(&job.refusal(), 3, &["_proj.weight", "config.json says"]);
    job.files.insert("config.json".into(), edited("\"qwen3\"", "\"mamba\""));
    assert_says(&job.refusal(), 3, &["mamba", "llama, mistral, qwen2, qwen3"]);
}

#[test]
fn a_tensor_that_the_result_would_lose_is_refused() {
    // A qwen2 that says it is a mistral has biases which nobody would add.
    let mut job = Job::new("qwen2", default4());
    let config = String::from_utf8(job.files["config.json"].clone()).unwrap();
    job.files.insert("config.json".into(), config.replace("\"qwen2\"", "\"mistral\"").into_bytes());
    assert_says(&job.refusal(), 3, &["bias", "not part of this architecture"]);
}

#[test]
fn a_group_that_does_not_divide_is_refused_with_those_that_do() {
    for (group, legal) in [(128, "16, 32, 64"), (48, "16, 32, 64")] {
        let error = Job::new("llama", Scheme::preset(Preset::Default, 4, Some(group))).refusal();
        assert_says(&error, 2, &[&format!("--group-size {group}"), "64 inputs", legal, "-1"]);
        assert!(!error.to_string().contains("64, 128"), "{error}");
    }
    assert_says(&Job::new("llama", Scheme::preset(Preset::Default, 5, None)).refusal(), 2, &["--bits 5"]);
    let damp = Scheme { damp_percent: 0.0, ..default4() };
    assert_says(&Job::new("llama", damp).refusal(), 2, &["--damp-percent 0"]);
}

#[test]
fn text_without_a_usable_row_is_refused_with_the_reason() {
    let mut job = Job::new("llama", default4());
    job.rows = vec![vec![5], vec![]];
    assert_says(&job.refusal(), 3, &["0 usable of 2", "shorter than 2 tokens"]);
    job.rows = vec![vec![5, 320]];
    assert_says(&job.refusal(), 3, &["rows.jsonl, line 1", "320"]);
}

#[test]
fn a_quantized_model_is_not_quantized_again() {
    let mut job = Job::new("llama", default4());
    job.files = job.run().0;
    assert_says(&job.refusal(), 3, &["quantized already", "4 bits"]);
}

#[test]
fn dead_inputs_and_too_little_text_are_survived() {
    // One row of two tokens: Hessians of rank 2. Damping makes them definite.
    let mut job = Job::new("llama", default4());
    job.rows = rows(1, 2, 9);
    let (files, report) = job.run();
    assert!(report.modules.iter().all(|row| row.gptq_loss.is_some_and(f64::is_finite)));
    assert!(distance(&logits(&open(&files), &expected("llama").0), &expected("llama").1) < 0.5);
    // With next to no damping they are not, so it is raised: that is told, also after a stop.
    job.scheme.damp_percent = 1e-12;
    let (_, report) = job.run();
    let raised = |damp: Option<f64>| damp.is_some_and(|damp| damp >= 1e-4);
    assert!(report.modules.iter().any(|row| raised(row.damp)));
    assert!(report.warnings.iter().any(|text| text.contains("damping had to be raised")));
    let sink = MemorySink::new();
    job.run_with(&sink, &mut StopAt::new(13)).err().unwrap();
    job.resume = true;
    assert_eq!(job.run_with(&sink, &mut Silent).unwrap().warnings, report.warnings);
    // A norm weight of 0 kills the input it scales.
    let mut job = Job::new("llama", default4());
    change_tensor(&mut job.files, "model.layers.0.input_layernorm.weight", |bytes| bytes[20..22].fill(0));
    let (files, _) = job.run();
    let decoded = layer(&open(&files), "model.layers.0.self_attn.q_proj").dequantize().unwrap();
    assert!(decoded.chunks(64).all(|row| row[10] == 0.0), "column 10 is dead");
}

/// Told in order, and to the end.
#[derive(Default)]
struct Recorder {
    done: Vec<f64>,
    blocks: Vec<usize>,
    modules: usize,
    replayed: Vec<usize>,
    started: Option<(usize, usize, usize)>,
}

impl Observer for Recorder {
    fn event(&mut self, event: Event) {
        match event {
            Event::Started { blocks, done, tokens } => self.started = Some((blocks, done, tokens)),
            Event::Verifying { done } => assert!((0.0..1.0).contains(&done)),
            Event::Replaying { block } => self.replayed.push(block),
            Event::Progress { done, total, .. } => self.done.push(done / total),
            Event::Module(_) => self.modules += 1,
            Event::Weights(_) | Event::Measuring { .. } => panic!("nobody asked for it"),
            Event::Warning(text) => panic!("{text}"),
            Event::BlockDone { block, .. } => self.blocks.push(block),
        }
    }
}

#[test]
fn progress_rises_to_the_end() {
    for scheme in [default4(), fast4(), Scheme::preset(Preset::Rtn, 4, Some(32))] {
        let mut recorder = Recorder::default();
        let job = Job::new("llama", scheme.clone());
        job.run_with(&MemorySink::new(), &mut recorder).unwrap();
        let tokens = if scheme.needs_inputs() { 640 } else { 0 };
        assert_eq!(recorder.started, Some((3, 0, tokens)));
        assert_eq!((recorder.modules, recorder.blocks), (21, vec![0, 1, 2]));
        assert!(recorder.done.is_sorted() && recorder.done[0] < 0.1, "{:?}", recorder.done);
        assert!((recorder.done.last().unwrap() - 1.0).abs() < 1e-6, "{:?}", recorder.done.last());
    }
    let (mut job, sink) = (Job::new("llama", default4()), MemorySink::new());
    job.run_with(&sink, &mut StopAt::new(30)).err().unwrap();
    let (mut recorder, done) = (Recorder::default(), blocks_done(&sink) as usize);
    job.resume = true;
    job.run_with(&sink, &mut recorder).unwrap();
    assert_eq!((recorder.started, recorder.replayed), (Some((3, done, 640)), (0..done).collect()));
    assert!(recorder.done.is_sorted() && recorder.done[0] > done as f64 / 3.0);
    assert!((recorder.done.last().unwrap() - 1.0).abs() < 1e-6, "{:?}", recorder.done.last());
    assert!(block_on(sink.size("halftone-journal.json")).unwrap().is_none());
}

// The same on a GPU.

/// The product on the GPU sums in another order, so codes near a tie may differ, and what follows
/// them with them.
fn a_gpu_gives_what_the_cpu_gives(device: &Device) {
    for (name, scheme) in [
        ("llama", fast4()),
        ("qwen2", Scheme { desc_act: true, ..Scheme::preset(Preset::Reference, 4, Some(32)) }),
        ("qwen3", Scheme { sym: false, ..Scheme::preset(Preset::Fast, 3, Some(64)) }),
    ] {
        let (cpu_files, cpu) = Job::new(name, scheme.clone()).run();
        let (gpu_files, gpu) = Job::new(name, scheme).on(device).run();
        let (cpu_stored, gpu_stored) = (open(&cpu_files), open(&gpu_files));
        let (mut codes, mut different) = (0, 0);
        for (a, b) in cpu.modules.iter().zip(&gpu.modules) {
            assert_eq!(a.module, b.module);
            for (a, b) in [(a.gptq_loss, b.gptq_loss), (a.rtn_loss, b.rtn_loss)] {
                assert!((a.unwrap() / b.unwrap() - 1.0).abs() < 0.05, "{name}: loss {a:?}, {b:?}");
            }
            let (a, b) = (layer(&cpu_stored, &a.module), layer(&gpu_stored, &a.module));
            codes += a.codes.len();
            different += a.codes.iter().zip(&b.codes).filter(|(a, b)| a != b).count();
        }
        let ratio = sum(&cpu, |row| row.gptq_loss) / sum(&gpu, |row| row.gptq_loss);
        println!("{name}: {different} of {codes} codes differ, loss {ratio:.5} of the GPU's");
        assert!(different * 200 <= codes, "{name}: {different} of {codes} codes differ");
        assert!((ratio - 1.0).abs() < 0.01, "{name}: {ratio}");
    }
}

#[test]
fn a_gpu_quantizes_every_family_as_the_cpu_does() {
    let Some(device) = gpu() else { return };
    quantizes_every_family(&device);
    a_gpu_gives_what_the_cpu_gives(&device);
}

#[test]
fn on_a_gpu_losses_are_true_and_bytes_repeat_stopped_or_not() {
    let Some(device) = gpu() else { return };
    losses_are_those_of_the_decoded_weights("qwen2", fast4(), &device);
    the_same_bytes_twice(&device);
    stop_everywhere(Job::new("llama", fast4()).on(&device), 6);
    // Activations that do not fit move between device and host.
    let mut job = Job::new("llama", fast4()).on(&device);
    let want = without_seconds(job.run().0);
    let stored = job.stored().unwrap();
    let roomy = job.plan(&stored).unwrap();
    job.max_memory = roomy.memory.total() - roomy.memory.between_stages - 1;
    let moving = job.plan(&stored).unwrap();
    assert!(!moving.stream_on_device && moving.batch_tokens == roomy.batch_tokens);
    assert_same(&without_seconds(job.run().0), &want, "activations on the host");
}

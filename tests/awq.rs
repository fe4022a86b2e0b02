//! Runs that scale inputs: what comes out, stopping and going on, what is left as it was.

#![cfg(not(target_arch = "wasm32"))]

mod common;

use common::job::*;
use common::*;
use halftone::checkpoint::Format;
use halftone::device::Device;
use halftone::gptq::scheme::{Alpha, Preset, Scaling, Scheme};
use halftone::pipeline::check::check;
use halftone::pipeline::events::Silent;
use halftone::pipeline::{ModuleRow, Override, RunReport};
use halftone::storage::memory::{MemorySink, MemorySource};
use pollster::block_on;

fn awq() -> Scheme {
    Scheme::preset(Preset::Awq, 3, Some(32))
}

/// GPTQ behind the scaling, with all that goes along.
fn both() -> Scheme {
    Scheme {
        alpha: Alpha::Measured,
        refit: true,
        scaling: Scaling::Awq,
        ..Scheme::preset(Preset::Default, 3, Some(32))
    }
}

/// A model some of whose inputs are much larger than others, as those of trained models are.
fn uneven(name: &str) -> Job {
    let mut job = Job::new(name, awq());
    let names: Vec<String> = job.stored().unwrap().checkpoint.names().map(str::to_owned).collect();
    let norms = ["norm", "ln_1", "ln_2"];
    let is_norm = |name: &&String| norms.iter().any(|norm| name.contains(norm)) && !name.contains("_norm.b");
    for tensor in names.iter().filter(is_norm).filter(|name| name.ends_with(".weight")) {
        change_tensor(&mut job.files, tensor, |bytes| {
            for (at, pair) in bytes.chunks_exact_mut(2).enumerate().filter(|(at, _)| at % 7 == 3) {
                let value = half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
                let larger = half::bf16::from_f32(value * if at % 2 == 0 { 16.0 } else { 6.0 });
                pair.copy_from_slice(&larger.to_le_bytes());
            }
        });
    }
    job
}

fn scaled(report: &RunReport, part: &str) -> usize {
    report.modules.iter().filter(|row| row.module.contains(part) && row.scaling.is_some()).count()
}

/// The share of the 16-bit model's logits that a result has lost.
fn lost(job: &Job, files: &Files) -> f64 {
    let rows = rows(4, 40, 9);
    distance(&logits(&open(files), &rows), &logits(&job.stored().unwrap(), &rows))
}

#[test]
fn scaling_loses_less_than_rounding_in_every_family_it_is_for() {
    for name in MODELS {
        let job = uneven(name);
        let (files, report) = job.run();
        let sum = |value: fn(&ModuleRow) -> Option<f64>| report.modules.iter().filter_map(value).sum::<f64>();
        let (own, rtn) = (sum(|row| row.gptq_loss), sum(|row| row.rtn_loss));
        assert!(own < 0.8 * rtn, "{name}: {own}, {rtn}");
        let count = report.modules.iter().filter(|row| row.scaling.is_some()).count();
        assert!(2 * count > report.modules.len(), "{name}: {count} of {}", report.modules.len());
        let plain = Job { scheme: Scheme::preset(Preset::Rtn, 3, Some(32)), ..uneven(name) };
        let (with, without) = (lost(&job, &files), lost(&job, &plain.run().0));
        println!("{name}: {count} of {} scaled, lost {with:.3}, rounded {without:.3}", report.modules.len());
        assert!(with < 0.9 * without, "{name}: {with}, rounded {without}");
        let found = block_on(check(std::rc::Rc::new(MemorySource::new("result", files)))).unwrap();
        assert_eq!(found.count(halftone::pipeline::check::Severity::Error), 0, "{name}: {found:?}");
    }
}

/// The folds are of the weights that are computed with: a file with 8 bits has lost next to nothing.
#[test]
fn what_is_written_computes_what_the_original_does_in_every_format() {
    for (name, format) in [
        ("llama", Format::CompressedTensors),
        ("qwen2", Format::GptqV2),
        ("opt", Format::CompressedTensors),
        ("gemma2", Format::Gptq),
        ("phi3", Format::CompressedTensors),
        ("gpt2", Format::Gptq),
        ("gpt_neox", Format::GptqV2),
        ("qwen2_moe", Format::Gptq),
    ] {
        let mut job = uneven(name);
        job.scheme.bits = 8;
        job.output.format = format;
        let (files, report) = job.run();
        let norms = job.stored().unwrap();
        let changed = open(&files);
        let written = norms.checkpoint.names().filter(|name| changed.checkpoint.info(name).is_some());
        let differs = |name: &&str| {
            block_on(norms.checkpoint.read(name)).unwrap() != block_on(changed.checkpoint.read(name)).unwrap()
        };
        assert!(written.filter(differs).count() > 0, "{name}: {report:?}");
        let plain = Job { scheme: Scheme::preset(Preset::Rtn, 8, Some(32)), ..uneven(name) };
        let (apart, rounded) = (lost(&job, &files), lost(&job, &plain.run().0));
        println!("{name}: {apart}, rounded {rounded}");
        assert!(apart < 0.06 && apart < rounded, "{name}: {apart}, rounded {rounded}");
    }
}

#[test]
fn a_stopped_run_goes_on_to_the_same_bytes() {
    for (name, scheme, step) in [("llama", awq(), 29), ("qwen2_moe", awq(), 151), ("gemma2", both(), 61)] {
        let mut job = Job { scheme, ..uneven(name) };
        let (sink, mut whole) = (MemorySink::new(), StopAt::new(usize::MAX));
        job.run_with(&sink, &mut whole).unwrap();
        let want = without_seconds(sink.files());
        let mut between = false;
        for at in (step..whole.passed.get()).step_by(step) {
            let sink = MemorySink::new();
            job.resume = false;
            job.run_with(&sink, &mut StopAt::new(at)).unwrap_err();
            between |= blocks_done(&sink) > 0;
            job.resume = true;
            job.run_with(&sink, &mut Silent).unwrap();
            assert_same(&without_seconds(sink.files()), &want, &format!("{name} stopped at {at}"));
        }
        assert!(between, "{name}: no stop behind a block");
        let sink = MemorySink::new();
        job.resume = false;
        job.run_with(&sink, &mut StopAt::new(whole.passed.get() - 1)).unwrap_err();
        job.resume = true;
        job.scheme.scaling = match job.scheme.scaling {
            Scaling::Awq => Scaling::None,
            Scaling::None => Scaling::Awq,
        };
        let error = job.run_with(&sink, &mut Silent).unwrap_err().to_string();
        assert!(error.contains("--scaling changed (was awq, is none)"), "{error}");
    }
}

#[test]
fn gptq_keeps_a_scale_where_held_out_rows_say_so() {
    let of = |scheme: Scheme| {
        let job = Job { scheme, ..uneven("llama") };
        let (files, report) = job.run();
        let held: f64 = report.modules.iter().filter_map(|row| row.held.map(|held| held.kept)).sum();
        println!("{} scaled, held {held}, lost {}", scaled(&report, ""), lost(&job, &files));
        (report, held)
    };
    let (with, held) = of(both());
    let (_, without) = of(Scheme { scaling: Scaling::None, ..both() });
    let count = scaled(&with, "");
    assert!(count > 0 && count < with.modules.len(), "{count} of {}", with.modules.len());
    assert!(held < 1.1 * without, "{held}, {without}");
    // A stage's layers share it.
    for stage in
        with.modules.chunk_by(|a, b| a.layer == b.layer && a.input == b.input && a.scaling == b.scaling)
    {
        assert!(stage.iter().all(|row| row.scaling == stage[0].scaling));
    }
}

/// With one sequence nothing tells whether a scale serves a sweep; rounding's is found by the sums.
#[test]
fn without_rows_to_judge_by_gptq_has_no_scale() {
    let of = |scheme: Scheme| {
        let job = Job { rows: rows(1, 64, 5), scheme, ..uneven("llama") };
        let (_, report) = job.run();
        (scaled(&report, ""), report.warnings.join("\n"))
    };
    let (count, warnings) = of(both());
    assert_eq!(count, 0);
    assert!(warnings.contains("one calibration sequence") && warnings.contains("inputs are not scaled"));
    let (count, warnings) = of(awq());
    assert!(count > 0 && !warnings.contains("one calibration sequence"), "{count}: {warnings}");
}

#[test]
fn what_cannot_be_folded_is_left_as_it_was_and_told() {
    let told = |job: &Job| {
        let (files, report) = job.run();
        (open(&files), report.warnings.join("\n"), report)
    };
    // An activation that bends.
    let (_, warnings, report) = told(&uneven("gpt_neox"));
    assert!(warnings.contains("the inputs of dense_4h_to_h are not scaled: the activation"), "{warnings}");
    assert_eq!(scaled(&report, "dense_4h_to_h"), 0);
    assert!(scaled(&report, "query_key_value") > 0 && scaled(&report, "dense_h_to_4h") > 0);

    // What stays in 16 bits is never changed, nor is the norm before it.
    let mut job = uneven("llama");
    job.output.skip = vec!["[qkv]_proj".into(), r"layers\.0.*(gate|up)_proj".into()];
    let (result, warnings, report) = told(&job);
    let blocks = job.stored().unwrap();
    assert!(warnings.contains("o_proj are not scaled: the layer before it stays in 16 bits"), "{warnings}");
    assert!(warnings.contains("down_proj of 1 blocks are not scaled"), "{warnings}");
    assert_eq!(scaled(&report, "o_proj"), 0);
    for tensor in ["input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.up_proj"] {
        let tensor = format!("model.layers.0.{tensor}.weight");
        let read = |stored: &halftone::model::Stored| block_on(stored.checkpoint.read(&tensor)).unwrap();
        assert!(read(&blocks) == read(&result), "{tensor} changed");
    }

    // Layers that see one norm need one scale, and experts of another width have it no more.
    let mut job = uneven("mixtral");
    job.output.overrides = vec![Override::parse(r"layers\.1.*experts\.0\.w[13]=bits:8").unwrap()];
    let (_, warnings, report) = told(&job);
    assert!(warnings.contains("w1, w3 of 1 blocks are not scaled: what sees"), "{warnings}");
    assert_eq!(scaled(&report, "layers.1.block_sparse_moe.experts.2.w1"), 0);
    assert!(scaled(&report, "layers.0.block_sparse_moe.experts.2.w1") > 0);

    // The head's norm lies before all blocks.
    let mut job = uneven("llama");
    job.output.lm_head = true;
    let (_, warnings, report) = told(&job);
    assert!(warnings.contains("the inputs of lm_head are not scaled"), "{warnings}");
    assert_eq!(scaled(&report, "lm_head"), 0);
}

#[test]
fn a_tight_plan_and_small_pieces_give_the_same_codes() {
    let mut job = uneven("llama");
    let (want, _) = job.run();
    let needed = job.plan(&job.stored().unwrap()).unwrap().memory;
    job.max_memory = needed.total() - 1;
    assert!(!job.plan(&job.stored().unwrap()).unwrap().keep_between);
    assert!(job.run().0["model.safetensors"] == want["model.safetensors"]);
    let plain = Job { scheme: Scheme { scaling: Scaling::None, ..awq() }, ..uneven("llama") };
    let without = plain.plan(&plain.stored().unwrap()).unwrap();
    assert!(without.memory.original < needed.original);
    assert!(without.flops < job.plan(&job.stored().unwrap()).unwrap().flops);
}

#[test]
fn a_gpu_finds_the_same_scales() {
    let Some(gpu) = gpu() else { return };
    let of = |device: &Device, scheme: Scheme| {
        let job = Job { scheme, ..uneven("llama") }.on(device);
        let (files, report) = job.run();
        let scales: Vec<_> = report.modules.iter().map(|row| row.scaling).collect();
        (lost(&job, &files), scales)
    };
    for scheme in [awq(), both()] {
        let (cpu, own) = of(&Device::Cpu, scheme.clone());
        let (other, theirs) = of(&gpu, scheme.clone());
        let same = own.iter().zip(&theirs).filter(|(a, b)| a == b).count();
        println!("{:?}: {same} of {} scales, lost {cpu} and {other}", scheme.preset, own.len());
        assert!(3 * same >= 2 * own.len(), "{own:?}, {theirs:?}");
        assert!((other / cpu - 1.0).abs() < 0.2, "{cpu}, {other}");
    }
}

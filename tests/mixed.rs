//! Bits as an average: what layers get, what is written, and that a stopped run keeps it.

#![cfg(not(target_arch = "wasm32"))]

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::rc::Rc;

use common::job::*;
use common::*;
use halftone::device::Device;
use halftone::error::Error;
use halftone::gptq::scheme::{Preset, Scheme};
use halftone::pipeline::allocation::{Allocation, Share};
use halftone::pipeline::events::Silent;
use halftone::pipeline::sensitivity::settle;
use halftone::pipeline::{
    Bits, Event, Mixed, Observer, Override, Plan, PlanOptions, RunOptions, RunReport, make_plan, run,
};
use halftone::storage::memory::MemorySink;
use pollster::block_on;
use serde_json::Value;

fn mixed(average: f64) -> Option<Mixed> {
    Bits::new(average).unwrap().average().map(Mixed::from)
}

fn job(name: &str, average: f64) -> Job {
    let mut job = Job::new(name, Scheme::preset(Preset::Default, 4, Some(32)));
    job.output.mixed = mixed(average);
    job
}

/// The plan with bits that were measured.
fn settled(job: &Job, observer: &mut dyn Observer) -> Result<Plan, Error> {
    let stored = job.stored()?;
    let mut options = PlanOptions {
        scheme: job.scheme.clone(),
        output: job.output.clone(),
        tokens: job.rows.iter().map(Vec::len).sum(),
        longest: job.rows.iter().map(Vec::len).max().unwrap(),
        max_memory: job.max_memory,
        batch_tokens: job.batch_tokens,
        shard_bytes: u64::MAX,
    };
    let plan = make_plan(&stored, &options, &job.device)?;
    block_on(settle(&stored, &mut options, &plan, &segments(&job.rows)?, &job.device, observer))
}

fn run_settled(job: &Job) -> (Files, RunReport) {
    let (plan, sink) = (settled(job, &mut Silent).unwrap(), MemorySink::new());
    let how = RunOptions { calibration: String::new(), resume: false };
    let (stored, segments) = (job.stored().unwrap(), segments(&job.rows).unwrap());
    let report =
        block_on(run(&stored, &plan, &segments, &job.device, Rc::new(sink.clone()), &how, &mut Silent))
            .unwrap();
    (sink.files(), report)
}

/// At or below the average, by less than any layers' next width takes; what the modules have is what was settled.
#[track_caller]
fn keeps_the_average(report: &RunReport) -> &Allocation {
    let allocation = report.allocation.as_ref().unwrap();
    let asked = f64::from(allocation.average);
    let weights: u64 = allocation.shares.iter().map(|share| share.weights).sum();
    let reached = allocation.reached();
    assert!(reached <= asked, "{reached} of {asked}");
    let more = |share: &Share| match share.bits {
        8 => u64::MAX,
        4 => 4 * share.weights,
        _ => share.weights,
    };
    let least = allocation.shares.iter().map(more).min().unwrap();
    assert!((asked - reached) * (weights as f64) < least as f64 + 1e-6, "{reached} of {asked}");
    let of_modules: usize = report.modules.iter().map(|row| row.bits as usize * row.input * row.output).sum();
    let settled: u64 = allocation.shares.iter().map(|share| u64::from(share.bits) * share.weights).sum();
    assert_eq!(of_modules as u64, settled);
    allocation
}

/// Widths of the modules of each block whose names end alike.
fn widths(report: &RunReport, ends: &[&str]) -> BTreeMap<usize, Vec<u32>> {
    let mut widths: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for row in report.modules.iter().filter(|row| ends.iter().any(|end| row.module.ends_with(end))) {
        widths.entry(row.layer).or_default().push(row.bits);
    }
    widths
}

#[test]
fn every_family_keeps_its_average_and_fused_layers_are_alike() {
    let fused: [&[&str]; 2] = [&["q_proj", "k_proj", "v_proj"], &["mlp.gate_proj", "mlp.up_proj"]];
    for (name, average) in
        [("llama", 3.5), ("opt", 2.75), ("gpt2", 3.3), ("gemma2", 4.5), ("qwen2_moe", 3.25)]
    {
        let (files, report) = run_settled(&job(name, average));
        keeps_the_average(&report);
        let there: Vec<u32> = report.modules.iter().map(|row| row.bits).collect();
        assert!(there.iter().any(|bits| *bits != there[0]), "{name}: {there:?}");
        for ends in fused {
            for (block, bits) in widths(&report, ends) {
                assert!(
                    bits.iter().all(|other| *other == bits[0]),
                    "{name}: {ends:?} of block {block}: {bits:?}"
                );
            }
        }
        // One matrix in serving engines, whatever the projection.
        let experts = report.modules.iter().filter(|row| row.routed.is_some());
        let mut of_block: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        experts.for_each(|row| of_block.entry(row.layer).or_default().push(row.bits));
        assert_eq!(of_block.is_empty(), name != "qwen2_moe");
        assert!(of_block.values().all(|bits| bits.iter().all(|other| *other == bits[0])), "{of_block:?}");
        let (rows, golden) = expected(name);
        let moved = distance(&logits(&open(&files), &rows), &golden);
        assert!(moved > 0.001 && moved < 0.5, "{name}: logits moved by {moved}");
    }
}

#[test]
fn what_loses_more_is_given_more() {
    let job = job("llama", 3.5);
    let report = run_settled(&job).1;
    let allocation = keeps_the_average(&report);
    for share in &allocation.shares {
        let errors: Vec<f64> = [2, 3, 4, 8].iter().map(|width| share.errors[width]).collect();
        assert!(errors.is_sorted_by(|a, b| a > b) && errors[3] > 0.0, "{share:?}");
        // A bit makes steps half as large.
        assert!((2.0..9.0).contains(&(errors[1] / errors[2])), "{share:?}");
    }
    let lost = |bits: &dyn Fn(usize, u32) -> u32| -> f64 {
        let shares = allocation.shares.iter().enumerate();
        shares.map(|(at, share)| share.errors[&bits(at, share.bits)]).sum()
    };
    let best = lost(&|_, bits| bits);
    assert!(best < 0.5 * (lost(&|_, _| 3) + lost(&|_, _| 4)));
    // A bit taken from one unit and given to another as large loses more.
    for (one, a) in allocation.shares.iter().enumerate().filter(|(_, share)| share.bits == 4) {
        for (other, b) in allocation.shares.iter().enumerate().filter(|(_, share)| share.bits == 3) {
            if a.weights == b.weights {
                let swapped = lost(&|at, bits| {
                    if at == one {
                        3
                    } else if at == other {
                        4
                    } else {
                        bits
                    }
                });
                assert!(swapped >= best, "{} for {}", a.kind, b.kind);
            }
        }
    }
}

#[test]
fn the_same_bits_twice_and_on_other_devices_much_the_same_errors() {
    let job = job("llama", 3.25);
    let of = |device: &Device| {
        let plan = settled(&Job { device: device.clone(), ..job_like(&job) }, &mut Silent).unwrap();
        plan.allocation.unwrap()
    };
    let first = of(&Device::Cpu);
    assert_eq!(of(&Device::Cpu), first);
    if let Some(gpu) = gpu() {
        for (a, b) in of(&gpu).shares.iter().zip(&first.shares) {
            for (width, error) in &b.errors {
                assert!((a.errors[width] / error - 1.0).abs() < 0.02, "{} {}: {a:?}, {b:?}", b.block, b.kind);
            }
        }
    }
}

fn job_like(job: &Job) -> Job {
    Job { output: job.output.clone(), ..Job::new("llama", job.scheme.clone()) }
}

/// Bits that are told stay as they are and count in no average, and so does what is left alone.
#[test]
fn what_is_told_is_not_counted() {
    let mut job = job("llama", 3.5);
    job.output.overrides = vec![
        Override::parse(r"layers\.0\..*(gate|up)_proj=bits:8").unwrap(),
        Override::parse("o_proj=group_size:16").unwrap(),
    ];
    job.output.skip = vec![r"layers\.1\.mlp\.down".to_owned()];
    let plan = settled(&job, &mut Silent).unwrap();
    let allocation = plan.allocation.as_ref().unwrap();
    assert!(allocation.reached() <= 3.5);
    assert!(allocation.bits(0, "gate_up").is_none() && allocation.bits(1, "down").is_none());
    let of = |end: &str| plan.modules.iter().find(|module| module.module.ends_with(end)).unwrap();
    assert_eq!(of("layers.0.mlp.up_proj").bits, 8);
    assert_eq!(of("layers.0.self_attn.o_proj").group, 16);
    assert_eq!(Some(of("layers.0.self_attn.o_proj").bits), allocation.bits(0, "o"));

    job.output.overrides = vec![Override::parse("v_proj=bits:3").unwrap()];
    let message = settled(&job, &mut Silent).err().unwrap().to_string();
    assert!(
        message.contains("k_proj (bits by the average, group 32, sym") && message.contains("v_proj (3 bits"),
        "{message}"
    );
    job.output.overrides = vec![Override::parse("proj=bits:3").unwrap()];
    let message = settled(&job, &mut Silent).err().unwrap().to_string();
    assert!(message.contains("--bits 3.5 is an average, and no layer is left"), "{message}");
    job.output.overrides.clear();
    job.scheme = Scheme::preset(Preset::Rtn, 4, Some(32));
    let message = settled(&job, &mut Silent).err().unwrap().to_string();
    assert!(message.contains("--bits 3.5") && message.contains("--preset rtn looks at none"), "{message}");
}

#[test]
fn measuring_tells_how_far_it_is_and_stops_when_asked() {
    struct Listener(Vec<(usize, usize, usize)>);
    impl Observer for Listener {
        fn event(&mut self, event: Event) {
            if let Event::Measuring { block, done, total, .. } = event {
                self.0.push((block, done, total));
            }
        }
    }
    let job = job("llama", 3.5);
    let mut listener = Listener(Vec::new());
    let plan = settled(&job, &mut listener).unwrap();
    let total = 3 * plan.units.len();
    assert_eq!(listener.0.len(), total);
    assert!(listener.0.iter().enumerate().all(|(at, (_, done, of))| (*done, *of) == (at + 1, total)));
    assert!(listener.0.is_sorted_by_key(|(block, ..)| *block));
    for at in [0, 5] {
        let error = settled(&job, &mut StopAt::new(at)).err().unwrap();
        assert!(matches!(error, Error::Interrupted { .. }));
        let message = error.to_string();
        assert!(message.contains("in block 1 of") && message.contains("nothing is written yet"), "{message}");
    }
}

// Through the program.

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halftone"));
    command.stdin(Stdio::null());
    command
}

struct Place(tempfile::TempDir);

impl Place {
    fn new(name: &str) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(place.path("model")).unwrap();
        for (file, bytes) in model(name) {
            std::fs::write(place.path("model").join(file), bytes).unwrap();
        }
        std::fs::write(place.path("rows.jsonl"), jsonl(&rows(16, 40, 1))).unwrap();
        std::fs::write(place.path("golden.jsonl"), jsonl(&expected(name).0)).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, args: &[&str]) -> Output {
        program().current_dir(self.0.path()).args(args).args(["--device", "cpu"]).output().unwrap()
    }

    fn quantize(&self, command: &str, more: &[&str]) -> Output {
        let common = [command, "model", "--calibration", "rows.jsonl", "--group-size", "32"];
        self.run(&[&common[..], more].concat())
    }

    fn files(&self, directory: &str) -> Files {
        let entries = std::fs::read_dir(self.path(directory)).unwrap().map(|entry| entry.unwrap().path());
        entries
            .map(|path| {
                (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap())
            })
            .collect()
    }
}

#[track_caller]
fn succeeds(output: Output) -> String {
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(0), "{err}");
    out
}

#[track_caller]
fn fails(output: Output, code: i32, words: &[&str]) {
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(message.starts_with("halftone: ") && message.lines().count() == 1, "{message}");
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
}

#[track_caller]
fn json(output: Output) -> Value {
    serde_json::from_str(&succeeds(output)).unwrap()
}

#[test]
fn both_formats_are_written_checked_and_evaluated() {
    let place = Place::new("llama");
    for format in ["gptq", "compressed-tensors"] {
        let planned = json(place.quantize("plan", &["--bits", "3.5", "--format", format, "--json"]));
        assert_eq!(planned["average_bits"], 3.5);
        let report = json(
            place.quantize("quantize", &["--bits", "3.5", "--format", format, "--out", format, "--json"]),
        );
        assert!(report["seconds_by_step"]["measuring"].as_f64().unwrap() > 0.0, "{report}");
        // The plan measured the same.
        assert_eq!(report["allocation"], planned["allocation"], "{format}");
        let widths: Vec<&Value> =
            report["modules"].as_array().unwrap().iter().map(|row| &row["bits"]).collect();
        let log = std::fs::read_to_string(place.path(format).join("quant_log.csv")).unwrap();
        let logged: Vec<&str> = log.lines().skip(1).map(|line| line.split(',').nth(4).unwrap()).collect();
        assert!(widths.iter().map(|bits| bits.to_string()).eq(logged.iter().copied()), "{log}");
        assert!(logged.contains(&"3") && logged.contains(&"4"), "{log}");
        let inspect = |more: &[&str]| {
            program().current_dir(place.0.path()).args(["inspect", format]).args(more).output().unwrap()
        };
        succeeds(inspect(&["--check"]));
        let shown = succeeds(inspect(&[]));
        assert!(shown.contains("3 bits") && shown.contains("4 bits"), "{shown}");
        let perplexity = |of: &str| {
            json(place.run(&["eval", of, "--text", "golden.jsonl", "--json"]))["perplexity"].as_f64().unwrap()
        };
        let (was, is) = (perplexity("model"), perplexity(format));
        assert!(is != was && (is / was - 1.0).abs() < 0.2, "{format}: {was} became {is}");
    }
    // Without a text it is told what is not known yet, and with one what was settled.
    let mut plan = program();
    plan.current_dir(place.0.path()).args([
        "plan",
        "model",
        "--group-size",
        "32",
        "--bits",
        "3.5",
        "--device",
        "cpu",
    ]);
    let assumed = json(plan.arg("--json").output().unwrap());
    assert!(assumed["modules"].as_array().unwrap().iter().all(|module| module["bits"].is_null()));
    assert!(assumed["allocation"].is_null() && assumed["bits_per_weight"].as_f64().unwrap() > 3.4);
    let mut plan = program();
    plan.current_dir(place.0.path()).args(["plan", "model", "--group-size", "32", "--bits", "3.5"]);
    let said = succeeds(plan.args(["--device", "cpu"]).output().unwrap());
    assert!(said.contains("~3.5") && said.contains("measured when the run begins"), "{said}");
    let said = succeeds(place.quantize("plan", &["--bits", "3.5"]));
    assert!(said.contains("at most 3.5 as asked") && !said.contains('~'), "{said}");
    let table = said.lines().skip_while(|line| !line.starts_with("layers ")).collect::<Vec<_>>();
    assert!(table[1].starts_with("qkv") && table[4].starts_with("down"), "{said}");
}

#[test]
fn what_is_no_average_is_refused_in_a_line() {
    let place = Place::new("llama");
    let quantize = |more: &[&str]| place.quantize("quantize", &[&["--out", "out"], more].concat());
    for (bits, word) in [
        ("1.9", "--bits 1.9"),
        ("9", "--bits 9"),
        ("8.5", "--bits 8.5"),
        ("nan", "--bits NaN"),
        ("-3.5", "--bits -3.5"),
        ("3.333", "two decimals"),
    ] {
        fails(quantize(&["--bits", bits]), 2, &[word, "2, 3, 4 or 8"]);
    }
    fails(quantize(&["--bits", "3.5", "--preset", "rtn"]), 2, &["--bits 3.5", "--preset rtn"]);
    assert!(!place.path("out").exists());
}

#[test]
fn a_killed_run_goes_on_with_the_bits_it_settled() {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("web/demo");
    let place = Place::new("llama");
    let command = |out: &str, bits: &str, more: &[&str]| {
        let mut command = program();
        command.current_dir(place.0.path()).arg("quantize").arg(demo.join("model")).args([
            "--out",
            out,
            "--calibration",
        ]);
        command.arg(demo.join("calibration.txt")).args([
            "--samples",
            "6",
            "--seq-len",
            "128",
            "--group-size",
            "64",
        ]);
        command.args(["--device", "cpu", "--bits", bits]).args(more);
        command
    };
    let report = json(command("whole", "3.5", &["--json"]).output().unwrap());
    let mut child =
        command("killed", "3.5", &[]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap().contains("model.layers.2.self_attn.q_proj")));
    child.kill().unwrap();
    child.wait().unwrap();
    let journal: Value = serde_json::from_slice(&place.files("killed")["halftone-journal.json"]).unwrap();
    assert_eq!(journal["inputs"]["output"]["mixed"]["allocation"], report["allocation"]);
    fails(
        command("killed", "3.25", &["--resume"]).output().unwrap(),
        7,
        &["--bits changed (was 3.5, is 3.25)"],
    );
    fails(command("killed", "4", &["--resume"]).output().unwrap(), 7, &["--bits changed (was 3.5, is 4)"]);
    let resumed = json(command("killed", "3.5", &["--resume", "--json"]).output().unwrap());
    assert_eq!(resumed["allocation"], report["allocation"]);
    let want = without_seconds(place.files("whole"));
    assert_same(&without_seconds(place.files("killed")), &want, "killed and resumed");
    // One that was stopped while it measured has left an empty directory.
    std::fs::create_dir(place.path("empty")).unwrap();
    succeeds(command("empty", "3.5", &["--resume"]).output().unwrap());
    assert_same(&without_seconds(place.files("empty")), &want, "begun again");
}

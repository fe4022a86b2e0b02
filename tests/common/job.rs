//! Whole runs over the tiny golden models, described before they begin.

use std::cell::Cell;
use std::rc::Rc;

use halftone::checkpoint::GptqLinear;
use halftone::device::Device;
use halftone::error::{Error, Result};
use halftone::gptq::scheme::{Preset, Scheme};
use halftone::model::{Block, Embedding, Head, ModelConfig, Stored};
use halftone::pipeline::events::Silent;
use halftone::pipeline::{Event, Observer, Output, Plan, PlanOptions, RunOptions, RunReport, make_plan, run};
use halftone::storage::memory::{MemorySink, MemorySource};
use halftone::text::{ModelText, SegmentOptions, Segments, TextFile, calibration_segments};
use pollster::block_on;
use serde_json::Value;

use super::{Files, VOCAB, jsonl, model, rows};

/// A run that is described but not begun.
pub struct Job {
    pub files: Files,
    pub rows: Vec<Vec<u32>>,
    pub scheme: Scheme,
    pub output: Output,
    pub max_memory: u64,
    pub batch_tokens: Option<usize>,
    /// Bytes of tensors in a shard; `None` for one file.
    pub shard_bytes: Option<u64>,
    pub piece_bytes: Option<usize>,
    pub resume: bool,
    pub calibration: String,
    pub device: Device,
}

impl Job {
    pub fn new(name: &str, scheme: Scheme) -> Self {
        Self {
            files: model(name),
            rows: rows(16, 40, 1),
            scheme,
            output: Output::default(),
            max_memory: u64::MAX,
            batch_tokens: None,
            shard_bytes: None,
            piece_bytes: None,
            resume: false,
            calibration: String::new(),
            device: Device::Cpu,
        }
    }

    pub fn on(mut self, device: &Device) -> Self {
        self.device = device.clone();
        self
    }

    pub fn stored(&self) -> Result<Stored> {
        block_on(Stored::open(Rc::new(MemorySource::new("model", self.files.clone()))))
    }

    pub fn plan(&self, stored: &Stored) -> Result<Plan> {
        let calibrated = self.scheme.needs_inputs();
        let options = PlanOptions {
            scheme: self.scheme.clone(),
            output: self.output.clone(),
            tokens: if calibrated { self.rows.iter().map(Vec::len).sum() } else { 0 },
            longest: if calibrated { self.rows.iter().map(Vec::len).max().unwrap_or(0) } else { 0 },
            max_memory: self.max_memory,
            batch_tokens: self.batch_tokens,
            shard_bytes: self.shard_bytes.unwrap_or(u64::MAX),
        };
        let mut plan = make_plan(stored, &options, &self.device)?;
        plan.piece_bytes = self.piece_bytes.unwrap_or(plan.piece_bytes);
        Ok(plan)
    }

    pub fn run_with(&self, sink: &MemorySink, observer: &mut dyn Observer) -> Result<RunReport> {
        let stored = self.stored()?;
        let plan = self.plan(&stored)?;
        let segments = if self.scheme.needs_inputs() { segments(&self.rows)? } else { Segments::none() };
        let options = RunOptions { calibration: self.calibration.clone(), resume: self.resume };
        let sink = Rc::new(sink.clone());
        block_on(run(&stored, &plan, &segments, &self.device, sink, &options, observer))
    }

    pub fn run(&self) -> (Files, RunReport) {
        let sink = MemorySink::new();
        let report = self.run_with(&sink, &mut Silent).unwrap();
        (sink.files(), report)
    }

    /// What the plan or the run says against it.
    pub fn refusal(&self) -> Error {
        self.run_with(&MemorySink::new(), &mut Silent).expect_err("must be refused")
    }
}

pub fn segments(rows: &[Vec<u32>]) -> Result<Segments> {
    let text = ModelText::new(None, None, VOCAB, "model");
    let file = TextFile { name: "rows.jsonl".into(), content: jsonl(rows).into_bytes() };
    calibration_segments(&text, &[file], &SegmentOptions { samples: None, seq_len: 512, seed: 0 })
}

pub fn open(files: &Files) -> Stored {
    block_on(Stored::open(Rc::new(MemorySource::new("result", files.clone())))).unwrap()
}

pub fn config_of(stored: &Stored) -> ModelConfig {
    ModelConfig::of(&stored.checkpoint).unwrap()
}

pub fn default4() -> Scheme {
    Scheme::preset(Preset::Default, 4, Some(32))
}

/// One sweep, with no rows held out.
pub fn fast4() -> Scheme {
    Scheme::preset(Preset::Fast, 4, Some(32))
}

pub fn layer(stored: &Stored, module: &str) -> GptqLinear {
    block_on(GptqLinear::read(&stored.checkpoint, module, stored.quant.as_ref().unwrap())).unwrap()
}

/// Logits of `rows`, all of one length.
pub fn logits(stored: &Stored, rows: &[Vec<u32>]) -> Vec<f32> {
    logits_on(&Device::Cpu, stored, rows)
}

pub fn logits_on(device: &Device, stored: &Stored, rows: &[Vec<u32>]) -> Vec<f32> {
    let (config, seq_len) = (config_of(stored), rows[0].len());
    block_on(async {
        let rope = config.rope_tables(device, seq_len).unwrap();
        let embedding = Embedding::load(&config, stored, device).await.unwrap();
        let mut h = embedding.embed(&rows.concat(), seq_len, 0).unwrap();
        for layer in 0..config.layers {
            let block = Block::load(&config, layer, stored, device).await.unwrap();
            h = block.forward(h, seq_len, &rope).await.unwrap();
        }
        let head = Head::load(&config, stored, device).await.unwrap();
        head.logits(&h).unwrap().to_f32().await.unwrap()
    })
}

/// ‖a − b‖ / ‖b‖.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b))).sum();
    (difference / b.iter().map(|&b| square(f64::from(b))).sum::<f64>()).sqrt()
}

/// Asks to stop at the `at`-th stop point; counts those passed.
pub struct StopAt {
    pub at: usize,
    pub passed: Cell<usize>,
}

impl StopAt {
    pub fn new(at: usize) -> Self {
        Self { at, passed: Cell::new(0) }
    }
}

impl Observer for StopAt {
    fn event(&mut self, _: Event) {}

    fn stop_requested(&self) -> bool {
        self.passed.set(self.passed.get() + 1);
        self.passed.get() > self.at
    }
}

pub fn blocks_done(sink: &MemorySink) -> u64 {
    let journal: Value = serde_json::from_slice(&sink.get("halftone-journal.json").unwrap()).unwrap();
    journal["blocks_done"].as_u64().unwrap()
}

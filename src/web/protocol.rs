//! What the page and the worker say to each other: one JSON object a message, tagged by `type`.
//!
//! The page posts `{request, files?, directory?}`: `files` are the browser's own `File` objects and
//! `directory` a `FileSystemDirectoryHandle`, both passed by reference; no model bytes ever cross. The
//! worker posts events. Every request is answered by the event named in its comment or by
//! [`Event::Failed`], with the `id` of the request.

use serde::{Deserialize, Serialize};

use crate::checkpoint::Format;
use crate::eval::{Comparison, Continuations, LastWords};
use crate::gptq::scheme::Alpha;
use crate::lesson;
use crate::pipeline::allocation::{Allocation, OfKind};
use crate::pipeline::{Bits, Groups, ModulePlan, ModuleRow, Values};

/// From the page.
#[derive(Debug, Clone, Deserialize)]
pub struct Message {
    /// Chosen by the page, repeated in the answer.
    pub id: u32,
    pub request: Request,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// Look for an adapter. → [`Event::Ready`]
    Start,
    /// Look at a model: the embedded one, or the posted `files`. → [`Event::Model`]
    Open {
        demo: bool,
        /// What to call a model of files whose folder the browser does not tell.
        #[serde(default)]
        name: Option<String>,
    },
    /// Calibration text: the built-in sample, or the posted `files` (.txt, .jsonl). → [`Event::Text`]
    Calibration { builtin: bool },
    /// Check everything that can be checked. → [`Event::Plan`]
    Plan { settings: Settings },
    /// Do it, into the posted `directory`, or into the browser's private storage without one.
    /// → [`Event::Started`], [`Event::Progress`], [`Event::Module`], [`Event::Weights`], …, [`Event::Done`]
    Quantize { settings: Settings, resume: bool },
    /// Stop at the next point that loses nothing, and wait for `Resume`. → [`Event::Paused`]
    Pause,
    /// → [`Event::Resumed`]
    Resume,
    /// Stop and keep the finished blocks. → [`Event::Failed`] with code 130
    Cancel,
    /// Perplexity of the open model (`before`) or of a result (`after`).
    /// → [`Event::Scoring`] …, [`Event::Score`]
    Evaluate {
        which: Which,
        /// A stored result by its name, instead of the last one (`after` only).
        #[serde(default)]
        stored: Option<String>,
        #[serde(flatten)]
        text: Scored,
    },
    /// A result beside the open model. → [`Event::Scoring`] …, [`Event::Compared`]
    Compare {
        #[serde(default)]
        stored: Option<String>,
        /// Have both continue some of the text, too.
        #[serde(default)]
        continuations: bool,
        #[serde(flatten)]
        text: Scored,
    },
    /// How often the open model (where `before`) and a result foretell the last words of passages: rows of
    /// {"text"} in the posted file. → [`Event::Scoring`] …, [`Event::LastWords`]
    LastWords {
        before: bool,
        /// A stored result by its name, instead of the last one.
        #[serde(default)]
        stored: Option<String>,
        /// "gpu" or "cpu".
        device: String,
    },
    /// Text from the open model or a result. → [`Event::Scoring`] while the model is loaded,
    /// [`Event::Reading`], [`Event::Token`] …, [`Event::Generated`]
    Generate(Generate),
    /// A question of "How it works". → [`Event::Scoring`] …, [`Event::Lesson`]
    Lesson(lesson::Ask),
    /// Results and stopped runs in the browser's private storage. → [`Event::Stored`]
    List,
    /// The files of a stored result, as `File` objects beside the event. → [`Event::Files`]
    Fetch { name: String },
    /// Remove a stored result or stopped run. → [`Event::Stored`]
    Remove { name: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    Before,
    After,
}

/// What to score, and on what.
#[derive(Debug, Clone, Deserialize)]
pub struct Scored {
    /// The built-in text, or the posted `files`.
    pub builtin: bool,
    pub max_tokens: usize,
    /// "gpu" or "cpu".
    #[serde(default = "cpu")]
    pub device: String,
}

fn cpu() -> String {
    "cpu".to_owned()
}

/// How to generate text.
#[derive(Debug, Clone, Deserialize)]
pub struct Generate {
    pub which: Which,
    /// A stored result by its name, instead of the last one (`after` only).
    #[serde(default)]
    pub stored: Option<String>,
    pub prompt: String,
    /// Through the model's chat template, as the next message of the conversation.
    pub chat: bool,
    /// Begin a new conversation.
    #[serde(default)]
    pub anew: bool,
    pub max_tokens: usize,
    /// 0 takes the likeliest token each time.
    pub temperature: f32,
    pub top_k: usize,
    pub top_p: f32,
    pub seed: u64,
    /// "gpu" or "cpu".
    pub device: String,
}

/// Everything that a person may choose.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// "gpu" or "cpu".
    pub device: String,
    /// "default", "reference" or "rtn".
    pub preset: String,
    /// One width for all, or an average.
    pub bits: Bits,
    pub group_size: Groups,
    pub sym: bool,
    /// `None` leaves these to the preset.
    pub desc_act: Option<bool>,
    pub damp_percent: Option<f64>,
    /// How far to aim at the original's outputs, and whether to fit the scales once more: `None` leaves
    /// these to the preset.
    #[serde(default)]
    pub alpha: Option<Alpha>,
    #[serde(default)]
    pub refit: Option<bool>,
    pub samples: usize,
    pub seq_len: usize,
    pub seed: u64,
    /// Bytes that activations and weights may take; `None` for a guess from the device.
    pub max_memory: Option<u64>,
    #[serde(default)]
    pub format: Format,
    /// What differs for some layers.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// Quantize the output head too.
    #[serde(default)]
    pub lm_head: bool,
    /// Calibrate every expert with every token.
    #[serde(default)]
    pub all_experts: bool,
    /// Bytes of tensors in one file; `None` for what suits the place.
    #[serde(default)]
    pub shard_bytes: Option<u64>,
}

/// What differs for the layers whose name a regex matches. The first rule that matches counts, and those that
/// leave layers alone before the others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    pub pattern: String,
    /// `None` leaves them in 16 bits.
    pub values: Option<Values>,
}

/// From the worker.
#[derive(Debug, Clone, Serialize)]
pub struct Answer {
    /// That of the request.
    pub id: u32,
    pub event: Event,
}

#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    Ready {
        /// `None` with `reason` when there is none that works.
        adapter: Option<Adapter>,
        /// Why there is no adapter, and what to do (which browsers, which flags).
        reason: Option<String>,
        /// The wasm build uses 128-bit vectors.
        simd: bool,
        version: String,
    },
    Model(ModelSummary),
    Text {
        name: String,
        bytes: u64,
        documents: usize,
    },
    Plan(PlanSummary),
    /// Before a run whose bits are an average: what bits are worth is measured.
    Measuring {
        block: usize,
        blocks: usize,
        /// 0 to 1.
        fraction: f64,
        seconds_left: Option<f64>,
    },
    /// And what came of it.
    Allocated(Allocated),
    /// Before a stopped run goes on, what it has written is read again.
    Verifying {
        fraction: f64,
    },
    Started {
        blocks: usize,
        done: usize,
        tokens: usize,
    },
    /// Finished blocks are applied again after a stop.
    Replaying {
        block: usize,
    },
    Progress {
        block: usize,
        blocks: usize,
        stage: String,
        /// 0 to 1, over the run and over the block.
        fraction: f64,
        block_fraction: f64,
        seconds: f64,
        seconds_left: Option<f64>,
        /// Calibration tokens times blocks a second.
        tokens_per_second: f64,
        /// Bytes of wasm memory, and of buffers on the device.
        wasm_bytes: u64,
        device_bytes: u64,
    },
    Module(ModuleRow),
    /// A corner of the layer just quantized, at most 64 × 64, row-major: weights, codes, and what is
    /// left between weight and dequantized code.
    Weights {
        module: String,
        rows: usize,
        cols: usize,
        bits: u32,
        weights: Vec<f32>,
        codes: Vec<u8>,
        errors: Vec<f32>,
    },
    Warning {
        text: String,
    },
    BlockDone {
        block: usize,
        blocks: usize,
    },
    Paused,
    Resumed,
    Done {
        seconds: f64,
        seconds_by_step: std::collections::BTreeMap<String, f64>,
        output_bytes: u64,
        bits_per_weight: f64,
        /// Σ gptq_loss / Σ rtn_loss.
        loss_ratio: Option<f64>,
        allocation: Option<Allocated>,
        /// Its name in the private storage; `None` when it went to a directory.
        stored: Option<String>,
        warnings: Vec<String>,
    },
    Scoring {
        fraction: f64,
    },
    Score {
        which: Which,
        perplexity: f64,
        tokens: usize,
        seconds: f64,
    },
    Compared {
        #[serde(flatten)]
        comparison: Comparison,
        continuations: Option<Continuations>,
    },
    /// Of the open model, if it was asked for, and of the result.
    LastWords {
        models: Vec<LastWords>,
        passages: usize,
        /// Rows that are no passages: they have fewer than two words.
        skipped: usize,
        seconds: f64,
    },
    /// Tokens of the prompt that are read, and how many there are.
    Reading {
        done: usize,
        of: usize,
    },
    /// What a token adds to the text.
    Token {
        text: String,
    },
    Generated {
        tokens: usize,
        prompt_tokens: usize,
        /// Of the prompt, those that the model had read before.
        reused_tokens: usize,
        prefill_tokens_per_second: f64,
        /// Of the answer; `None` of one token.
        tokens_per_second: Option<f64>,
        /// "end", "max_tokens", "context" or "stopped".
        finish: String,
        /// Bytes of wasm memory, and of buffers on the device.
        wasm_bytes: u64,
        device_bytes: u64,
    },
    Lesson(lesson::Answer),
    Stored {
        items: Vec<StoredItem>,
        quota_bytes: Option<u64>,
        used_bytes: Option<u64>,
    },
    /// The files travel beside the event as `files`.
    Files {
        name: String,
    },
    Failed {
        /// One line: what happened, where, what to do.
        message: String,
        /// The exit code that the command line would end with.
        code: u8,
        /// Something is left that `Quantize` with `resume` goes on with.
        resumable: bool,
        /// Which of the settings' rules is at fault, if one is by itself (`Plan` only).
        rule: Option<usize>,
    },
}

#[derive(Debug, Clone, Serialize)]
pub struct Adapter {
    pub name: String,
    pub vendor: String,
    pub architecture: String,
    /// Runs on the processor: slower than the CPU device.
    pub software: bool,
    pub shader_f16: bool,
    pub max_buffer_bytes: u64,
    pub max_binding_bytes: u64,
}

#[derive(Debug, Clone, Serialize)]
pub struct ModelSummary {
    pub name: String,
    pub architecture: String,
    pub layers: usize,
    pub hidden: usize,
    pub vocab: usize,
    pub parameters: u64,
    pub bytes: u64,
    pub shards: usize,
    pub dtype: String,
    /// Of a checkpoint that is quantized already.
    pub quantized_bits: Option<u32>,
    /// The head is the embedding table.
    pub tied: bool,
    /// Experts of a block, of a mixture.
    pub experts: Option<usize>,
}

#[derive(Debug, Clone, Serialize)]
pub struct PlanSummary {
    pub modules: Vec<ModulePlan>,
    /// Modules that stay in 16 bits as asked.
    pub skipped: Vec<String>,
    /// What `modules` have together is this average; which has how many bits is measured when the run begins.
    pub average_bits: Option<f64>,
    /// Files of weights.
    pub weight_files: usize,
    pub memory_bytes: u64,
    /// The parts of it, by name.
    pub memory: std::collections::BTreeMap<String, u64>,
    /// From a short measurement of this device.
    pub seconds: Option<f64>,
    pub output_bytes: u64,
    pub tokens: usize,
    /// Room in the private storage, if that is where the result would go.
    pub free_bytes: Option<u64>,
    pub warnings: Vec<String>,
}

/// Which layers have how many bits, where those are an average.
#[derive(Debug, Clone, Serialize)]
pub struct Allocated {
    /// Bits per weight, as asked and as it came out.
    pub asked: f64,
    pub reached: f64,
    pub kinds: Vec<OfKind>,
}

impl From<&Allocation> for Allocated {
    fn from(allocation: &Allocation) -> Self {
        Self { asked: allocation.average.into(), reached: allocation.reached(), kinds: allocation.by_kind() }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct StoredItem {
    pub name: String,
    pub bytes: u64,
    /// A stopped run: blocks done of blocks.
    pub unfinished: Option<(usize, usize)>,
    /// What it was made from, and with: to go on with a stopped run.
    pub model: Option<String>,
    pub settings: Option<Settings>,
}

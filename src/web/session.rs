//! What is open in this worker, and how each request is answered.

use std::rc::Rc;

use js_sys::Reflect;
use wasm_bindgen::JsCast;
use web_sys::{Blob, File};

use super::control::Control;
use super::how::Learning;
use super::post::{begin, post, post_failed, post_files, scope};
use super::protocol::{Event, ModelSummary, PlanSummary, Request, Rule, Settings};
use super::voice::Voice;
use super::worker::Posted;
use super::{adapter, demo, shelf};
use crate::checkpoint::DType;
use crate::checkpoint::writer::DEFAULT_SHARD_BYTES;
use crate::device::{AdapterChoice, Device, GpuOptions};
use crate::error::{Error, Result};
use crate::gptq::scheme::{Choice, Preset, Scheme};
use crate::kernels::selftest::open_gpu;
use crate::model::arch::expected_tensors;
use crate::model::{ModelConfig, Stored};
use crate::pipeline::journal::Inputs;
use crate::pipeline::{Groups, Mixed, Output, Override, Plan, PlanOptions, estimate, make_plan};
use crate::storage::Source;
use crate::storage::browser::{FileSource, reason};
use crate::text::{ModelText, SegmentOptions, Segments, TextFile, calibration_segments, documents};

/// Bytes of text files taken at most: they are tokenized in memory.
const TEXT_BYTES: f64 = 512e6;

/// An open model.
pub struct Model {
    pub name: String,
    pub stored: Rc<Stored>,
    pub config: ModelConfig,
    /// Its tokenizer, from the first use on.
    text: Option<Rc<ModelText>>,
}

/// Everything that outlives a request.
pub struct Session {
    pub control: Rc<Control>,
    pub model: Option<Model>,
    calibration: Vec<TextFile>,
    /// The last tokenized calibration text, and what it was made with.
    segments: Option<(SegmentOptions, Rc<Segments>)>,
    gpu: Option<Device>,
    /// Floating-point operations a second, CPU and GPU, once measured.
    speeds: [Option<f64>; 2],
    /// The last result of this session.
    pub result: Option<Rc<dyn Source>>,
    /// Models that generate.
    pub voices: Vec<Voice>,
    /// What lessons are about.
    pub learning: Option<Learning>,
}

/// What a run is made from.
pub struct Prepared {
    pub segments: Rc<Segments>,
    pub device: Device,
    pub options: PlanOptions,
    pub plan: Plan,
}

impl Session {
    pub fn new(control: Rc<Control>) -> Self {
        Self {
            control,
            model: None,
            calibration: Vec::new(),
            segments: None,
            gpu: None,
            speeds: [None; 2],
            result: None,
            voices: Vec::new(),
            learning: None,
        }
    }

    /// Answers one request, by an event or a failure.
    pub async fn answer(&mut self, posted: Posted) {
        let id = posted.message.id;
        begin(id);
        let mut rule = None;
        let answered = match posted.message.request {
            Request::Quantize { settings, resume } => {
                return self.quantize(id, settings, resume, posted.directory).await;
            }
            Request::Start => {
                post(id, adapter::look().await);
                // Nothing waits for it.
                wasm_bindgen_futures::spawn_local(demo::prefetch());
                return;
            }
            Request::Open { demo, name } => self.open(demo, name, posted.files).await,
            Request::Calibration { builtin } => self.take_text(builtin, &posted.files).await,
            Request::Plan { settings } => {
                let planned = self.plan(&settings, posted.directory.is_none()).await;
                if let Err(error) = &planned {
                    rule = self.rule_at_fault(&settings, error).await;
                }
                planned
            }
            Request::Evaluate { which, stored, text } => {
                self.control.begin();
                let scored = self.evaluate(id, which, stored, text, &posted.files).await;
                self.control.end();
                scored
            }
            Request::Compare { stored, continuations, text } => {
                self.control.begin();
                let compared = self.compare(id, stored, continuations, text, &posted.files).await;
                self.control.end();
                compared
            }
            Request::LastWords { before, stored, device } => {
                self.control.begin();
                let scored = self.last_words(id, before, stored, &device, &posted.files).await;
                self.control.end();
                scored
            }
            Request::Generate(wanted) => {
                self.control.begin();
                let generated = self.generate(id, wanted).await;
                self.control.end();
                generated
            }
            Request::Lesson(ask) => {
                self.control.begin();
                let learnt = self.lesson(id, ask).await;
                self.control.end();
                learnt
            }
            Request::List => shelf::list().await,
            Request::Fetch { name } => match shelf::fetch(&name).await {
                Ok(files) => return post_files(id, Event::Files { name }, files),
                Err(error) => Err(error),
            },
            Request::Remove { name } => match shelf::remove(&name).await {
                Ok(()) => shelf::list().await,
                Err(error) => Err(error),
            },
            // Answered as soon as they arrive, see `worker`.
            Request::Pause | Request::Resume | Request::Cancel => return,
        };
        match answered {
            Ok(event) => post(id, event),
            Err(error) => {
                self.forget_broken(&error);
                post_failed(id, &error, false, rule);
            }
        }
    }

    /// A device that failed is opened anew for the next request.
    pub fn forget_broken(&mut self, error: &Error) {
        if matches!(error, Error::Device { .. }) {
            self.gpu = None;
            self.silence();
        }
    }

    async fn open(&mut self, demo: bool, name: Option<String>, files: Vec<File>) -> Result<Event> {
        self.model = None;
        self.segments = None;
        self.voices.clear();
        self.learning = self.learning.take().filter(|learning| !learning.own());
        let (name, source) = match demo {
            true => ("demo".to_owned(), demo::model().await?),
            false => chosen(name, files)?,
        };
        let stored = Stored::open(source).await?;
        let config = ModelConfig::of(&stored.checkpoint)?;
        let tensors = stored.checkpoint.tensors();
        let mut files: Vec<&str> = tensors.iter().map(|tensor| tensor.file.as_str()).collect();
        files.dedup();
        let expected = expected_tensors(&config);
        let parameters = expected.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64);
        let summary = ModelSummary {
            name: name.clone(),
            architecture: config.family.name.to_owned(),
            layers: config.layers,
            hidden: config.hidden_size,
            vocab: config.vocab_size,
            parameters: parameters.sum(),
            bytes: stored.checkpoint.total_bytes(),
            shards: files.len(),
            dtype: main_dtype(&stored).map_or("none", DType::name).to_owned(),
            quantized_bits: stored.quant.as_ref().map(|quant| quant.scheme.bits),
            tied: config.tie_word_embeddings,
            experts: config.experts.as_ref().map(|experts| experts.count),
        };
        self.model = Some(Model { name, stored: Rc::new(stored), config, text: None });
        Ok(Event::Model(summary))
    }

    async fn take_text(&mut self, builtin: bool, files: &[File]) -> Result<Event> {
        self.segments = None;
        self.calibration.clear();
        let taken = match builtin {
            true => vec![demo::text(demo::CALIBRATION).await?],
            false => texts(files).await?,
        };
        let mut count = 0;
        for file in &taken {
            count += documents(file)?;
        }
        let names: Vec<&str> = taken.iter().map(|file| file.name.as_str()).collect();
        let event = Event::Text {
            name: names.join(", "),
            bytes: taken.iter().map(|file| file.content.len() as u64).sum(),
            documents: count,
        };
        self.calibration = taken;
        Ok(event)
    }

    pub fn open_model(&self) -> Result<&Model> {
        self.model.as_ref().ok_or_else(no_model)
    }

    /// The device of this name, opened if it is not.
    pub async fn choose_device(&mut self, name: &str) -> Result<Device> {
        match (name, &self.gpu) {
            ("cpu", _) => Ok(Device::Cpu),
            ("gpu", Some(device)) => Ok(device.clone()),
            ("gpu", None) => {
                // Whoever asks for the GPU here has been told that it is software.
                let choice = AdapterChoice { name: None, allow_software: true };
                let device = open_gpu(&choice, &GpuOptions::default()).await?;
                Ok(self.gpu.insert(device).clone())
            }
            (other, _) => {
                Err(Error::options(format!("there is no device \"{other}\""), "Use \"gpu\" or \"cpu\""))
            }
        }
    }

    /// Tokenizer and template of the open model, read once.
    pub async fn model_text(&mut self) -> Result<Rc<ModelText>> {
        let model = self.model.as_mut().ok_or_else(no_model)?;
        if let Some(text) = &model.text {
            return Ok(text.clone());
        }
        let text =
            ModelText::load(model.stored.checkpoint.source().as_ref(), model.config.vocab_size).await?;
        Ok(model.text.insert(Rc::new(text)).clone())
    }

    async fn calibration(&mut self, options: SegmentOptions) -> Result<Rc<Segments>> {
        if let Some((_, segments)) = self.segments.as_ref().filter(|(made_with, _)| *made_with == options) {
            return Ok(segments.clone());
        }
        let text = self.model_text().await?;
        let segments = Rc::new(calibration_segments(&text, &self.calibration, &options)?);
        self.segments = Some((options, segments.clone()));
        Ok(segments)
    }

    /// Opens and checks everything; a run that was `stopped` keeps its micro-batches and the bits that it
    /// settled, and `small_files` suits a folder that is written through copies.
    pub async fn prepare(
        &mut self,
        settings: &Settings,
        small_files: bool,
        text_optional: bool,
        stopped: Option<&Inputs>,
    ) -> Result<Prepared> {
        let scheme = scheme(settings)?;
        let mut output = output(settings);
        if let (Some(mixed), Some(stopped)) = (&mut output.mixed, stopped) {
            mixed.allocation = stopped.output.mixed.as_ref().and_then(|mixed| mixed.allocation.clone());
        }
        self.open_model()?;
        let device = self.choose_device(&settings.device).await?;
        let mut options = PlanOptions {
            output,
            scheme,
            tokens: 0,
            longest: 0,
            max_memory: settings.max_memory.unwrap_or_else(|| memory(&device)),
            batch_tokens: stopped.map(|stopped| stopped.batch_tokens),
            shard_bytes: settings.shard_bytes.unwrap_or(match small_files {
                true => FOLDER_SHARD_BYTES,
                false => DEFAULT_SHARD_BYTES,
            }),
        };
        let mut segments = Rc::new(Segments::none());
        if options.scheme.needs_inputs() && self.calibration.is_empty() {
            if !text_optional {
                return Err(Error::options(
                    "there is no calibration text",
                    "Take the built-in sample, or choose a .txt or .jsonl file; the preset rtn needs none",
                ));
            }
            options.tokens = settings.samples.saturating_mul(settings.seq_len);
            options.longest = settings.seq_len;
        } else if options.scheme.needs_inputs() {
            // What is wrong with the model or the scheme is told before the text is tokenized.
            make_plan(&self.open_model()?.stored, &options, &device)?;
            segments = self.calibration(segment_options(settings)).await?;
            options.tokens = segments.report.tokens;
            options.longest = segments.rows.iter().map(Vec::len).max().unwrap_or(0);
        }
        let model = self.open_model()?;
        let mut plan = make_plan(&model.stored, &options, &device)?;
        if options.scheme.needs_inputs() && !segments.rows.is_empty() {
            let widest = model.config.intermediate_size.max(model.config.hidden_size);
            plan.warnings.extend(segments.warn_tokens(widest));
        }
        Ok(Prepared { segments, device, options, plan })
    }

    async fn plan(&mut self, settings: &Settings, private: bool) -> Result<Event> {
        let Prepared { device, plan, .. } = self.prepare(settings, !private, true, None).await?;
        let speed = &mut self.speeds[usize::from(!device.is_cpu())];
        let speed = match *speed {
            Some(speed) => speed,
            None => *speed.insert(estimate::speed(&device).await?),
        };
        let memory = &plan.memory;
        let parts = [
            ("stream", memory.stream),
            ("between_stages", memory.between_stages),
            ("weights", memory.weights),
            ("hessian", memory.hessian),
            ("original", memory.original),
            ("working", memory.working),
        ];
        Ok(Event::Plan(PlanSummary {
            memory_bytes: memory.total(),
            memory: parts.map(|(name, bytes)| (name.to_owned(), bytes)).into(),
            seconds: Some(estimate::seconds(&plan, speed)),
            output_bytes: plan.layout.file_bytes(),
            tokens: plan.tokens,
            free_bytes: if private { shelf::free_bytes().await } else { None },
            weight_files: plan.layout.shards().len(),
            warnings: plan.warnings,
            average_bits: plan.output.mixed.map(|mixed| mixed.average.into()),
            modules: plan.modules,
            skipped: plan.skipped,
        }))
    }

    /// The rule that by itself gives the same error: the one to point at.
    async fn rule_at_fault(&mut self, settings: &Settings, error: &Error) -> Option<usize> {
        let error = error.to_string();
        let mut fails = async |rules: Vec<Rule>| {
            let some = Settings { rules, ..settings.clone() };
            let planned = self.prepare(&some, false, true, None).await;
            planned.err().is_some_and(|other| other.to_string() == error)
        };
        if settings.rules.is_empty() || fails(Vec::new()).await {
            return None;
        }
        for (at, rule) in settings.rules.iter().enumerate() {
            if fails(vec![rule.clone()]).await {
                return Some(at);
            }
        }
        None
    }
}

fn no_model() -> Error {
    Error::options("no model is open", "Choose one first")
}

/// Bytes of tensors in a file that goes to a folder: less is copied then after each block.
const FOLDER_SHARD_BYTES: u64 = 256_000_000;

fn scheme(settings: &Settings) -> Result<Scheme> {
    let preset = serde_json::from_value::<Preset>(settings.preset.clone().into()).map_err(|_| {
        Error::options(
            format!("there is no preset \"{}\"", settings.preset),
            "Use \"default\", \"fast\", \"reference\", \"awq\" or \"rtn\"",
        )
    })?;
    Scheme::chosen(&Choice {
        preset,
        bits: settings.bits.width(),
        group_size: settings.group_size.size(),
        sym: settings.sym,
        desc_act: settings.desc_act,
        static_groups: None,
        mse: None,
        damp_percent: settings.damp_percent,
        alpha: settings.alpha,
        refit: settings.refit,
        scaling: None,
    })
}

fn output(settings: &Settings) -> Output {
    let rules = settings.rules.iter();
    let skip = |rule: &Rule| rule.values.is_none().then(|| rule.pattern.clone());
    let differs = |rule: &Rule| rule.values.map(|values| Override { pattern: rule.pattern.clone(), values });
    Output {
        all_experts: settings.all_experts,
        format: settings.format,
        overrides: rules.clone().filter_map(differs).collect(),
        skip: rules.filter_map(skip).collect(),
        lm_head: settings.lm_head,
        mixed: settings.bits.average().map(Mixed::from),
        auto_groups: settings.group_size == Groups::Auto,
    }
}

pub fn segment_options(settings: &Settings) -> SegmentOptions {
    SegmentOptions { samples: Some(settings.samples), seq_len: settings.seq_len, seed: settings.seed }
}

/// Bytes that a run may take when nobody says: browsers tell little, and what they tell is coarse.
pub fn memory(device: &Device) -> u64 {
    const LEAST: f64 = 1e9;
    /// What wasm can address, less what else is in its memory.
    const WASM: f64 = 3e9;
    let navigator = scope().navigator();
    let ram = Reflect::get(&navigator, &"deviceMemory".into()).ok().and_then(|gigabytes| gigabytes.as_f64());
    let share = 0.5 * ram.unwrap_or(4.0) * f64::from(1 << 30);
    match device {
        Device::Cpu => share.clamp(LEAST, WASM) as u64,
        Device::Gpu(_) => share.max(LEAST) as u64,
    }
}

/// The element type that most bytes are of.
fn main_dtype(stored: &Stored) -> Option<DType> {
    let mut bytes = Vec::<(DType, u64)>::new();
    for tensor in stored.checkpoint.tensors() {
        match bytes.iter_mut().find(|(dtype, _)| *dtype == tensor.dtype) {
            Some((_, sum)) => *sum += tensor.bytes(),
            None => bytes.push((tensor.dtype, tensor.bytes())),
        }
    }
    bytes.into_iter().max_by_key(|(_, sum)| *sum).map(|(dtype, _)| dtype)
}

/// The model that chosen files make: those of the top folder if a whole tree was chosen.
fn chosen(name: Option<String>, files: Vec<File>) -> Result<(String, Rc<dyn Source>)> {
    let path = |file: &File| {
        let path = Reflect::get(file, &"webkitRelativePath".into()).ok().and_then(|path| path.as_string());
        path.unwrap_or_default()
    };
    let folder =
        files.first().and_then(|file| path(file).split_once('/').map(|(folder, _)| folder.to_owned()));
    let name = name.or(folder).unwrap_or_else(|| "model".to_owned());
    let files: Vec<(String, Blob)> = files
        .into_iter()
        .filter(|file| path(file).matches('/').count() <= 1)
        .map(|file| (file.name(), file.unchecked_into()))
        .collect();
    if files.is_empty() {
        return Err(Error::options("no files were chosen", "Choose the folder of a model"));
    }
    Ok((name.clone(), Rc::new(FileSource::new(name, files))))
}

/// Text files, whole.
pub async fn texts(files: &[File]) -> Result<Vec<TextFile>> {
    let mut texts = Vec::new();
    for file in files {
        if file.size() > TEXT_BYTES {
            return Err(Error::text(
                file.name(),
                format!(
                    "it has {:.0} MB, more than the {:.0} MB that are taken",
                    file.size() / 1e6,
                    TEXT_BYTES / 1e6
                ),
                "Give a part of it; a few MB of text are enough",
            ));
        }
        let buffer = wasm_bindgen_futures::JsFuture::from(file.array_buffer()).await;
        let buffer = buffer.map_err(|error| Error::io("read", file.name(), reason(&error)))?;
        texts.push(TextFile { name: file.name(), content: js_sys::Uint8Array::new(&buffer).to_vec() });
    }
    Ok(texts)
}

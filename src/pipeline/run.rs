//! The run as a whole: how it starts or goes on, what follows what, how it ends. [`super::block`] is the
//! work on one block, [`super::layer`] that on one linear layer.

use std::collections::BTreeMap;
use std::rc::Rc;

use web_time::Instant;

use super::events::{Event, Observer};
use super::journal::{Inputs, JOURNAL, Journal};
use super::plan::{Plan, outside_blocks};
use super::report::{RunReport, behind_rounding, csv};
use super::scaling::Scaled;
use super::stream::{Batches, Flows};
use super::unfinished::Unfinished;
use crate::checkpoint::{CONFIG, Format, QUANTIZE_CONFIG, Writer, config::edited_config, is_weights_file};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::face;
use crate::model::{Block, Embedding, Flow, RopeTables, Stored};
use crate::storage::Sink;
use crate::text::Segments;

/// The log of a finished run, in the output directory.
pub const QUANT_LOG: &str = "quant_log.csv";

/// What a run writes itself beside the weights; files of the source with these names are not copied.
const OWN_FILES: [&str; 4] = [CONFIG, QUANTIZE_CONFIG, QUANT_LOG, JOURNAL];

/// How a run begins.
pub struct RunOptions {
    /// What the calibration text was asked to be, for a person; compared on resuming.
    pub calibration: String,
    /// Go on with the stopped run in the sink, if there is one.
    pub resume: bool,
}

/// Quantizes `stored` as `plan` says, with `segments` as calibration text, into `sink`.
///
/// # Errors
/// [`Error::Interrupted`] when the observer asks to stop; [`Error::Resume`] when the stopped run was
/// another one; those of storage, device and numbers.
pub async fn run(
    stored: &Stored,
    plan: &Plan,
    segments: &Segments,
    device: &Device,
    sink: Rc<dyn Sink>,
    options: &RunOptions,
    observer: &mut dyn Observer,
) -> Result<RunReport> {
    let begun = Instant::now();
    let calibrated = plan.scheme.needs_inputs();
    let inputs = Inputs {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        source: format!("{:016x}", stored.checkpoint.sampled_fingerprint().await?),
        calibration: if calibrated { options.calibration.clone() } else { String::new() },
        text: if calibrated { format!("{:016x}", segments.fingerprint()) } else { String::new() },
        scheme: plan.scheme.clone(),
        output: plan.output.clone(),
        shards: plan.layout.shards().len(),
        device: device.describe(),
        batch_tokens: plan.batch_tokens,
    };
    let journal = if options.resume { Journal::read(sink.as_ref()).await? } else { None };
    if let Some(journal) = &journal {
        journal.check(&inputs)?;
        journal.check_progress(&plan.layout, &plan.config)?;
    }
    let mut clock = Clock::default();
    let measuring = plan.measuring_seconds.filter(|_| journal.is_none());
    if let Some(seconds) = measuring {
        clock.seconds.insert("measuring", seconds);
    }
    let journal = journal.unwrap_or(Journal {
        inputs,
        blocks_done: 0,
        sums: Vec::new(),
        seconds: measuring.unwrap_or_default(),
        act_ordered: Vec::new(),
        modules: Vec::new(),
        warnings: plan.warnings.clone(),
    });
    // With no tensor done this starts anew.
    let since = Instant::now();
    let going_on = async |done| {
        observer.event(Event::Verifying { done });
        observer.pause().await;
        match observer.stop_requested() {
            true => Err(Error::Interrupted {
                place: "reading the finished blocks".into(),
                advice: face::GO_ON.to_string(),
            }),
            false => Ok(()),
        }
    };
    let writer = Writer::resume(sink.clone(), plan.layout.clone(), &journal.sums, going_on).await?;
    if !journal.sums.is_empty() {
        clock.add("verify", since);
    }
    journal.write(sink.as_ref()).await?;
    for warning in &journal.warnings {
        observer.event(Event::Warning(warning.clone()));
    }
    let rows: &[_] = if calibrated { &segments.rows } else { &[] };
    let batches = Batches::new(rows, plan.batch_tokens, plan.scheme.needs_held());
    observer.event(Event::Started {
        blocks: plan.config.layers,
        done: journal.blocks_done,
        tokens: batches.tokens(),
    });
    let rope = plan.config.rope_tables(device, batches.longest())?;
    let mut run = Run {
        stored,
        plan,
        device,
        sink: sink.clone(),
        batches,
        rope,
        journal,
        clock,
        done: 0.0,
        observer,
        scaled: Rc::new(Scaled::nothing(stored)),
    };
    let report = run.go(writer, begun).await?;
    sink.remove(JOURNAL).await?;
    Ok(report)
}

/// Seconds by step.
#[derive(Default)]
pub(super) struct Clock {
    pub seconds: BTreeMap<&'static str, f64>,
}

impl Clock {
    pub fn add(&mut self, step: &'static str, since: Instant) {
        *self.seconds.entry(step).or_default() += since.elapsed().as_secs_f64();
    }
}

/// A run at work.
pub(super) struct Run<'a> {
    pub stored: &'a Stored,
    pub plan: &'a Plan,
    pub device: &'a Device,
    pub sink: Rc<dyn Sink>,
    pub batches: Batches,
    pub rope: RopeTables,
    pub journal: Journal,
    pub clock: Clock,
    /// Floating-point operations behind it, for the progress bar.
    pub done: f64,
    pub observer: &'a mut dyn Observer,
    /// The weights of the block at hand.
    pub scaled: Rc<Scaled<'a>>,
}

impl Run<'_> {
    async fn go(&mut self, mut writer: Writer, begun: Instant) -> Result<RunReport> {
        let layers = self.plan.config.layers;
        let earlier = self.journal.seconds;
        if writer.position() == 0 {
            for name in outside_blocks(self.stored, &self.plan.config, &self.plan.assigned) {
                writer.copy(&self.stored.checkpoint, &name).await?;
            }
        }
        let calibrated = self.plan.scheme.needs_inputs();
        let mut flows = Flows::new(self.device, self.plan.stream_on_device, self.batches.len());
        let mut original = None;
        // A head that is quantized comes after the last block.
        let head = self.plan.head();
        let to_do = self.journal.blocks_done < layers || head.is_some();
        if calibrated && to_do {
            let ids = (0..self.batches.len()).flat_map(|batch| self.batches.get(batch).ids.iter().copied());
            let embedding =
                Embedding::load_rows(&self.plan.config, self.stored, self.device, ids.collect::<Vec<_>>())
                    .await?;
            let on_device = self.plan.stream_on_device;
            flows = flows.from_stream(self.batches.embed(&embedding, self.device, on_device).await?);
            if self.plan.scheme.needs_original() {
                let stream = self.batches.embed(&embedding, self.device, on_device).await?;
                let flows = Flows::new(self.device, on_device, self.batches.len());
                original = Some(flows.from_stream(stream));
            }
        }
        if calibrated && self.journal.blocks_done > 0 && to_do {
            self.replay(&mut flows, &mut original).await?;
        }
        for layer in self.journal.blocks_done..layers {
            self.block(layer, &mut flows, &mut original, &mut writer).await?;
            let since = Instant::now();
            writer.flush().await?;
            self.clock.add("write", since);
            self.journal.blocks_done = layer + 1;
            self.journal.sums = writer.sums().to_vec();
            self.journal.seconds = earlier + begun.elapsed().as_secs_f64();
            self.journal.write(self.sink.as_ref()).await?;
            self.observer.event(Event::BlockDone { block: layer, blocks: layers });
        }
        if let Some(stage) = head {
            self.head(&stage, &mut flows, &mut original, &mut writer).await?;
        }
        let mut report = self.finish(writer).await?;
        report.seconds = earlier + begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Applies the finished blocks, as they were written, to the text: the same weights and the same
    /// operations give the same bits as in the run that was stopped.
    async fn replay(&mut self, flows: &mut Flows, original: &mut Option<Flows>) -> Result<()> {
        let view = Unfinished::new(
            self.sink.reader().await?,
            &self.plan.layout,
            self.stored.checkpoint.config_text(),
            &self.plan.quant_config(None)?,
        )?;
        // As the run computed with them, so that the rest comes out the same.
        let done = Stored::open(Rc::new(view)).await?.widened();
        for layer in 0..self.journal.blocks_done {
            self.observer.event(Event::Replaying { block: layer });
            let block = Block::load(&self.plan.config, layer, &done, self.device).await?;
            self.whole_block(layer, &block, flows).await?;
            if let Some(original) = original {
                drop(block);
                let block = self.original(layer).await?;
                self.whole_block(layer, &block, original).await?;
            }
        }
        self.done = self.plan.flops * self.journal.blocks_done as f64 / self.plan.config.layers as f64;
        Ok(())
    }

    /// Applies a block to every micro-batch.
    async fn whole_block(&mut self, layer: usize, block: &Block, flows: &mut Flows) -> Result<()> {
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let Some(flow) = flows.take(batch)? else { continue };
            let h = block.forward(flow.h, self.batches.get(batch).seq_len, &self.rope).await?;
            flows.put(batch, Flow::new(h)).await?;
            self.device.settle().await?;
        }
        Ok(())
    }

    async fn finish(&mut self, writer: Writer) -> Result<RunReport> {
        if let Some(behind) = behind_rounding(&self.journal.modules) {
            self.warn(behind);
        }
        let quant = self.plan.quant_config(Some(&self.journal.act_ordered))?;
        let checkpoint = &self.stored.checkpoint;
        let source = checkpoint.source();
        for file in source.files() {
            if is_weights_file(&file.name) || OWN_FILES.contains(&file.name.as_str()) {
                continue;
            }
            writer.copy_file(source.as_ref(), &file.name, file.size).await?;
        }
        let mut extra = vec![(QUANT_LOG.to_owned(), csv(&self.journal.modules).into_bytes())];
        if quant.format != Format::CompressedTensors {
            let text = serde_json::to_vec_pretty(&quant.to_json())
                .map_err(|error| Error::Internal(error.to_string()))?;
            extra.push((QUANTIZE_CONFIG.to_owned(), text));
        }
        let since = Instant::now();
        writer.finish(&extra, &edited_config(checkpoint.config_text(), &quant)?).await?;
        self.clock.add("verify", since);
        Ok(RunReport {
            modules: std::mem::take(&mut self.journal.modules),
            tokens: self.batches.tokens(),
            seconds: 0.0,
            seconds_by_step: std::mem::take(&mut self.clock.seconds),
            output_bytes: self.plan.layout.tensor_bytes(),
            bits_per_weight: self.plan.bits_per_weight(),
            allocation: self.plan.allocation.clone(),
            warnings: std::mem::take(&mut self.journal.warnings),
        })
    }

    pub(super) fn warn(&mut self, text: String) {
        self.observer.event(Event::Warning(text.clone()));
        self.journal.warnings.push(text);
    }

    pub(super) fn advance(&mut self, block: usize, stage: &'static str, flops: f64) {
        self.done += flops;
        let total = self.plan.flops.max(1.0);
        self.observer.event(Event::Progress { block, stage, done: self.done.min(total), total });
    }

    /// Where stopping loses nothing but the block at hand.
    pub(super) async fn stop_point(&mut self, layer: usize) -> Result<()> {
        self.observer.pause().await;
        if !self.observer.stop_requested() {
            return Ok(());
        }
        let kept = match self.journal.blocks_done {
            0 => "no block was finished yet".to_owned(),
            1 => "1 finished block is kept".to_owned(),
            done => format!("{done} finished blocks are kept"),
        };
        let advice = format!("{kept}; {}", face::GO_ON);
        let layers = self.plan.config.layers;
        let place = match layer < layers {
            true => format!("in block {} of {layers}", layer + 1),
            false => "in the output head".to_owned(),
        };
        Err(Error::Interrupted { place, advice })
    }
}

//! The run itself: block by block, stage by stage.
//!
//! A stage is: accumulate H from the stage's inputs, quantize its linear layers, compute its outputs
//! with the quantized weights; those are the next stage's inputs. So each stage's error is seen by
//! the next, and every linear layer is multiplied once.

use std::collections::BTreeMap;
use std::rc::Rc;

use web_time::Instant;

use super::corner::Corner;
use super::events::{Event, Observer};
use super::journal::{Inputs, JOURNAL, Journal};
use super::plan::{Assigned, Plan, block_copies, group_size, linear_flops, outside_blocks, stage_flops};
use super::report::{ModuleRow, RunReport, csv, logged};
use super::stream::{Batch, Batches, Stream};
use super::unfinished::Unfinished;
use crate::checkpoint::{
    CONFIG, DType, Format, GptqLinear, QUANTIZE_CONFIG, Writer, config::edited_config, floats,
    is_weights_file,
};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::face;
use crate::gptq::layer::{Losses, Prepared, prepare, quantize_rows};
use crate::kernels::rmsnorm::rmsnorm;
use crate::kernels::rope::RopeTable;
use crate::kernels::symmetric::SymmetricPanels;
use crate::model::arch::{Stage, stages};
use crate::model::{Block, Embedding, Linear, LinearSpec, Stored, Weights, final_norm, load_f32};
use crate::storage::Sink;
use crate::tensor::{Elem, Host, Tensor};
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
    }
    let journal = journal.unwrap_or(Journal {
        inputs,
        blocks_done: 0,
        sums: Vec::new(),
        seconds: 0.0,
        act_ordered: Vec::new(),
        modules: Vec::new(),
        warnings: plan.warnings.clone(),
    });
    // With no tensor done this starts anew.
    let writer = Writer::resume(sink.clone(), plan.layout.clone(), &journal.sums).await?;
    journal.write(sink.as_ref()).await?;
    for warning in &journal.warnings {
        observer.event(Event::Warning(warning.clone()));
    }
    let batches = Batches::new(if calibrated { &segments.rows } else { &[] }, plan.batch_tokens);
    observer.event(Event::Started {
        blocks: plan.config.layers,
        done: journal.blocks_done,
        tokens: batches.tokens(),
    });
    let rope = plan.config.rope.table(device, plan.config.head_dim, batches.longest())?;
    let mut run = Run {
        stored,
        plan,
        device,
        sink: sink.clone(),
        batches,
        rope,
        journal,
        clock: Clock::default(),
        done: 0.0,
        observer,
    };
    let report = run.go(writer, begun).await?;
    sink.remove(JOURNAL).await?;
    Ok(report)
}

/// Seconds by step.
#[derive(Default)]
struct Clock {
    seconds: BTreeMap<&'static str, f64>,
}

impl Clock {
    fn add(&mut self, step: &'static str, since: Instant) {
        *self.seconds.entry(step).or_default() += since.elapsed().as_secs_f64();
    }
}

struct Run<'a> {
    stored: &'a Stored,
    plan: &'a Plan,
    device: &'a Device,
    sink: Rc<dyn Sink>,
    batches: Batches,
    rope: RopeTable,
    journal: Journal,
    clock: Clock,
    /// Floating-point operations behind it, for the progress bar.
    done: f64,
    observer: &'a mut dyn Observer,
}

/// Where a linear layer is, for rows and progress.
#[derive(Clone, Copy)]
struct Place {
    layer: usize,
    stage: &'static str,
}

/// The inputs of a stage, one micro-batch at a time.
#[derive(Clone, Copy, PartialEq)]
enum Input {
    Qkv,
    O,
    GateUp,
    Down,
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
        let mut stream = Stream::new(self.device, self.plan.stream_on_device, self.batches.len());
        // A head that is quantized comes after the last block.
        let head = self.plan.head();
        let to_do = self.journal.blocks_done < layers || head.is_some();
        if calibrated && to_do {
            let ids = (0..self.batches.len()).flat_map(|batch| self.batches.get(batch).ids.iter().copied());
            let embedding =
                Embedding::load_rows(&self.plan.config, self.stored, self.device, ids.collect::<Vec<_>>())
                    .await?;
            stream = self.batches.embed(&embedding, self.device, self.plan.stream_on_device).await?;
        }
        if calibrated && self.journal.blocks_done > 0 && to_do {
            self.replay(&mut stream).await?;
        }
        for layer in self.journal.blocks_done..layers {
            self.block(layer, &mut stream, &mut writer).await?;
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
            self.head(&stage, &mut stream, &mut writer).await?;
        }
        let mut report = self.finish(writer).await?;
        report.seconds = earlier + begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Applies the finished blocks, as they were written, to the text: the same weights and the same
    /// operations give the same bits as in the run that was stopped.
    async fn replay(&mut self, stream: &mut Stream) -> Result<()> {
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
            for batch in 0..self.batches.len() {
                self.stop_point(layer).await?;
                let Some(mut h) = stream.take(batch)? else { continue };
                block.forward(&mut h, self.batches.get(batch).seq_len, &self.rope)?;
                stream.put(batch, h).await?;
                self.device.settle().await?;
            }
        }
        self.done = self.plan.flops * self.journal.blocks_done as f64 / self.plan.config.layers as f64;
        Ok(())
    }

    async fn block(&mut self, layer: usize, stream: &mut Stream, writer: &mut Writer) -> Result<()> {
        for name in block_copies(self.stored, layer, &self.plan.assigned) {
            writer.copy(&self.stored.checkpoint, &name).await?;
        }
        let plan = self.plan;
        let mut block = Block::without_linears(&self.plan.config, layer, self.stored, self.device).await?;
        let mut between = Stream::new(self.device, self.plan.stream_on_device, self.batches.len());
        for stage in stages(&self.plan.config, layer) {
            let input = match stage.name {
                "qkv" => Input::Qkv,
                "o" => Input::O,
                "gate_up" => Input::GateUp,
                _ => Input::Down,
            };
            let calibrated = plan.scheme.needs_inputs();
            let Some(assigned) = stage.linears.first().and_then(|spec| plan.assigned(&spec.module)) else {
                // Asked to stay in 16 bits.
                if calibrated && input == Input::GateUp {
                    self.pass_attention(layer, &block, stream, &mut between).await?;
                }
                for spec in stage.linears {
                    let linear = self.stored.linear(&spec, self.device).await?;
                    block.set_linear(spec, linear);
                }
                continue;
            };
            let hessian = match calibrated {
                true => Some(self.hessian(layer, &stage, input, &block, stream, &mut between).await?),
                false => None,
            };
            let prepared = self
                .prepare(&format!("block {layer}, stage {}", stage.name), &stage, assigned, hessian.as_ref())
                .await?;
            drop(hessian);
            for spec in stage.linears {
                let place = Place { layer, stage: stage.name };
                if let Some(linear) = self.linear(place, &spec, assigned, &prepared, writer, true).await? {
                    block.set_linear(spec, linear);
                }
            }
        }
        let last = layer + 1 == plan.config.layers && plan.head().is_none();
        if plan.scheme.needs_inputs() && !last {
            self.close_block(layer, &block, stream, &mut between).await?;
        }
        Ok(())
    }

    /// Adds the attention's outputs, for a stage behind it that needs no Hessian.
    async fn pass_attention(
        &mut self,
        layer: usize,
        block: &Block,
        stream: &mut Stream,
        between: &mut Stream,
    ) -> Result<()> {
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let seq_len = self.batches.get(batch).seq_len;
            let Some(mut hidden) = stream.take(batch)? else { continue };
            let since = Instant::now();
            let mixed = match between.take(batch)? {
                Some(mixed) => mixed,
                None => block.attention(&block.attention_input(&hidden)?, seq_len, &self.rope)?,
            };
            block.add_attention(&mut hidden, &mixed)?;
            stream.put(batch, hidden).await?;
            self.device.settle().await?;
            self.clock.add("forward", since);
        }
        Ok(())
    }

    /// Quantizes the output head, whose inputs are the last block's outputs behind the final norm.
    async fn head(&mut self, stage: &Stage, stream: &mut Stream, writer: &mut Writer) -> Result<()> {
        let plan = self.plan;
        let layer = plan.config.layers;
        let Some((spec, assigned)) =
            stage.linears.first().and_then(|spec| plan.assigned(&spec.module).map(|of| (spec, of)))
        else {
            return Ok(());
        };
        let mut hessian = None;
        if plan.scheme.needs_inputs() {
            let norm = final_norm(&plan.config, self.stored, self.device).await?;
            let h = hessian.insert(SymmetricPanels::zeros(self.device, spec.in_features)?);
            for batch in 0..self.batches.len() {
                self.stop_point(layer).await?;
                let Some(hidden) = stream.take(batch)? else { continue };
                let since = Instant::now();
                h.accumulate(
                    &rmsnorm(&hidden, &norm, plan.config.rms_norm_eps)?,
                    2.0 / self.batches.tokens() as f32,
                )?;
                self.device.settle().await?;
                self.clock.add("hessian", since);
                let Batch { ids, seq_len } = self.batches.get(batch);
                let flops = stage_flops(&plan.config, stage, ids.len(), *seq_len);
                self.advance(layer, stage.name, flops);
            }
        }
        let prepared = self.prepare("the output head", stage, assigned, hessian.as_ref()).await?;
        drop(hessian);
        let place = Place { layer, stage: stage.name };
        self.linear(place, spec, assigned, &prepared, writer, false).await?;
        Ok(())
    }

    /// Computes a stage's inputs for every micro-batch and sums up their Hessian, (2/tokens)·XᵀX.
    async fn hessian(
        &mut self,
        layer: usize,
        stage: &Stage,
        input: Input,
        block: &Block,
        stream: &mut Stream,
        between: &mut Stream,
    ) -> Result<SymmetricPanels> {
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let mut h = SymmetricPanels::zeros(self.device, n)?;
        let scale = 2.0 / self.batches.tokens() as f32;
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let seq_len = self.batches.get(batch).seq_len;
            let Some(mut hidden) = stream.take(batch)? else { continue };
            let since = Instant::now();
            let x = match input {
                Input::Qkv => block.attention_input(&hidden)?,
                Input::O => block.attention(&block.attention_input(&hidden)?, seq_len, &self.rope)?,
                Input::GateUp => {
                    let mixed = match between.take(batch)? {
                        Some(mixed) => mixed,
                        None => block.attention(&block.attention_input(&hidden)?, seq_len, &self.rope)?,
                    };
                    block.add_attention(&mut hidden, &mixed)?;
                    block.mlp_input(&hidden)?
                }
                Input::Down => block.mlp_hidden(&block.mlp_input(&hidden)?)?,
            };
            self.clock.add("forward", since);
            let since = Instant::now();
            h.accumulate(&x, scale)?;
            self.clock.add("hessian", since);
            if matches!(input, Input::O | Input::Down) && self.plan.keep_between {
                between.put(batch, x).await?;
            }
            stream.put(batch, hidden).await?;
            self.device.settle().await?;
            let tokens = self.batches.get(batch).ids.len();
            self.advance(layer, stage.name, stage_flops(&self.plan.config, stage, tokens, seq_len));
        }
        Ok(h)
    }

    /// The block's last outputs, the next block's inputs.
    async fn close_block(
        &mut self,
        layer: usize,
        block: &Block,
        stream: &mut Stream,
        between: &mut Stream,
    ) -> Result<()> {
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let Some(mut hidden) = stream.take(batch)? else { continue };
            let since = Instant::now();
            let inner = match between.take(batch)? {
                Some(inner) => inner,
                None => block.mlp_hidden(&block.mlp_input(&hidden)?)?,
            };
            block.add_mlp(&mut hidden, &inner)?;
            stream.put(batch, hidden).await?;
            self.device.settle().await?;
            self.clock.add("forward", since);
        }
        Ok(())
    }

    /// Orders the columns of a stage's inputs and factors their Hessian.
    async fn prepare(
        &mut self,
        place: &str,
        stage: &Stage,
        assigned: &Assigned,
        hessian: Option<&SymmetricPanels>,
    ) -> Result<Prepared> {
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let since = Instant::now();
        let scheme = &assigned.scheme;
        let prepared = prepare(scheme, assigned.scale_type(), self.device, n, hessian, place).await?;
        self.clock.add("factor", since);
        if prepared.fell_back() {
            self.warn(format!(
                "{place}: no damping made the Hessian positive definite; rounded to nearest instead of GPTQ"
            ));
        } else if prepared.damp_used().is_some_and(|used| used > scheme.damp_percent) {
            let used = prepared.damp_used().unwrap_or_default();
            self.warn(format!("{place}: damping had to be raised from {} to {used}", scheme.damp_percent));
        }
        Ok(prepared)
    }

    /// Quantizes and writes one linear layer; what it is from now on, unless nobody will `use` it.
    async fn linear(
        &mut self,
        place: Place,
        spec: &LinearSpec,
        assigned: &Assigned,
        prepared: &Prepared,
        writer: &mut Writer,
        used: bool,
    ) -> Result<Option<Linear>> {
        let scheme = &assigned.scheme;
        self.stop_point(place.layer).await?;
        let since = Instant::now();
        let (linear, quantized, loss) = self.quantize_linear(spec, assigned, prepared, used).await?;
        let row = ModuleRow {
            layer: place.layer,
            module: spec.module.clone(),
            input: spec.in_features,
            output: spec.out_features,
            bits: scheme.bits,
            group: group_size(scheme),
            tokens: self.batches.tokens(),
            damp: prepared.damp_used(),
            rtn_loss: loss.map(|loss| logged(loss.rtn)),
            gptq_loss: loss.map(|loss| logged(loss.gptq)),
            seconds: since.elapsed().as_secs_f64(),
        };
        self.clock.add("quantize", since);
        let since = Instant::now();
        if quantized.is_act_ordered(group_size(scheme))? {
            self.journal.act_ordered.push(spec.module.clone());
        }
        for (name, bytes) in self.plan.output.format.tensors(&quantized, &assigned.stored(spec))? {
            writer.write(&name, &bytes).await?;
        }
        self.clock.add("write", since);
        self.observer.event(Event::Module(&row));
        if self.observer.wants_weights() {
            let corner = Corner::of(self.stored, spec, &quantized).await?;
            self.observer.event(Event::Weights(&corner));
        }
        self.journal.modules.push(row);
        self.advance(place.layer, place.stage, linear_flops(scheme, spec, self.batches.tokens(), true));
        Ok(linear)
    }

    /// Quantizes one linear layer, some rows at a time.
    async fn quantize_linear(
        &mut self,
        spec: &LinearSpec,
        assigned: &Assigned,
        prepared: &Prepared,
        used: bool,
    ) -> Result<(Option<Linear>, GptqLinear, Option<Losses>)> {
        let (rows, n) = (spec.out_features, spec.in_features);
        let name = format!("{}.weight", spec.module);
        let elem = self.stored.info(&name)?.map_or(Elem::F32, |(elem, _)| elem);
        let groups = assigned.scheme.groups(n);
        let bias = match assigned.bias {
            Some(dtype) => {
                let name = format!("{}.bias", spec.module);
                let values = load_f32(self.stored, &name, &[rows]).await?;
                Some(stored_bias(values, dtype, &name)?)
            }
            None => None,
        };
        let mut result = GptqLinear {
            n: rows,
            k: n,
            bits: assigned.scheme.bits,
            codes: Vec::with_capacity(rows * n),
            scales: vec![0.0; groups * rows],
            zeros: vec![0; groups * rows],
            g_idx: prepared.g_idx().to_vec(),
            bias: bias.clone(),
        };
        let mut chunks = Vec::new();
        let mut loss: Option<Losses> = None;
        let step = (self.plan.piece_bytes / (4 * n) / 64 * 64).max(64);
        for start in (0..rows).step_by(step) {
            let end = rows.min(start + step);
            let bytes = self.stored.read_rows(&name, start..end).await?;
            let weight = Tensor::from_bytes(&Device::Cpu, elem, &[end - start, n], &bytes)?;
            check_finite(&weight, &name, start)?;
            let weight = match self.device {
                Device::Cpu => weight,
                Device::Gpu(_) => Tensor::from_bytes(self.device, elem, &[end - start, n], &bytes)?,
            };
            drop(bytes);
            let part = quantize_rows(prepared, &weight).await?;
            result.codes.extend_from_slice(&part.codes);
            // The file has [groups, rows].
            for row in 0..end - start {
                for g in 0..groups {
                    result.scales[g * rows + start + row] = part.scales[row * groups + g];
                    result.zeros[g * rows + start + row] = part.zeros[row * groups + g];
                }
            }
            if let Some(part) = part.loss {
                let sum = loss.get_or_insert_default();
                sum.gptq += part.gptq;
                sum.rtn += part.rtn;
            }
            if used {
                chunks.push(part.dequantized);
            }
        }
        if loss.is_some_and(|loss| !loss.gptq.is_finite()) {
            return Err(Error::numeric(
                &spec.module,
                "its quantization loss is not finite",
                "The activations overflow in 32-bit arithmetic; check the model file",
            ));
        }
        let linear = if used { Some(Linear::new(chunks, bias)?) } else { None };
        Ok((linear, result, loss))
    }

    async fn finish(&mut self, writer: Writer) -> Result<RunReport> {
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
            warnings: std::mem::take(&mut self.journal.warnings),
        })
    }

    fn warn(&mut self, text: String) {
        self.observer.event(Event::Warning(text.clone()));
        self.journal.warnings.push(text);
    }

    fn advance(&mut self, block: usize, stage: &'static str, flops: f64) {
        self.done += flops;
        let total = self.plan.flops.max(1.0);
        self.observer.event(Event::Progress { block, stage, done: self.done.min(total), total });
    }

    /// Where stopping loses nothing but the block at hand.
    async fn stop_point(&mut self, layer: usize) -> Result<()> {
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

/// A weight that is not a number would spoil a whole layer unnoticed.
fn check_finite(weight: &Tensor, name: &str, first_row: usize) -> Result<()> {
    let n = weight.cols();
    let at = match weight.host_data()? {
        Host::F32(v) => v.iter().position(|x| !x.is_finite()),
        Host::F16(v) => v.iter().position(|x| !x.is_finite()),
        Host::BF16(v) => v.iter().position(|x| !x.is_finite()),
        Host::U32(_) | Host::U8(_) => None,
    };
    match at {
        None => Ok(()),
        Some(at) => Err(Error::numeric(
            name,
            format!("the weight at row {}, column {} is not a finite number", first_row + at / n, at % n),
            DAMAGED,
        )),
    }
}

/// A bias as the file keeps it, and so as the run must use it: a GPTQ file in f16, any other in the
/// model's own type.
fn stored_bias(values: Vec<f32>, dtype: DType, name: &str) -> Result<Vec<f32>> {
    let rounded: Vec<f32> = match dtype {
        DType::F16 => values.iter().copied().map(floats::round_to_f16).collect(),
        _ => values.clone(),
    };
    match rounded.iter().position(|x| !x.is_finite()) {
        None => Ok(rounded),
        Some(at) if values[at].is_finite() => Err(Error::numeric(
            name,
            format!("{} at row {at} is beyond what the format's 16 bits hold", values[at]),
            format!("This model cannot be stored as GPTQ; use {}", face::AS_COMPRESSED),
        )),
        Some(at) => {
            Err(Error::numeric(name, format!("the bias at row {at} is not a finite number"), DAMAGED))
        }
    }
}

const DAMAGED: &str = "The file is damaged; fetch the model again";

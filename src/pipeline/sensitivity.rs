//! What each unit of layers loses at each width, measured before a run whose bits are an average.
//!
//! Some of the calibration sequences go through the original model, block by block. Of each block one unit at a
//! time is quantized to each width, the others staying as they are, and the block's outputs on other sequences
//! are compared: Σ ‖h' − h‖² / ‖h‖² over their tokens, h the residual stream behind the block. What later blocks
//! read is the stream divided by its length, so errors of different layers and blocks add up in one measure.
//!
//! Layers are quantized by a plain sweep, since it takes more off some layers' errors than off others'; and judged
//! on sequences that it did not see, since what it takes off those that it saw says too much where they are few.

use std::rc::Rc;

use web_time::Instant;

use super::allocation::{Allocation, Unit, kind};
use super::events::{Event, Observer};
use super::plan::{Assigned, Plan, PlanOptions, make_plan};
use super::report::logged;
use super::stream::{Batch, Batches};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::face;
use crate::gptq::rows::quantize_rows;
use crate::gptq::scheme::{Alpha, Scheme};
use crate::gptq::stage::{Calibration, Prepared, prepare};
use crate::kernels::columns::copy;
use crate::kernels::norm::{add_squared_differences, add_squares};
use crate::kernels::symmetric::SymmetricPanels;
use crate::model::arch::{EXPERT_STAGES, Stage, head_stage, stages};
use crate::model::{
    Block, Embedding, Flow, Linear, LinearSpec, ModelConfig, RopeTables, Stored, final_norm, linear_elem,
    linear_rows, load_f32,
};
use crate::tensor::{Elem, Tensor};
use crate::text::Segments;

/// Tokens that judge, and that make a Hessian: so many, or a multiple of the widest layer's inputs. Of either one
/// sequence at least.
const JUDGES: usize = 2048;
const SUMMED: usize = 4096;
const SUMMED_PER_INPUT: usize = 2;

/// Of experts, the tokens that say enough of one's inputs; of fewer, those of the whole layer are taken.
const EXPERT_TOKENS: usize = 64;

/// The widths that are measured. With eight bits next to nothing is lost, and what is follows from four.
const MEASURED: [u32; 3] = [2, 3, 4];

/// What is left of an error when codes of eight bits take the place of those of so many: steps are smaller, and
/// errors go by their squares.
fn left_by_eight(bits: u32) -> f64 {
    (f64::from((1u32 << bits) - 1) / 255.0).powi(2)
}

/// The plan with bits that [`allocate`] settled, which `options` then have. What was warned of stays.
///
/// # Errors
/// As [`allocate`] and [`make_plan`].
pub async fn settle(
    stored: &Stored,
    options: &mut PlanOptions,
    plan: &Plan,
    segments: &Segments,
    device: &Device,
    observer: &mut dyn Observer,
) -> Result<Plan> {
    let begun = Instant::now();
    let allocation = allocate(stored, plan, segments, device, observer).await?;
    let seconds = begun.elapsed().as_secs_f64();
    if let Some(mixed) = &mut options.output.mixed {
        mixed.allocation = Some(allocation);
    }
    let mut settled = make_plan(stored, options, device)?;
    settled.measuring_seconds = Some(seconds);
    let known = settled.warnings.clone();
    settled.warnings.extend(plan.warnings.iter().filter(|warning| !known.contains(warning)).cloned());
    Ok(settled)
}

/// Measures what the units of `plan` lose, and settles their bits.
///
/// # Errors
/// [`Error::Interrupted`] when the observer asks to stop; [`Error::Options`] as [`Allocation::new`]; those of
/// the source, the device and numbers.
pub async fn allocate(
    stored: &Stored,
    plan: &Plan,
    segments: &Segments,
    device: &Device,
    observer: &mut dyn Observer,
) -> Result<Allocation> {
    let Some(mixed) = &plan.output.mixed else {
        return Err(Error::Internal("an allocation without an average".into()));
    };
    let batches = sample(plan, &segments.rows);
    let rope = plan.config.rope_tables(device, batches.longest())?;
    let steps = plan.units.iter().map(|unit| measured(unit).count()).sum::<usize>();
    let mut measuring = Measuring { stored, plan, device, batches, rope, observer, done: 0, steps };
    let errors = measuring.errors().await?;
    Allocation::new(mixed.average, &plan.units, &errors)
}

fn measured(unit: &Unit) -> impl Iterator<Item = u32> {
    unit.widths.iter().copied().filter(|width| MEASURED.contains(width))
}

/// Operations of measuring `units`, about: the sample once through the model, a Hessian for each stage, and for each
/// width a factor and a sweep of each layer and the judges' way through what is left of the block.
pub fn flops(config: &ModelConfig, units: &[Unit], stages: &[(usize, Stage)], options: &PlanOptions) -> f64 {
    let inputs = |stage: &Stage| stage.linears.first().map_or(0, |spec| spec.in_features);
    let widest = stages.iter().map(|(_, stage)| inputs(stage)).max().unwrap_or(0);
    let limit = |wanted: usize| wanted.max(options.longest).min(options.tokens);
    let judges = limit(JUDGES).min((options.tokens / 4).max(options.longest)) as f64;
    let summed = limit(SUMMED.max(SUMMED_PER_INPUT * widest)) as f64;
    // Of experts, a token passes a few.
    let seen = |stage: &Stage| match &config.experts {
        Some(experts) if EXPERT_STAGES.contains(&stage.name) => {
            experts.per_token as f64 / experts.count as f64
        }
        _ => 1.0,
    };
    let weights = |stage: &Stage| {
        let of = |spec: &LinearSpec| (spec.in_features * spec.out_features) as f64;
        seen(stage) * stage.linears.iter().map(of).sum::<f64>()
    };
    let mut sum = 0.0;
    for unit in units {
        let own = || stages.iter().filter(|(block, _)| *block == unit.block).map(|(_, stage)| stage);
        let of_unit = |stage: &&Stage| {
            kind(stage.name) == unit.kind
                && stage.linears.iter().any(|spec| unit.modules.contains(&spec.module))
        };
        let behind: f64 = own().skip_while(|stage| !of_unit(stage)).map(weights).sum();
        let widths = measured(unit).count() as f64;
        // The inputs of later stages come out of the first, at every width anew.
        let (sums, moving) = match own().filter(of_unit).count() {
            0 | 1 => (1.0, judges),
            _ => (widths, judges + summed),
        };
        let mut each = 2.0 * moving * behind;
        for stage in own().filter(of_unit) {
            let n = inputs(stage) as f64;
            sum += sums * seen(stage) * summed * n * n + 2.0 * (judges + summed) * weights(stage);
            let layers = stage.linears.iter().filter(|spec| unit.modules.contains(&spec.module));
            each += layers.map(|spec| n * n * (2.0 * spec.out_features as f64 + n)).sum::<f64>();
        }
        sum += widths * each;
    }
    sum
}

/// Tokens that the measuring holds in memory at most, of sequences of `longest` at most.
pub fn tokens(widest: usize, longest: usize) -> usize {
    (JUDGES + SUMMED.max(SUMMED_PER_INPUT * widest)).max(2 * longest)
}

/// Some of the rows, evenly spread: those that are summed up, and others that are held out and judge.
fn sample(plan: &Plan, rows: &[Vec<u32>]) -> Batches {
    let tokens = rows.iter().map(Vec::len).sum::<usize>().max(1);
    let widest = plan.modules.iter().map(|module| module.input).max().unwrap_or(0);
    let rows_of = |wanted: usize| (wanted * rows.len() / tokens).max(1);
    let judges = rows_of(JUDGES).min(rows.len() / 4).max(1).min(rows.len());
    let summed = rows_of(SUMMED.max(SUMMED_PER_INPUT * widest));
    let spread = |of: &[usize], count: usize| -> Vec<usize> {
        (0..count).map(|index| of[index * of.len() / count]).collect()
    };
    let all: Vec<usize> = (0..rows.len()).collect();
    let held = spread(&all, judges);
    // The only sequence there is has to do for both.
    let others: Vec<usize> =
        all.iter().copied().filter(|row| !held.contains(row) || rows.len() == 1).collect();
    let summed = spread(&others, summed.min(others.len()));
    Batches::of(summed.iter().map(|row| &rows[*row]), held.iter().map(|row| &rows[*row]), plan.batch_tokens)
}

/// A block's outputs for one micro-batch, [tokens, hidden], and how much an error of a token counts.
struct After {
    h: Tensor,
    weights: Vec<f64>,
}

impl After {
    async fn new(h: Tensor) -> Result<Self> {
        let squares = squares(&h).await?;
        // A token without a length would count without end.
        let least = 1e-6 * squares.iter().sum::<f64>() / squares.len().max(1) as f64;
        let weights = squares.iter().map(|square| 1.0 / square.max(least).max(f64::MIN_POSITIVE)).collect();
        Ok(Self { h, weights })
    }

    /// Σ ‖h' − h‖² / ‖h‖² over the tokens.
    async fn error(&self, other: &Tensor) -> Result<f64> {
        let mut sums = Tensor::zeros(other.device(), Elem::F32, &[other.rows()])?;
        add_squared_differences(other, &self.h, &mut sums)?;
        Ok(sums.to_f32().await?.iter().zip(&self.weights).map(|(&sum, weight)| f64::from(sum) * weight).sum())
    }
}

async fn squares(h: &Tensor) -> Result<Vec<f64>> {
    let mut squares = Tensor::zeros(h.device(), Elem::F32, &[h.rows()])?;
    add_squares(h, &mut squares)?;
    Ok(squares.to_f32().await?.into_iter().map(f64::from).collect())
}

fn copied(flow: &Flow) -> Result<Flow> {
    Ok(Flow {
        h: copy(&flow.h)?,
        inner: flow.inner.as_ref().map(copy).transpose()?,
        sum: flow.sum.as_ref().map(copy).transpose()?,
        routing: flow.routing.clone(),
        stage: flow.stage,
    })
}

struct Measuring<'a> {
    stored: &'a Stored,
    plan: &'a Plan,
    device: &'a Device,
    batches: Batches,
    rope: RopeTables,
    observer: &'a mut dyn Observer,
    done: usize,
    steps: usize,
}

impl Measuring<'_> {
    /// By unit and by its widths.
    async fn errors(&mut self) -> Result<Vec<Vec<f64>>> {
        let plan = self.plan;
        let layers = plan.config.layers;
        let ids = (0..self.batches.len()).flat_map(|batch| self.batches.get(batch).ids.iter().copied());
        let ids: Vec<u32> = ids.collect();
        let embedding = Embedding::load_rows(&plan.config, self.stored, self.device, ids).await?;
        let mut streams = Vec::with_capacity(self.batches.len());
        for batch in 0..self.batches.len() {
            let Batch { ids, seq_len, .. } = self.batches.get(batch);
            streams.push(embedding.embed(ids, *seq_len, 0)?);
            self.device.settle().await?;
        }
        drop(embedding);
        let mut errors = Vec::with_capacity(plan.units.len());
        for layer in 0..layers {
            let mut block = Block::load(&plan.config, layer, self.stored, self.device).await?;
            let mut after = Vec::with_capacity(streams.len());
            for (batch, h) in streams.iter().enumerate() {
                self.stop_point(layer).await?;
                let h = block.forward(copy(h)?, self.batches.get(batch).seq_len, &self.rope).await?;
                after.push(After::new(h).await?);
            }
            let mut flows: Vec<Flow> = streams.into_iter().map(Flow::new).collect();
            for unit in plan.units.iter().filter(|unit| unit.block == layer) {
                let found = self.unit(unit, &mut block, &mut flows, &after).await?;
                errors.push(completed(unit, found));
            }
            streams = after.into_iter().map(|after| after.h).collect();
        }
        for unit in plan.units.iter().filter(|unit| unit.block == layers) {
            let found = self.head(unit, &streams).await?;
            errors.push(completed(unit, found));
        }
        Ok(errors)
    }

    /// What a unit of a block loses at each width that is measured. Units come in the order of their stages,
    /// and `flows` go along.
    async fn unit(
        &mut self,
        unit: &Unit,
        block: &mut Block,
        flows: &mut [Flow],
        after: &[After],
    ) -> Result<Vec<f64>> {
        let stages = stages(&self.plan.config, unit.block);
        let is_in = |stage: &Stage| {
            kind(stage.name) == unit.kind
                && stage.linears.iter().any(|spec| unit.modules.contains(&spec.module))
        };
        let of_unit: Vec<usize> = (0..stages.len()).filter(|index| is_in(&stages[*index])).collect();
        let Some(&first) = of_unit.first() else {
            return Err(Error::Internal(format!("no {} in block {}", unit.kind, unit.block)));
        };
        for (batch, flow) in flows.iter_mut().enumerate() {
            let seq_len = self.batches.get(batch).seq_len;
            for stage in flow.stage..=first {
                block.advance(stage, flow, seq_len, &self.rope).await?;
            }
            self.device.settle().await?;
        }
        let shared = match of_unit[..] {
            [only] => Some(self.hessian(only, block, flows.iter_mut().enumerate()).await?),
            _ => None,
        };
        let mut errors = Vec::new();
        for bits in measured(unit) {
            self.stop_point(unit.block).await?;
            // The inputs of a unit's later stages come out of its first.
            let mut moving = Vec::new();
            for (batch, flow) in flows.iter().enumerate() {
                if self.batches.get(batch).held || shared.is_none() {
                    moving.push((batch, copied(flow)?));
                }
            }
            let mut originals = Vec::new();
            for (index, stage) in stages.iter().enumerate().skip(first) {
                if of_unit.contains(&index) {
                    let hessian = match &shared {
                        Some(hessian) => hessian.clone(),
                        None => {
                            let moving = moving.iter_mut().map(|(batch, flow)| (*batch, flow));
                            self.hessian(index, block, moving).await?
                        }
                    };
                    for (spec, linear) in self.rounded(unit, stage, bits, hessian).await? {
                        let original = block.exchange(&spec, linear)?;
                        originals.push((spec, original));
                    }
                }
                for (batch, flow) in &mut moving {
                    block.advance(index + 1, flow, self.batches.get(*batch).seq_len, &self.rope).await?;
                    self.device.settle().await?;
                }
            }
            for (spec, original) in originals {
                block.exchange(&spec, original)?;
            }
            let mut error = 0.0;
            for (batch, flow) in moving.iter().filter(|(batch, _)| self.batches.get(*batch).held) {
                error += after[*batch].error(&flow.h).await?;
            }
            errors.push(error);
            self.advance(unit.block);
        }
        Ok(errors)
    }

    /// That of a stage's inputs, of `flows` with the numbers of their micro-batches; those keep them where they
    /// serve once more.
    async fn hessian<'f>(
        &self,
        stage: usize,
        block: &Block,
        flows: impl Iterator<Item = (usize, &'f mut Flow)>,
    ) -> Result<Rc<SymmetricPanels>> {
        let mut flows: Vec<_> = flows.filter(|(batch, _)| !self.batches.get(*batch).held).collect();
        let own = |flow: &Flow| match (&flow.routing, block.expert(stage)) {
            (Some(routing), Some((branch, _))) => {
                routing.branches.get(branch).map_or(0, |(tokens, _)| tokens.len())
            }
            _ => flow.h.rows(),
        };
        let own: usize = flows.iter().map(|(_, flow)| own(flow)).sum();
        let of_all = block.expert(stage).is_some() && own < EXPERT_TOKENS;
        let scale = 2.0 / if of_all { self.batches.summed_tokens() } else { own }.max(1) as f32;
        let mut hessian: Option<SymmetricPanels> = None;
        for (batch, flow) in &mut flows {
            let seq_len = self.batches.get(*batch).seq_len;
            let x = match of_all {
                true => Some(block.input_of_all(stage, flow, seq_len, &self.rope).await?),
                false => block.input(stage, flow, seq_len, &self.rope).await?,
            };
            let Some(x) = x else { continue };
            let sum = match &mut hessian {
                Some(sum) => sum,
                None => hessian.insert(SymmetricPanels::zeros(self.device, x.cols())?),
            };
            sum.accumulate(&x, scale)?;
            if block.worth_keeping(stage) && !of_all {
                flow.inner = Some(x);
            }
            self.device.settle().await?;
        }
        hessian.map(Rc::new).ok_or_else(|| Error::Internal("a stage without inputs".into()))
    }

    /// A stage's layers with so many bits, as far as they belong to the unit.
    async fn rounded(
        &self,
        unit: &Unit,
        stage: &Stage,
        bits: u32,
        hessian: Rc<SymmetricPanels>,
    ) -> Result<Vec<(LinearSpec, Linear)>> {
        let mut rounded = Vec::new();
        for spec in stage.linears.iter().filter(|spec| unit.modules.contains(&spec.module)) {
            let prepared = self.prepare(spec, bits, hessian.clone()).await?;
            let mut chunks = Vec::new();
            for rows in self.pieces(spec) {
                let weight = self.weight(spec, rows.clone()).await?;
                chunks.push(quantize_rows(&prepared, &weight, rows).await?.dequantized);
            }
            let bias = match spec.bias {
                true => {
                    Some(load_f32(self.stored, &format!("{}.bias", spec.module), &[spec.out_features]).await?)
                }
                false => None,
            };
            rounded.push((spec.clone(), Linear::new(chunks, bias)?));
        }
        Ok(rounded)
    }

    async fn prepare(&self, spec: &LinearSpec, bits: u32, hessian: Rc<SymmetricPanels>) -> Result<Prepared> {
        let Some(assigned) = self.plan.assigned(&spec.module) else {
            return Err(Error::Internal(format!("{} has no scheme", spec.module)));
        };
        let (scheme, place) = (quick(assigned, bits), spec.module.as_str());
        let inputs = Some(Calibration::from(hessian));
        prepare(&scheme, assigned.scale_type(), self.device, spec.in_features, inputs, place).await
    }

    /// The output head's error: that of its logits.
    async fn head(&mut self, unit: &Unit, streams: &[Tensor]) -> Result<Vec<f64>> {
        let plan = self.plan;
        let stage = head_stage(&plan.config);
        let Some(spec) = stage.linears.first() else { return Ok(Vec::new()) };
        let norm = final_norm(&plan.config, self.stored, self.device).await?;
        let mut inputs = Vec::new();
        let mut hessian = SymmetricPanels::zeros(self.device, spec.in_features)?;
        for (batch, h) in streams.iter().enumerate() {
            let x = norm.apply(h)?;
            match self.batches.get(batch).held {
                true => inputs.push(x),
                false => hessian.accumulate(&x, 2.0 / self.batches.summed_tokens().max(1) as f32)?,
            }
            self.device.settle().await?;
        }
        let hessian = Rc::new(hessian);
        let mut errors = Vec::new();
        for bits in measured(unit) {
            let prepared = self.prepare(spec, bits, hessian.clone()).await?;
            let sum = |x: &Tensor| Tensor::zeros(self.device, Elem::F32, &[x.rows()]);
            let sums = || inputs.iter().map(sum).collect::<Result<Vec<_>>>();
            let (mut lost, mut whole) = (sums()?, sums()?);
            for rows in self.pieces(spec) {
                self.stop_point(plan.config.layers).await?;
                let weight = self.weight(spec, rows.clone()).await?;
                let rounded = quantize_rows(&prepared, &weight, rows).await?.dequantized;
                let (weight, rounded) = (Linear::new(vec![weight], None)?, Linear::new(vec![rounded], None)?);
                for ((x, lost), whole) in inputs.iter().zip(&mut lost).zip(&mut whole) {
                    let logits = weight.forward(x)?;
                    add_squared_differences(&rounded.forward(x)?, &logits, lost)?;
                    add_squares(&logits, whole)?;
                    self.device.settle().await?;
                }
            }
            let mut error = 0.0;
            for (lost, whole) in lost.iter().zip(&whole) {
                let pairs = lost.to_f32().await?.into_iter().zip(whole.to_f32().await?);
                error +=
                    pairs.map(|(lost, whole)| f64::from(lost) / f64::from(whole).max(1e-30)).sum::<f64>();
            }
            errors.push(error);
            self.advance(plan.config.layers);
        }
        Ok(errors)
    }

    async fn weight(&self, spec: &LinearSpec, rows: std::ops::Range<usize>) -> Result<Tensor> {
        let shape = [rows.len(), spec.in_features];
        let bytes = linear_rows(self.stored, spec, rows).await?;
        Tensor::from_bytes(self.device, linear_elem(self.stored, spec)?, &shape, &bytes)
    }

    /// Rows of a layer that are rounded at a time.
    fn pieces(&self, spec: &LinearSpec) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let (rows, step) = (spec.out_features, self.plan.piece_rows(spec.in_features));
        (0..rows).step_by(step).map(move |start| start..rows.min(start + step))
    }

    fn advance(&mut self, block: usize) {
        self.done += 1;
        let blocks = self.plan.config.layers;
        self.observer.event(Event::Measuring { block, blocks, done: self.done, total: self.steps });
    }

    async fn stop_point(&mut self, block: usize) -> Result<()> {
        self.observer.pause().await;
        if !self.observer.stop_requested() {
            return Ok(());
        }
        let place = match self.plan.config.layers {
            layers if block < layers => {
                format!("measuring what bits are worth in block {} of {layers}", block + 1)
            }
            _ => "measuring what bits are worth in the output head".to_owned(),
        };
        Err(Error::Interrupted { place, advice: face::BEGIN_AGAIN.to_string() })
    }
}

/// The widths that were measured, and those that follow.
fn completed(unit: &Unit, measured: Vec<f64>) -> Vec<f64> {
    let last = unit.widths.iter().rev().find(|width| MEASURED.contains(width)).zip(measured.last().copied());
    let mut errors = measured.into_iter();
    let of = |width: &u32| match (MEASURED.contains(width), last) {
        (true, _) => errors.next().unwrap_or_default(),
        (false, Some((bits, error))) => error * left_by_eight(*bits),
        (false, None) => 0.0,
    };
    unit.widths.iter().map(of).map(logged).collect()
}

/// How a layer is quantized for a measurement: as it will be, without what takes long.
fn quick(assigned: &Assigned, bits: u32) -> Scheme {
    Scheme { bits, alpha: Alpha::Fixed(0.0), refit: false, ..assigned.scheme.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_that_are_not_measured_follow() {
        let unit = |widths: &[u32]| Unit {
            block: 0,
            kind: "o".into(),
            modules: vec![],
            weights: 1,
            widths: widths.to_vec(),
        };
        assert_eq!(measured(&unit(&[2, 4, 8])).collect::<Vec<_>>(), [2, 4]);
        let errors = completed(&unit(&[2, 4, 8]), vec![16.0, 1.0]);
        assert_eq!(errors[..2], [16.0, 1.0]);
        assert!((errors[2] - 1.0 / 289.0).abs() < 1e-8);
        assert_eq!(completed(&unit(&[8]), vec![]), [0.0]);
    }
}

//! Scaling of inputs in a run. Before a block is quantized, its 16-bit layers see the calibration text once and say
//! what each stage's inputs are best divided by; the division is folded into what comes before them, and from then on the
//! block is one whose weights are those. So everything behind works as without it.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use web_time::Instant;

use super::inputs::{Beside, StageInputs};
use super::plan::{Assigned, ROUNDING_FLOPS, measuring_flops};
use super::run::Run;
use super::stream::{Batch, Flows};
use crate::error::Result;
use crate::gptq::awq::{STEPS, Scale, factors, losses};
use crate::gptq::held::Goal;
use crate::gptq::losses::{HeldLosses, Losses};
use crate::gptq::order::Order;
use crate::gptq::rows::quantize_rows;
use crate::gptq::scheme::{Alpha, Scheme};
use crate::gptq::stage::{Calibration, Prepared, prepare, prepare_in_order};
use crate::kernels::columns::copy;
use crate::kernels::magnitude::add_magnitudes;
use crate::model::arch::{self, Stage};
use crate::model::fold::{Fold, Into, folds};
use crate::model::{Block, Flow, Folded, LinearSpec, ModelConfig, Weights};
use crate::tensor::{Elem, Tensor};

/// A block's weights with the scales of its inputs folded in.
pub(super) struct Scaled<'a> {
    pub weights: Folded<'a>,
    /// By module.
    scales: HashMap<String, StageScale>,
}

/// What a stage's inputs are divided by.
#[derive(Clone)]
pub(super) struct StageScale {
    /// The power of their magnitude.
    pub alpha: f64,
    pub scale: Rc<Scale>,
}

impl<'a> Scaled<'a> {
    /// Weights as they are.
    pub fn nothing(weights: &'a dyn Weights) -> Self {
        Self { weights: Folded::new(weights), scales: HashMap::new() }
    }

    /// Of a stage, by its first layer.
    pub fn of(&self, stage: &Stage) -> Option<&StageScale> {
        stage.linears.first().and_then(|spec| self.of_module(&spec.module))
    }

    pub fn of_module(&self, module: &str) -> Option<&StageScale> {
        self.scales.get(module)
    }
}

/// A fold all of whose layers are quantized alike.
pub(super) struct Candidate {
    fold: Fold,
    /// The layers of its stages.
    readers: Vec<LinearSpec>,
    assigned: Assigned,
}

/// Stages whose inputs stay as they are: their layers, and why.
type Left = (Vec<&'static str>, &'static str);

fn names(stages: &[&Stage]) -> Vec<&'static str> {
    stages.iter().flat_map(|stage| &stage.linears).map(|spec| spec.short).collect()
}

/// What may be scaled in block `layer`.
fn candidates(
    config: &ModelConfig,
    assigned: &HashMap<String, Option<Assigned>>,
    layer: usize,
) -> (Vec<Candidate>, Vec<Left>) {
    let block = arch::block(config, layer);
    let stages: Vec<&Stage> = block.stages().collect();
    let of = |spec: &LinearSpec| assigned.get(&spec.module).and_then(Option::as_ref);
    let (folds, others) = folds(config, &block);
    let (mut candidates, mut left) = (vec![], vec![]);
    for other in others {
        let stage = stages[other.stage];
        if stage.linears.iter().any(|spec| of(spec).is_some()) {
            left.push((names(&[stage]), other.reason));
        }
    }
    for fold in folds {
        let own: Vec<&Stage> = fold.stages.iter().map(|&stage| stages[stage]).collect();
        let readers: Vec<LinearSpec> = own.iter().flat_map(|stage| stage.linears.clone()).collect();
        let schemes: Vec<_> = readers.iter().map(of).collect();
        let Some(first) = schemes.iter().flatten().next().copied() else { continue };
        let alike = |other: &Option<&Assigned>| {
            other.is_some_and(|other| other.scheme == first.scheme && other.scale == first.scale)
        };
        let reason = match &fold.into {
            _ if schemes.iter().any(Option::is_none) => Some("others that see its inputs stay in 16 bits"),
            _ if !schemes.iter().all(alike) => Some("what sees its inputs is quantized differently"),
            Into::Rows { layer, .. } if of(layer).is_none() => Some("the layer before it stays in 16 bits"),
            _ => None,
        };
        match reason {
            Some(reason) => left.push((names(&own), reason)),
            None => candidates.push(Candidate { assigned: first.clone(), fold, readers }),
        }
    }
    (candidates, left)
}

/// What to tell a person whose model has inputs that cannot be scaled.
pub(super) fn left_unscaled(
    config: &ModelConfig,
    assigned: &HashMap<String, Option<Assigned>>,
) -> Vec<String> {
    let mut found: BTreeMap<(Vec<&str>, &str), Vec<usize>> = BTreeMap::new();
    for layer in 0..config.layers {
        for (mut names, reason) in candidates(config, assigned, layer).1 {
            names.sort_unstable();
            names.dedup();
            found.entry((names, reason)).or_default().push(layer);
        }
    }
    if assigned.get(&config.names.head).is_some_and(Option::is_some) {
        let reason = "the final norm is written before it is measured";
        found.insert((vec![config.names.head.as_str()], reason), vec![]);
    }
    let text = |((names, reason), mut layers): ((Vec<&str>, &str), Vec<usize>)| {
        layers.dedup();
        let blocks = match layers.len() {
            some if some > 0 && some < config.layers => format!(" of {some} blocks"),
            _ => String::new(),
        };
        format!("the inputs of {}{blocks} are not scaled: {reason}", names.join(", "))
    };
    found.into_iter().map(text).collect()
}

/// Operations of all searches, for the progress bar.
pub(super) fn flops(
    config: &ModelConfig,
    assigned: &HashMap<String, Option<Assigned>>,
    measure: impl Fn(&Stage) -> f64,
) -> f64 {
    let of_block = |layer| {
        let stages = arch::stages(config, layer);
        let (candidates, _) = candidates(config, assigned, layer);
        candidates
            .iter()
            .map(|candidate| {
                let search: f64 = candidate.readers.iter().map(|spec| candidate.flops(spec)).sum();
                measure(&stages[candidate.fold.stages[0]]) + search
            })
            .sum::<f64>()
    };
    (0..config.layers).map(of_block).sum()
}

impl Candidate {
    /// Of the search for one layer.
    fn flops(&self, spec: &LinearSpec) -> f64 {
        let (n, m) = (spec.in_features as f64, spec.out_features as f64);
        let judged = if self.assigned.scheme.sweeps() { 6.0 } else { 0.0 };
        m * n * (f64::from(STEPS) * (n + ROUNDING_FLOPS / 2.0) + n * judged)
    }

    /// The inputs' magnitudes, one for all that a row makes.
    fn magnitudes(&self, each: &[f32]) -> Vec<f32> {
        let Into::Rows { rows, .. } = &self.fold.into else { return each.to_vec() };
        let mut sums: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        for (&row, &magnitude) in rows.iter().zip(each) {
            let (sum, count) = sums.entry(row).or_default();
            *sum += f64::from(magnitude);
            *count += 1.0;
        }
        rows.iter().map(|row| sums.get(row).map_or(0.0, |(sum, count)| (sum / count) as f32)).collect()
    }
}

impl Run<'_> {
    /// Finds what the inputs in block `layer` are divided by, and folds it in.
    pub(super) async fn scale_inputs(&mut self, layer: usize, flows: &mut Flows) -> Result<()> {
        let plan = self.plan;
        let mut scaled = Scaled::nothing(self.stored);
        let (candidates, _) = candidates(&plan.config, &plan.assigned, layer);
        let Some(last) = candidates.iter().map(|candidate| candidate.fold.stages[0]).max() else {
            self.scaled = Rc::new(scaled);
            return Ok(());
        };
        let block = Block::load(&plan.config, layer, self.stored, self.device).await?;
        let mut side = self.copied(flows).await?;
        let mut routed = vec![];
        let mut starved = vec![];
        for index in 0..=last {
            if block.routes(index) {
                routed = self.route(layer, index, &block, &mut side).await?;
            }
            match candidates.iter().find(|candidate| candidate.fold.stages[0] == index) {
                Some(candidate) => match self.tokens_of(&block, index, candidate, &routed) {
                    Some(tokens) => {
                        let place = (layer, index, tokens);
                        let judged = self.choose(place, &block, &mut side, candidate, &mut scaled).await?;
                        // That no sequence is held out is told once.
                        let missed = !judged && self.batches.summed_tokens() < self.batches.tokens();
                        starved.extend(block.expert(index).filter(|_| missed).map(|(_, expert)| expert));
                    }
                    None => starved.extend(block.expert(index).map(|(_, expert)| expert)),
                },
                None if block.begins_branch(index) && index > 0 => {
                    self.pass(layer, index, &block, &mut side).await?;
                }
                None => {}
            }
        }
        if !starved.is_empty() {
            self.warn(format!(
                "block {layer}: the inner inputs of experts {} are not scaled: too few tokens came to them",
                starved.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            ));
        }
        self.scaled = Rc::new(scaled);
        Ok(())
    }

    /// The residual stream again, for a pass through the block beside the run's own.
    async fn copied(&mut self, flows: &mut Flows) -> Result<Flows> {
        let mut side = Flows::new(self.device, self.plan.stream_on_device, self.batches.len());
        for batch in 0..self.batches.len() {
            let Some(flow) = flows.take(batch)? else { continue };
            side.put(batch, Flow::new(copy(&flow.h)?)).await?;
            flows.put(batch, flow).await?;
        }
        Ok(side)
    }

    /// How many tokens measure a candidate's inputs; `None` for too few.
    fn tokens_of(
        &self,
        block: &Block,
        index: usize,
        candidate: &Candidate,
        routed: &[usize],
    ) -> Option<usize> {
        let all = self.batches.summed_tokens();
        match (block.expert(index), &candidate.fold.into) {
            (Some((branch, _)), Into::Rows { .. }) => {
                let own = routed.get(branch).copied().unwrap_or(0);
                let inputs = candidate.readers.first().map_or(0, |spec| spec.in_features);
                (10 * own >= inputs && own > 0).then_some(own)
            }
            _ => Some(all),
        }
    }

    /// Measures the inputs of stage `index`, finds their scale and, if it serves, folds it in. Whether anything could
    /// tell if it does.
    async fn choose(
        &mut self,
        (layer, index, tokens): (usize, usize, usize),
        block: &Block,
        side: &mut Flows,
        candidate: &Candidate,
        scaled: &mut Scaled<'_>,
    ) -> Result<bool> {
        let (config, fold) = (&self.plan.config, &candidate.fold);
        let Some(stage) = block.stages().nth(index) else { return Ok(true) };
        let (each, inputs) = self.measured((layer, index, tokens), block, side, fold).await?;
        if candidate.assigned.scheme.sweeps() && inputs.held.is_none() {
            self.advance(layer, stage.name, candidate.readers.iter().map(|spec| candidate.flops(spec)).sum());
            return Ok(false);
        }
        let since = Instant::now();
        let place = format!("block {layer}, stage {}", stage.name);
        let magnitudes = candidate.magnitudes(&each.to_f32().await?);
        let found = self.search(&place, candidate, &inputs, &magnitudes, layer, stage.name).await?;
        if let Some((alpha, wished)) = found {
            let s = scaled.weights.effective(config, fold, &wished).await?;
            let scale = Scale::new(self.device, s)?;
            if self.serves(&place, candidate, inputs, &scale).await? {
                let readers: Vec<&LinearSpec> = candidate.readers.iter().collect();
                scaled.weights.divide(config, fold, &readers, &scale.factors).await?;
                let of_stage = StageScale { alpha, scale: Rc::new(scale) };
                for spec in readers {
                    scaled.scales.insert(spec.module.clone(), of_stage.clone());
                }
            }
        }
        self.clock.add("scaling", since);
        Ok(true)
    }

    /// Σ|x_j| of a stage's inputs, and what else they say.
    async fn measured(
        &mut self,
        (layer, index, tokens): (usize, usize, usize),
        block: &Block,
        side: &mut Flows,
        fold: &Fold,
    ) -> Result<(Tensor, Calibration)> {
        let plan = self.plan;
        let expert = block.expert(index).is_some();
        let stage = block.stages().nth(index).cloned().unwrap_or(Stage { name: "", linears: vec![] });
        // A norm before experts is that of every token.
        let of_all = expert && matches!(fold.into, Into::Norm { .. });
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let every = if expert && !of_all { 1 } else { self.batches.judging_every() };
        let mut sums = StageInputs::new(self.device, &Beside::Nothing, n, tokens, every)?;
        let mut magnitudes = Tensor::zeros(self.device, Elem::F32, &[n])?;
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let seen = self.input(index, block, side, batch, of_all).await?;
            let Batch { ids, seq_len, held } = self.batches.get(batch);
            let flops =
                measuring_flops(&plan.config, &plan.scheme, &plan.output, &stage, ids.len(), *seq_len);
            let since = Instant::now();
            if let Some(seen) = &seen {
                if !held {
                    add_magnitudes(seen, &mut magnitudes)?;
                }
                sums.take(seen, &Goal::Own, *held)?;
            }
            self.clock.add("hessian", since);
            if plan.keep_between && block.worth_keeping(index) && !of_all {
                side.keep(batch, seen).await?;
            }
            self.device.settle().await?;
            self.advance(layer, stage.name, flops);
        }
        Ok((magnitudes, sums.done().await?))
    }

    /// The power of the magnitudes that serves rounding best, and the factors it makes; `None` for none.
    async fn search(
        &mut self,
        place: &str,
        candidate: &Candidate,
        inputs: &Calibration,
        magnitudes: &[f32],
        layer: usize,
        stage: &'static str,
    ) -> Result<Option<(f64, Vec<f32>)>> {
        let scheme = Scheme { desc_act: false, static_groups: true, refit: false, ..plainly(candidate) };
        let n = magnitudes.len();
        let own = Calibration::from(inputs.hessian.clone());
        let scale_type = candidate.assigned.scale_type();
        let prepared =
            prepare_in_order(&scheme, scale_type, self.device, n, Some(own), place, |_| Order::natural(n));
        let prepared = prepared.await?;
        if prepared.factor().is_none() {
            return Ok(None);
        }
        let alphas: Vec<f64> = (0..=STEPS).map(|step| f64::from(step) / f64::from(STEPS)).collect();
        let scales = alphas.iter().map(|&alpha| Scale::new(self.device, factors(magnitudes, alpha)));
        let scales: Vec<Scale> = scales.collect::<Result<_>>()?;
        let mut sums = vec![0.0; alphas.len()];
        for spec in &candidate.readers {
            for rows in self.pieces(spec) {
                self.stop_point(layer).await?;
                let weight = self.weight_rows(self.stored, spec, rows).await?;
                let lost = losses(&prepared, &weight, &scales).await?;
                sums.iter_mut().zip(lost).for_each(|(sum, lost)| *sum += lost);
            }
            self.advance(layer, stage, candidate.flops(spec));
        }
        let mut best = 0;
        for (index, sum) in sums.iter().enumerate() {
            if *sum < sums[best] {
                best = index;
            }
        }
        Ok((best > 0).then(|| (alphas[best], scales[best].factors.clone())))
    }

    /// Whether the layers come out better with their inputs divided, and none worse than rounded as it is. Rounding
    /// has been searched for; sweeps are judged by rows that were held out.
    async fn serves(
        &mut self,
        place: &str,
        candidate: &Candidate,
        inputs: Calibration,
        scale: &Scale,
    ) -> Result<bool> {
        if !candidate.assigned.scheme.sweeps() {
            return Ok(true);
        }
        let scheme = plainly(candidate);
        let divided = scale.divided(&inputs)?;
        let (n, scale_type) = (scale.factors.len(), candidate.assigned.scale_type());
        let prepared = prepare(&scheme, scale_type, self.device, n, Some(inputs), place).await?;
        let natural = self.held_losses(candidate, &prepared, None).await?;
        let prepared = prepare(&scheme, scale_type, self.device, n, Some(divided), place).await?;
        let scaled = self.held_losses(candidate, &prepared, Some(scale)).await?;
        let sum = |losses: &[HeldLosses]| losses.iter().map(|loss| loss.kept).sum::<f64>();
        let rounded = natural.iter().zip(&scaled).all(|(natural, scaled)| scaled.kept <= natural.rtn);
        Ok(rounded && sum(&scaled) < sum(&natural))
    }

    /// What each layer of a candidate loses on rows held out.
    async fn held_losses(
        &mut self,
        candidate: &Candidate,
        prepared: &Prepared,
        times: Option<&Scale>,
    ) -> Result<Vec<HeldLosses>> {
        let mut losses = Vec::with_capacity(candidate.readers.len());
        for spec in &candidate.readers {
            let mut sum = Losses::default();
            for rows in self.pieces(spec) {
                let mut weight = copy(&self.weight_rows(self.stored, spec, rows.clone()).await?)?;
                if let Some(scale) = times {
                    scale.times(&mut weight)?;
                }
                if let Some(loss) = quantize_rows(prepared, &weight, rows).await?.loss {
                    sum.add(loss);
                }
            }
            // No damping helped where there is none.
            let none = HeldLosses { kept: f64::INFINITY, rtn: f64::INFINITY, ..HeldLosses::default() };
            losses.push(sum.held.unwrap_or(none));
        }
        Ok(losses)
    }
}

/// The candidate's scheme for the block's own inputs, with no original beside.
fn plainly(candidate: &Candidate) -> Scheme {
    Scheme { alpha: Alpha::Fixed(0.0), ..candidate.assigned.scheme.clone() }
}

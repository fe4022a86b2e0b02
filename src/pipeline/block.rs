//! One block of a run, stage by stage.
//!
//! A stage is: accumulate H from the stage's inputs, quantize its linear layers, compute its outputs
//! with the quantized weights; those are the next stage's inputs. So each stage's error is seen by
//! the next, and every linear layer is multiplied once.

use web_time::Instant;

use super::inputs::{Beside, StageInputs, Weighing};
use super::layer::{Place, Rows};
use super::plan::{block_copies, stage_flops};
use super::run::Run;
use super::stream::{Batch, Flows};
use crate::checkpoint::Writer;
use crate::error::{Error, Result};
use crate::gptq::held::Goal;
use crate::gptq::scheme::Scaling;
use crate::gptq::stage::Calibration;
use crate::kernels::add::add_scaled;
use crate::kernels::columns::copy;
use crate::kernels::embedding::gather;
use crate::model::arch::{Stage, stages};
use crate::model::{Block, Flow, Weights, final_norm};
use crate::tensor::Tensor;

impl Run<'_> {
    pub(super) async fn block(
        &mut self,
        layer: usize,
        flows: &mut Flows,
        original: &mut Option<Flows>,
        writer: &mut Writer,
    ) -> Result<()> {
        let plan = self.plan;
        if plan.scheme.scaling != Scaling::None {
            self.scale_inputs(layer, flows).await?;
        }
        let scaled = self.scaled.clone();
        for name in block_copies(self.stored, &plan.config, layer, &plan.assigned) {
            match scaled.weights.stored(&name) {
                Some(bytes) => writer.write(&name, bytes).await?,
                None => writer.copy(&self.stored.checkpoint, &name).await?,
            }
        }
        let calibrated = plan.scheme.needs_inputs();
        let mut block = Block::without_linears(&plan.config, layer, &scaled.weights, self.device).await?;
        let mut original = match original {
            Some(flows) => Some((self.original(layer).await?, flows)),
            None => None,
        };
        let stages = stages(&plan.config, layer);
        // Tokens that the branches of the section at hand see.
        let mut routed = Vec::new();
        for (index, stage) in stages.iter().enumerate() {
            if calibrated && block.routes(index) {
                routed = self.route(layer, index, &block, flows).await?;
            }
            let Some(assigned) = stage.linears.first().and_then(|spec| plan.assigned(&spec.module)) else {
                // Asked to stay in 16 bits.
                if calibrated && block.begins_branch(index) && index > 0 {
                    self.pass(layer, index, &block, flows).await?;
                    if let Some((block, flows)) = &mut original {
                        self.pass(layer, index, block, flows).await?;
                    }
                }
                for spec in &stage.linears {
                    let linear = scaled.weights.linear(spec, self.device).await?;
                    block.set_linear(spec, linear);
                }
                continue;
            };
            let expert = block.expert(index);
            let place = match expert {
                Some((_, expert)) => format!("block {layer}, expert {expert}, stage {}", stage.name),
                None => format!("block {layer}, stage {}", stage.name),
            };
            let mut rows = Rows::of_all(self.batches.summed_tokens());
            if let Some((branch, _)) = expert.filter(|_| calibrated) {
                rows = self.rows_of_expert(&place, stage, &routed, branch);
            }
            let inputs = match calibrated {
                true => Some(self.inputs(layer, index, &rows, (&block, flows), &mut original).await?),
                false => None,
            };
            let prepared = self.prepare(&place, stage, assigned, inputs).await?;
            for spec in &stage.linears {
                let place = Place { layer, stage: stage.name, rows };
                if let Some(linear) = self.linear(place, spec, assigned, &prepared, writer, true).await? {
                    block.set_linear(spec, linear);
                }
            }
        }
        let last = layer + 1 == plan.config.layers && plan.head().is_none();
        if calibrated && !last {
            self.pass(layer, stages.len(), &block, flows).await?;
            if let Some((block, flows)) = &mut original {
                self.pass(layer, stages.len(), block, flows).await?;
            }
        }
        Ok(())
    }

    /// A block of the original model beside the quantized one.
    pub(super) async fn original(&self, layer: usize) -> Result<Block> {
        Ok(Block::load(&self.plan.config, layer, self.stored, self.device).await?.rounded())
    }

    /// Brings every micro-batch to a section with experts, and counts the tokens that each branch sees of
    /// those that are summed up.
    pub(super) async fn route(
        &mut self,
        layer: usize,
        index: usize,
        block: &Block,
        flows: &mut Flows,
    ) -> Result<Vec<usize>> {
        let mut counts = Vec::new();
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let seq_len = self.batches.get(batch).seq_len;
            let Some(mut flow) = flows.take(batch)? else { continue };
            let since = Instant::now();
            block.advance(index, &mut flow, seq_len, &self.rope).await?;
            if let Some(routing) = &flow.routing
                && !self.batches.get(batch).held
            {
                counts.resize(routing.branches.len(), 0);
                for (count, (tokens, _)) in counts.iter_mut().zip(&routing.branches) {
                    *count += tokens.len();
                }
            }
            flows.put(batch, flow).await?;
            self.device.settle().await?;
            self.clock.add("forward", since);
        }
        Ok(counts)
    }

    /// Whose tokens make an expert's Hessian: its own, or those of the whole layer where it has too few to
    /// tell its inputs apart, or where that was asked for.
    fn rows_of_expert(&mut self, place: &str, stage: &Stage, routed: &[usize], branch: usize) -> Rows {
        let tokens = self.batches.summed_tokens();
        let own = routed.get(branch).copied().unwrap_or(0);
        let (experts, per_token) =
            self.plan.config.experts.as_ref().map_or((1, 1), |experts| (experts.count, experts.per_token));
        let inputs = stage.linears.first().map_or(0, |spec| spec.in_features);
        let starved = 100 * own * experts < tokens * per_token || 10 * own < inputs;
        if starved && !self.plan.output.all_experts {
            self.warn(format!(
                "{place}: {own} of {tokens} tokens came to this expert, too few for its {inputs} inputs; those of \
                 the whole layer were taken"
            ));
        }
        let all = starved || self.plan.output.all_experts;
        Rows { count: if all { tokens } else { own }, routed: Some(own), all }
    }

    /// Computes a stage's inputs for every micro-batch, of the quantized model and, where it goes along, of
    /// the original, and sums them up.
    async fn inputs(
        &mut self,
        layer: usize,
        index: usize,
        rows: &Rows,
        (block, flows): (&Block, &mut Flows),
        original: &mut Option<(Block, &mut Flows)>,
    ) -> Result<Calibration> {
        let plan = self.plan;
        let Some(stage) = block.stages().nth(index) else {
            return Err(Error::Internal(format!("block {layer} has no stage {index}")));
        };
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        // The original may send a token to other experts, so that there is nothing to compare with.
        let compared = rows.routed.is_none();
        let end = block.end_in_stream(index).filter(|_| compared && original.is_some());
        let (beside, bias) = match (end, &original) {
            (Some(spec), _) => (Beside::Outputs(spec.out_features), self.bias(spec).await?),
            (None, Some(_)) if compared => (Beside::Inputs, None),
            _ => (Beside::Nothing, None),
        };
        // Few tokens come to an expert; all of them judge.
        let every = if rows.routed.is_some() { 1 } else { self.batches.judging_every() };
        let mut inputs = StageInputs::new(self.device, &beside, n, rows.count, every)?;
        let of_all = rows.all && rows.routed.is_some();
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let Batch { ids, seq_len, held } = self.batches.get(batch);
            let flops = stage_flops(&plan.config, &plan.scheme, &plan.output, stage, ids.len(), *seq_len);
            let held = *held;
            let seen = self.input(index, block, flows, batch, of_all).await?;
            let (goal, weighing) = match original {
                Some((block, others)) => {
                    self.goal((index, batch), &beside, bias.as_ref(), flows, (block, others)).await?
                }
                None => (Goal::Own, None),
            };
            let since = Instant::now();
            if let Some(seen) = &seen {
                self.sum_up(&mut inputs, stage, seen, (&goal, weighing.as_ref()), held)?;
            }
            self.clock.add("hessian", since);
            if plan.keep_between && block.worth_keeping(index) && !of_all {
                flows.keep(batch, seen).await?;
                if let (Some((_, others)), Goal::Inputs(x)) = (original.as_mut(), goal) {
                    others.keep(batch, Some(x)).await?;
                }
            }
            self.device.settle().await?;
            self.advance(layer, stage.name, flops);
        }
        inputs.done().await
    }

    /// What a stage's layers should make of one micro-batch for the quantized model to follow the original, and how
    /// much each of its tokens counts where a layer writes to the stream. `bias` is that of the layer.
    async fn goal(
        &mut self,
        (index, batch): (usize, usize),
        beside: &Beside,
        bias: Option<&Tensor>,
        flows: &mut Flows,
        (block, others): (&Block, &mut Flows),
    ) -> Result<(Goal, Option<Weighing>)> {
        if let Beside::Inputs = beside {
            let inputs = self.input(index, block, others, batch, false).await?;
            return Ok((inputs.map_or(Goal::Own, Goal::Inputs), None));
        }
        let Some(mut flow) = others.take(batch)? else { return Ok((Goal::Own, None)) };
        let since = Instant::now();
        let writes = matches!(beside, Beside::Outputs(_));
        let seq_len = self.batches.get(batch).seq_len;
        block.advance(index + usize::from(writes), &mut flow, seq_len, &self.rope).await?;
        let stream = if writes { Some(flow.stream()?) } else { None };
        others.put(batch, flow).await?;
        let found = match stream {
            Some(stream) => {
                let weighing = Weighing::by(&stream).await?;
                (self.still_to_give(stream, bias, flows, batch).await?, Some(weighing))
            }
            None => (Goal::Own, None),
        };
        self.clock.add("forward", since);
        Ok(found)
    }

    /// Takes in one micro-batch: inputs divided as the stage's are, tokens as much as they count.
    fn sum_up(
        &self,
        inputs: &mut StageInputs,
        stage: &Stage,
        seen: &Tensor,
        (goal, weighing): (&Goal, Option<&Weighing>),
        held: bool,
    ) -> Result<()> {
        match (goal, weighing, self.scaled.of(stage)) {
            (Goal::Outputs(wanted), Some(weighing), _) => {
                inputs.take(&weighing.of(seen)?, &Goal::Outputs(weighing.of(wanted)?), held)
            }
            (Goal::Inputs(x), _, Some(of_stage)) => {
                let mut x = copy(x)?;
                of_stage.scale.divide(&mut x)?;
                inputs.take(seen, &Goal::Inputs(x), held)
            }
            _ => inputs.take(seen, goal, held),
        }
    }

    /// What a layer has to give, but for its bias, so that the quantized model's stream comes to where the
    /// original's `stream` is.
    async fn still_to_give(
        &self,
        mut stream: Tensor,
        bias: Option<&Tensor>,
        flows: &mut Flows,
        batch: usize,
    ) -> Result<Goal> {
        let Some(flow) = flows.take(batch)? else { return Ok(Goal::Own) };
        add_scaled(&mut stream, &flow.stream()?, -1.0)?;
        flows.put(batch, flow).await?;
        if let Some(bias) = bias {
            let everywhere = gather(&[bias], &vec![0; stream.rows()])?;
            add_scaled(&mut stream, &everywhere, -1.0)?;
        }
        Ok(Goal::Outputs(stream))
    }

    /// One model's inputs of a stage for one micro-batch; `of_all` its tokens or those that come to it.
    pub(super) async fn input(
        &mut self,
        index: usize,
        block: &Block,
        flows: &mut Flows,
        batch: usize,
        of_all: bool,
    ) -> Result<Option<Tensor>> {
        let seq_len = self.batches.get(batch).seq_len;
        let Some(mut flow) = flows.take(batch)? else { return Ok(None) };
        let since = Instant::now();
        let x = match of_all {
            true => Some(block.input_of_all(index, &mut flow, seq_len, &self.rope).await?),
            false => block.input(index, &mut flow, seq_len, &self.rope).await?,
        };
        flows.put(batch, flow).await?;
        self.clock.add("forward", since);
        Ok(x)
    }

    /// Brings every micro-batch to stage `index` without looking at its inputs; behind the last stage, to
    /// the next block.
    pub(super) async fn pass(
        &mut self,
        layer: usize,
        index: usize,
        block: &Block,
        flows: &mut Flows,
    ) -> Result<()> {
        let end = index == block.stages().count();
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let seq_len = self.batches.get(batch).seq_len;
            let Some(mut flow) = flows.take(batch)? else { continue };
            let since = Instant::now();
            block.advance(index, &mut flow, seq_len, &self.rope).await?;
            flows.put(batch, if end { Flow::new(flow.h) } else { flow }).await?;
            self.device.settle().await?;
            self.clock.add("forward", since);
        }
        Ok(())
    }

    /// Quantizes the output head, whose inputs are the last block's outputs behind the final norm.
    pub(super) async fn head(
        &mut self,
        stage: &Stage,
        flows: &mut Flows,
        original: &mut Option<Flows>,
        writer: &mut Writer,
    ) -> Result<()> {
        let plan = self.plan;
        let layer = plan.config.layers;
        let Some((spec, assigned)) =
            stage.linears.first().and_then(|spec| plan.assigned(&spec.module).map(|of| (spec, of)))
        else {
            return Ok(());
        };
        let mut inputs = None;
        if plan.scheme.needs_inputs() {
            let norm = final_norm(&plan.config, self.stored, self.device).await?;
            let tokens = self.batches.summed_tokens();
            let beside = if original.is_some() { Beside::Inputs } else { Beside::Nothing };
            let every = self.batches.judging_every();
            let sums =
                inputs.insert(StageInputs::new(self.device, &beside, spec.in_features, tokens, every)?);
            for batch in 0..self.batches.len() {
                self.stop_point(layer).await?;
                let normed = |flow: Option<Flow>| flow.map(|flow| norm.apply(&flow.h)).transpose();
                let Some(seen) = normed(flows.take(batch)?)? else { continue };
                let beside = match original {
                    Some(original) => normed(original.take(batch)?)?,
                    None => None,
                };
                let goal = beside.map_or(Goal::Own, Goal::Inputs);
                let since = Instant::now();
                let Batch { ids, seq_len, held } = self.batches.get(batch);
                sums.take(&seen, &goal, *held)?;
                self.device.settle().await?;
                self.clock.add("hessian", since);
                let flops = stage_flops(&plan.config, &plan.scheme, &plan.output, stage, ids.len(), *seq_len);
                self.advance(layer, stage.name, flops);
            }
        }
        let inputs = match inputs {
            Some(sums) => Some(sums.done().await?),
            None => None,
        };
        let prepared = self.prepare("the output head", stage, assigned, inputs).await?;
        let rows = Rows::of_all(self.batches.summed_tokens());
        let place = Place { layer, stage: stage.name, rows };
        self.linear(place, spec, assigned, &prepared, writer, false).await?;
        Ok(())
    }
}

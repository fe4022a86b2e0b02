//! One block of a run, stage by stage.
//!
//! A stage is: accumulate H from the stage's inputs, quantize its linear layers, compute its outputs
//! with the quantized weights; those are the next stage's inputs. So each stage's error is seen by
//! the next, and every linear layer is multiplied once.

use web_time::Instant;

use super::inputs::StageInputs;
use super::layer::Place;
use super::plan::{block_copies, stage_flops};
use super::run::Run;
use super::stream::{Batch, Flows};
use crate::checkpoint::Writer;
use crate::error::Result;
use crate::gptq::layer::Calibration;
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
        for name in block_copies(self.stored, &plan.config, layer, &plan.assigned) {
            writer.copy(&self.stored.checkpoint, &name).await?;
        }
        let calibrated = plan.scheme.needs_inputs();
        let mut block = Block::without_linears(&plan.config, layer, self.stored, self.device).await?;
        let mut original = match original {
            Some(flows) => Some((Block::load(&plan.config, layer, self.stored, self.device).await?, flows)),
            None => None,
        };
        let stages = stages(&plan.config, layer);
        for (index, stage) in stages.iter().enumerate() {
            let Some(assigned) = stage.linears.first().and_then(|spec| plan.assigned(&spec.module)) else {
                // Asked to stay in 16 bits.
                if calibrated && block.begins_branch(index) && index > 0 {
                    self.pass(layer, index, &block, flows).await?;
                    if let Some((block, flows)) = &mut original {
                        self.pass(layer, index, block, flows).await?;
                    }
                }
                for spec in &stage.linears {
                    let linear = self.stored.linear(spec, self.device).await?;
                    block.set_linear(spec, linear);
                }
                continue;
            };
            let inputs = match calibrated {
                true => Some(self.inputs(layer, index, stage, (&block, flows), &mut original).await?),
                false => None,
            };
            let place = format!("block {layer}, stage {}", stage.name);
            let prepared = self.prepare(&place, stage, assigned, inputs).await?;
            for spec in &stage.linears {
                let place = Place { layer, stage: stage.name };
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

    /// Computes a stage's inputs for every micro-batch, of the quantized model and, where it goes along, of
    /// the original, and sums them up.
    async fn inputs(
        &mut self,
        layer: usize,
        index: usize,
        stage: &Stage,
        (block, flows): (&Block, &mut Flows),
        original: &mut Option<(Block, &mut Flows)>,
    ) -> Result<Calibration> {
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let mut inputs = StageInputs::new(self.device, &self.plan.scheme, n, self.batches.summed_tokens())?;
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let Some(seen) = self.input(index, block, flows, batch).await? else { continue };
            let beside = match original {
                Some((block, flows)) => self.input(index, block, flows, batch).await?,
                None => None,
            };
            let since = Instant::now();
            let Batch { ids, seq_len, held } = self.batches.get(batch);
            inputs.take(&seen, beside.as_ref(), *held)?;
            self.clock.add("hessian", since);
            let flops = stage_flops(&self.plan.config, &self.plan.scheme, stage, ids.len(), *seq_len);
            if self.plan.keep_between && block.worth_keeping(index) {
                flows.keep(batch, seen).await?;
                if let (Some((_, flows)), Some(beside)) = (original.as_mut(), beside) {
                    flows.keep(batch, beside).await?;
                }
            }
            self.device.settle().await?;
            self.advance(layer, stage.name, flops);
        }
        Ok(inputs.done())
    }

    /// One model's inputs of a stage for one micro-batch.
    async fn input(
        &mut self,
        index: usize,
        block: &Block,
        flows: &mut Flows,
        batch: usize,
    ) -> Result<Option<Tensor>> {
        let seq_len = self.batches.get(batch).seq_len;
        let Some(mut flow) = flows.take(batch)? else { return Ok(None) };
        let since = Instant::now();
        let x = block.input(index, &mut flow, seq_len, &self.rope).await?;
        flows.put(batch, flow).await?;
        self.clock.add("forward", since);
        Ok(Some(x))
    }

    /// Brings every micro-batch to stage `index` without looking at its inputs; behind the last stage, to
    /// the next block.
    async fn pass(&mut self, layer: usize, index: usize, block: &Block, flows: &mut Flows) -> Result<()> {
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
            let sums = inputs.insert(StageInputs::new(self.device, &plan.scheme, spec.in_features, tokens)?);
            for batch in 0..self.batches.len() {
                self.stop_point(layer).await?;
                let normed = |flow: Option<Flow>| flow.map(|flow| norm.apply(&flow.h)).transpose();
                let Some(seen) = normed(flows.take(batch)?)? else { continue };
                let beside = match original {
                    Some(original) => normed(original.take(batch)?)?,
                    None => None,
                };
                let since = Instant::now();
                let Batch { ids, seq_len, held } = self.batches.get(batch);
                sums.take(&seen, beside.as_ref(), *held)?;
                self.device.settle().await?;
                self.clock.add("hessian", since);
                let flops = stage_flops(&plan.config, &plan.scheme, stage, ids.len(), *seq_len);
                self.advance(layer, stage.name, flops);
            }
        }
        let inputs = inputs.map(StageInputs::done);
        let prepared = self.prepare("the output head", stage, assigned, inputs).await?;
        let place = Place { layer, stage: stage.name };
        self.linear(place, spec, assigned, &prepared, writer, false).await?;
        Ok(())
    }
}

//! One block of a run, stage by stage.
//!
//! A stage is: accumulate H from the stage's inputs, quantize its linear layers, compute its outputs
//! with the quantized weights; those are the next stage's inputs. So each stage's error is seen by
//! the next, and every linear layer is multiplied once.

use web_time::Instant;

use super::layer::Place;
use super::plan::{block_copies, stage_flops};
use super::run::Run;
use super::stream::{Batch, Flows};
use crate::checkpoint::Writer;
use crate::error::Result;
use crate::kernels::symmetric::SymmetricPanels;
use crate::model::arch::{Stage, stages};
use crate::model::{Block, Flow, Weights, final_norm};

impl Run<'_> {
    pub(super) async fn block(&mut self, layer: usize, flows: &mut Flows, writer: &mut Writer) -> Result<()> {
        let plan = self.plan;
        for name in block_copies(self.stored, &plan.config, layer, &plan.assigned) {
            writer.copy(&self.stored.checkpoint, &name).await?;
        }
        let calibrated = plan.scheme.needs_inputs();
        let mut block = Block::without_linears(&plan.config, layer, self.stored, self.device).await?;
        let stages = stages(&plan.config, layer);
        for (index, stage) in stages.iter().enumerate() {
            let Some(assigned) = stage.linears.first().and_then(|spec| plan.assigned(&spec.module)) else {
                // Asked to stay in 16 bits.
                if calibrated && block.begins_branch(index) && index > 0 {
                    self.pass(layer, index, &block, flows).await?;
                }
                for spec in &stage.linears {
                    let linear = self.stored.linear(spec, self.device).await?;
                    block.set_linear(spec, linear);
                }
                continue;
            };
            let hessian = match calibrated {
                true => Some(self.hessian(layer, index, stage, &block, flows).await?),
                false => None,
            };
            let prepared = self
                .prepare(&format!("block {layer}, stage {}", stage.name), stage, assigned, hessian.as_ref())
                .await?;
            drop(hessian);
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
        }
        Ok(())
    }

    /// Computes a stage's inputs for every micro-batch and sums up their Hessian, (2/tokens)·XᵀX.
    async fn hessian(
        &mut self,
        layer: usize,
        index: usize,
        stage: &Stage,
        block: &Block,
        flows: &mut Flows,
    ) -> Result<SymmetricPanels> {
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let mut h = SymmetricPanels::zeros(self.device, n)?;
        let scale = 2.0 / self.batches.tokens() as f32;
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let seq_len = self.batches.get(batch).seq_len;
            let Some(mut flow) = flows.take(batch)? else { continue };
            let since = Instant::now();
            let x = block.input(index, &mut flow, seq_len, &self.rope).await?;
            self.clock.add("forward", since);
            let since = Instant::now();
            h.accumulate(&x, scale)?;
            self.clock.add("hessian", since);
            if self.plan.keep_between && block.worth_keeping(index) {
                flow.inner = Some(x);
            }
            flows.put(batch, flow).await?;
            self.device.settle().await?;
            let tokens = self.batches.get(batch).ids.len();
            self.advance(layer, stage.name, stage_flops(&self.plan.config, stage, tokens, seq_len));
        }
        Ok(h)
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
    pub(super) async fn head(&mut self, stage: &Stage, flows: &mut Flows, writer: &mut Writer) -> Result<()> {
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
                let Some(flow) = flows.take(batch)? else { continue };
                let since = Instant::now();
                h.accumulate(&norm.apply(&flow.h)?, 2.0 / self.batches.tokens() as f32)?;
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
}

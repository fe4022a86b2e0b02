//! One block of a run, stage by stage.
//!
//! A stage is: accumulate H from the stage's inputs, quantize its linear layers, compute its outputs
//! with the quantized weights; those are the next stage's inputs. So each stage's error is seen by
//! the next, and every linear layer is multiplied once.

use web_time::Instant;

use super::layer::{Place, Rows};
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
                }
                for spec in &stage.linears {
                    let linear = self.stored.linear(spec, self.device).await?;
                    block.set_linear(spec, linear);
                }
                continue;
            };
            let expert = block.expert(index);
            let place = match expert {
                Some((_, expert)) => format!("block {layer}, expert {expert}, stage {}", stage.name),
                None => format!("block {layer}, stage {}", stage.name),
            };
            let mut rows = Rows::of_all(self.batches.tokens());
            if let Some((branch, _)) = expert.filter(|_| calibrated) {
                rows = self.rows_of_expert(&place, stage, &routed, branch);
            }
            let hessian = match calibrated {
                true => Some(self.hessian(layer, index, stage, &rows, &block, flows).await?),
                false => None,
            };
            let prepared = self.prepare(&place, stage, assigned, hessian.as_ref()).await?;
            drop(hessian);
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
        }
        Ok(())
    }

    /// Brings every micro-batch to a section with experts, and counts the tokens that each branch sees.
    async fn route(
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
            if let Some(routing) = &flow.routing {
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
        let tokens = self.batches.tokens();
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

    /// Computes a stage's inputs for every micro-batch and sums up their Hessian, (2/rows)·XᵀX.
    async fn hessian(
        &mut self,
        layer: usize,
        index: usize,
        stage: &Stage,
        rows: &Rows,
        block: &Block,
        flows: &mut Flows,
    ) -> Result<SymmetricPanels> {
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let mut h = SymmetricPanels::zeros(self.device, n)?;
        let scale = 2.0 / rows.count.max(1) as f32;
        for batch in 0..self.batches.len() {
            self.stop_point(layer).await?;
            let seq_len = self.batches.get(batch).seq_len;
            let Some(mut flow) = flows.take(batch)? else { continue };
            let since = Instant::now();
            let of_all = rows.all && rows.routed.is_some();
            let x = match of_all {
                true => Some(block.input_of_all(index, &mut flow, seq_len, &self.rope).await?),
                false => block.input(index, &mut flow, seq_len, &self.rope).await?,
            };
            self.clock.add("forward", since);
            let since = Instant::now();
            if let Some(x) = &x {
                h.accumulate(x, scale)?;
            }
            self.clock.add("hessian", since);
            if self.plan.keep_between && block.worth_keeping(index) && !of_all {
                flow.inner = x;
            }
            flows.put(batch, flow).await?;
            self.device.settle().await?;
            let tokens = self.batches.get(batch).ids.len();
            let flops = stage_flops(&self.plan.config, &self.plan.output, stage, tokens, seq_len);
            self.advance(layer, stage.name, flops);
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
                let flops = stage_flops(&plan.config, &plan.output, stage, ids.len(), *seq_len);
                self.advance(layer, stage.name, flops);
            }
        }
        let prepared = self.prepare("the output head", stage, assigned, hessian.as_ref()).await?;
        drop(hessian);
        let rows = Rows::of_all(self.batches.tokens());
        let place = Place { layer, stage: stage.name, rows };
        self.linear(place, spec, assigned, &prepared, writer, false).await?;
        Ok(())
    }
}

//! One linear layer of a run: its inputs' factor, its rows quantized some at a time, the result written.

use std::ops::Range;

use web_time::Instant;

use super::corner::Corner;
use super::events::Event;
use super::plan::{Assigned, group_size, linear_flops};
use super::report::{HeldRow, ModuleRow, logged};
use super::run::Run;
use crate::checkpoint::{DType, GptqLinear, Writer, floats};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::face;
use crate::gptq::losses::Losses;
use crate::gptq::rows::quantize_rows;
use crate::gptq::stage::{Calibration, Prepared, prepare};
use crate::model::arch::Stage;
use crate::model::{Linear, LinearSpec, Weights, linear_elem, linear_rows, load_f32};
use crate::tensor::{Host, Tensor};

/// Where a linear layer is, for rows and progress.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub layer: usize,
    pub stage: &'static str,
    pub rows: Rows,
}

/// Whose inputs make a Hessian.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub count: usize,
    /// Tokens that were routed to an expert, if it is one.
    pub routed: Option<usize>,
    /// Those of the whole layer.
    pub all: bool,
}

impl Rows {
    pub fn of_all(tokens: usize) -> Self {
        Self { count: tokens, routed: None, all: true }
    }
}

impl Run<'_> {
    /// Orders the columns of a stage's inputs and factors their Hessian.
    pub(super) async fn prepare(
        &mut self,
        place: &str,
        stage: &Stage,
        assigned: &Assigned,
        inputs: Option<Calibration>,
    ) -> Result<Prepared> {
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let since = Instant::now();
        let scheme = &assigned.scheme;
        let mut prepared = prepare(scheme, assigned.scale_type(), self.device, n, inputs, place).await?;
        if let Some(of_stage) = self.scaled.of(stage) {
            prepared = prepared.scaled(of_stage.scale.clone());
        }
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
    pub(super) async fn linear(
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
            tokens: place.rows.count,
            routed: place.rows.routed,
            damp: prepared.damp_used(),
            rtn_loss: loss.map(|loss| logged(loss.rtn)),
            gptq_loss: loss.map(|loss| logged(loss.gptq)),
            held: loss.and_then(|loss| loss.held).map(|held| HeldRow {
                alpha: logged(held.alpha / spec.out_features as f64),
                rtn: logged(held.rtn),
                plain: logged(held.plain),
                kept: logged(held.kept),
                choice: held.choice,
            }),
            scaling: self.scaled.of_module(&spec.module).map(|of_stage| of_stage.alpha),
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
            let corner = Corner::of(&self.scaled.weights, spec, &quantized).await?;
            self.observer.event(Event::Weights(&corner));
        }
        self.journal.modules.push(row);
        // The plan counts rows that are held out, too.
        let tokens = place.rows.count * self.batches.tokens() / self.batches.summed_tokens().max(1);
        self.advance(place.layer, place.stage, linear_flops(scheme, spec, tokens, true));
        Ok(linear)
    }

    /// The bias that the quantized layer will have.
    async fn bias_values(&self, spec: &LinearSpec, assigned: &Assigned) -> Result<Option<Vec<f32>>> {
        let Some(dtype) = assigned.bias else { return Ok(None) };
        let name = format!("{}.bias", spec.module);
        let values = load_f32(&self.scaled.weights, &name, &[spec.out_features]).await?;
        stored_bias(values, dtype, &name).map(Some)
    }

    /// The same as a table of one row, [1, rows].
    pub(super) async fn bias(&self, spec: &LinearSpec) -> Result<Option<Tensor>> {
        let Some(assigned) = self.plan.assigned(&spec.module) else { return Ok(None) };
        match self.bias_values(spec, assigned).await? {
            Some(values) => Tensor::from_f32(self.device, &[1, values.len()], values).map(Some),
            None => Ok(None),
        }
    }

    /// Rows of a weight that are worked on at a time.
    pub(super) fn pieces(&self, spec: &LinearSpec) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = spec.out_features;
        let step = self.plan.piece_rows(spec.in_features);
        (0..rows).step_by(step).map(move |start| start..rows.min(start + step))
    }

    /// Rows of a weight as `weights` has them, [rows, in], on the device.
    pub(super) async fn weight_rows(
        &self,
        weights: &dyn Weights,
        spec: &LinearSpec,
        rows: Range<usize>,
    ) -> Result<Tensor> {
        let (elem, shape) = (linear_elem(weights, spec)?, [rows.len(), spec.in_features]);
        let bytes = linear_rows(weights, spec, rows.clone()).await?;
        let weight = Tensor::from_bytes(&Device::Cpu, elem, &shape, &bytes)?;
        check_finite(&weight, &format!("{}.weight", spec.module), rows.start)?;
        match self.device {
            Device::Cpu => Ok(weight),
            Device::Gpu(_) => Tensor::from_bytes(self.device, elem, &shape, &bytes),
        }
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
        let scaled = self.scaled.clone();
        let groups = assigned.scheme.groups(n);
        let bias = self.bias_values(spec, assigned).await?;
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
        for Range { start, end } in self.pieces(spec) {
            let weight = self.weight_rows(&scaled.weights, spec, start..end).await?;
            let part = quantize_rows(prepared, &weight, start..end).await?;
            result.codes.extend_from_slice(&part.codes);
            // The file has [groups, rows].
            for row in 0..end - start {
                for g in 0..groups {
                    result.scales[g * rows + start + row] = part.scales[row * groups + g];
                    result.zeros[g * rows + start + row] = part.zeros[row * groups + g];
                }
            }
            if let Some(part) = part.loss {
                loss.get_or_insert_default().add(part);
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
/// model's own type, which factors folded into it may have left.
fn stored_bias(values: Vec<f32>, dtype: DType, name: &str) -> Result<Vec<f32>> {
    let rounded: Vec<f32> = values.iter().map(|&value| floats::round_to(dtype, value)).collect();
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

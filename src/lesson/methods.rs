//! The ways to quantize a layer that lessons compare, each by the product's own functions, and their errors.

use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::layer::{Layer, panels};
use crate::device::Device;
use crate::error::Result;
use crate::gptq::factor::Factor;
use crate::gptq::order::Order;
use crate::gptq::rows::{QuantizedRows, quantize_rows};
use crate::gptq::scheme::{Preset, Scheme};
use crate::gptq::stage::{Prepared, prepare_in_order};
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::scales::ScaleType;
use crate::kernels::symmetric::SymmetricPanels;
use crate::tensor::{Elem, Tensor};

/// What all methods of a comparison share.
#[derive(Debug, Clone, Deserialize)]
pub struct Setting {
    pub bits: u32,
    /// −1 for one group per row.
    pub group_size: i64,
    pub sym: bool,
    /// Scales by search, as the preset fast has them, instead of min-max.
    pub search: bool,
    pub damp_percent: f64,
}

impl Setting {
    /// # Errors
    /// As [`Scheme::check`].
    pub fn scheme(&self, preset: Preset) -> Result<Scheme> {
        let scheme = Scheme {
            sym: self.sym,
            desc_act: false,
            static_groups: true,
            mse: self.search,
            damp_percent: self.damp_percent,
            ..Scheme::preset(preset, self.bits, Scheme::group_size_of(self.group_size)?)
        };
        scheme.check()?;
        Ok(scheme)
    }
}

/// In which order columns are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Taken {
    Natural,
    /// The largest diag(H) first.
    Descending,
    /// The smallest first.
    Ascending,
}

impl Taken {
    pub fn order(self, diagonal: &[f32]) -> Order {
        match self {
            Self::Natural => Order::natural(diagonal.len()),
            Self::Descending => Order::descending(diagonal),
            Self::Ascending => {
                let mut order = Order::descending(diagonal);
                order.column.reverse();
                order
            }
        }
    }
}

/// A layer, quantized.
pub struct Outcome {
    pub quantized: QuantizedRows,
    pub prepared: Prepared,
    /// E = W − Ŵ, f32 [rows, n], natural columns; 0 where the input is never active.
    pub error: Tensor,
    pub order: Order,
}

impl Outcome {
    pub fn factor(&self) -> Option<&Factor> {
        self.prepared.factor()
    }
}

/// GPTQ, or rounding to nearest with the preset rtn.
///
/// # Errors
/// As [`prepare_in_order`] and [`quantize_rows`].
pub async fn quantize(
    scheme: &Scheme,
    taken: Taken,
    weight: &Tensor,
    h: &Rc<SymmetricPanels>,
) -> Result<Outcome> {
    let n = h.n;
    let mut order = Order::natural(n);
    let prepared = prepare_in_order(
        scheme,
        ScaleType::F16,
        &Device::Cpu,
        n,
        Some(h.clone().into()),
        "this layer",
        |diagonal| {
            order = taken.order(diagonal);
            order.clone()
        },
    )
    .await?;
    let quantized = quantize_rows(&prepared, weight, 0..weight.rows()).await?;
    let dead: Vec<bool> = h.diagonal().await?.iter().map(|&d| d <= 0.0).collect();
    let pairs = weight.f32s()?.iter().zip(quantized.dequantized.f32s()?).enumerate();
    let error = pairs.map(|(at, (w, value))| if dead[at % n] { 0.0 } else { w - value }).collect();
    let error = Tensor::from_f32(&Device::Cpu, weight.shape(), error)?;
    Ok(Outcome { quantized, prepared, error, order })
}

/// Rounding to nearest of the weights as another method scales them: W·diag(s) is rounded, then divided by s.
/// With `gptq`, the scaled weights go through GPTQ with the Hessian that their inputs X·diag(1/s) have.
///
/// # Errors
/// As [`quantize`].
pub async fn scaled(
    setting: &Setting,
    layer: &Layer,
    s: &[f32],
    preset: Preset,
    taken: Taken,
) -> Result<Tensor> {
    let n = layer.inputs.n;
    let weight = layer.weight.f32s()?.iter().enumerate().map(|(at, w)| w * s[at % n]).collect();
    let weight = Tensor::from_f32(&Device::Cpu, layer.weight.shape(), weight)?;
    let h = layer.inputs.dense.f32s()?.iter().enumerate();
    let h: Vec<f32> = h.map(|(at, h)| h / (s[at / n] * s[at % n])).collect();
    let mut outcome = quantize(&setting.scheme(preset)?, taken, &weight, &Rc::new(panels(&h, n)?)).await?;
    for (at, e) in outcome.error.f32s_mut()?.iter_mut().enumerate() {
        *e /= s[at % n];
    }
    Ok(outcome.error)
}

/// e·H·eᵀ of each row of E [rows, n], with H [n, n].
///
/// # Errors
/// Those of shapes.
pub fn losses(error: &Tensor, h: &Tensor) -> Result<Vec<f64>> {
    let mut product = Tensor::uninit(&Device::Cpu, Elem::F32, error.shape())?;
    gemm(Target::of(&mut product), Mat::of(error), Mat::of(h), Scaling::SET, None)?;
    let n = error.cols();
    let rows = error.f32s()?.chunks(n).zip(product.f32s()?.chunks(n));
    let sum =
        |(e, p): (&[f32], &[f32])| e.iter().zip(p).map(|(&e, &p)| f64::from(e) * f64::from(p)).sum::<f64>();
    Ok(rows.map(|row| sum(row).max(0.0)).collect())
}

/// tr(E·H·Eᵀ).
///
/// # Errors
/// As [`losses`].
pub fn loss(error: &Tensor, h: &Tensor) -> Result<f64> {
    Ok(losses(error, h)?.iter().sum())
}

/// What the columns of E [rows, n] add to tr(E(H+λI)Eᵀ) = ‖E·R‖² in GPTQ, turn by turn, summed up: what is
/// lost after so many columns, when those to come have taken over what they can.
///
/// # Errors
/// Those of shapes.
pub fn curve(error: &Tensor, factor: &Factor, order: &Order) -> Result<Vec<f64>> {
    let (rows, n) = (error.rows(), error.cols());
    let columns = Tensor::from_u32(&Device::Cpu, &[n], order.column.clone())?;
    let e = crate::kernels::columns::gather(error, &columns)?;
    let mut added = vec![0f64; n];
    for block in &factor.blocks {
        let width = block.end - block.start;
        let mut product = Tensor::uninit(&Device::Cpu, Elem::F32, &[rows, width])?;
        let own = Mat::of(&e).part(0, block.start, rows, width);
        gemm(Target::of(&mut product), own, Mat::of(&block.square), Scaling::SET, None)?;
        if block.end < n {
            let rest = Mat::of(&e).part(0, block.end, rows, n - block.end);
            gemm(Target::of(&mut product), rest, Mat::of(&block.below), Scaling::ADD, None)?;
        }
        for row in product.f32s()?.chunks(width) {
            for (j, &x) in row.iter().enumerate() {
                added[order.turn(block.start + j)] += f64::from(x).powi(2);
            }
        }
    }
    Ok(summed(added))
}

/// The same without compensation: tr(E·H·Eᵀ) of the columns done, those to come being as they were.
///
/// # Errors
/// Those of shapes.
pub fn rounding_curve(error: &Tensor, h: &Tensor, order: &Order) -> Result<Vec<f64>> {
    let n = error.cols();
    let mut turns = vec![0; n];
    for (position, &column) in order.column.iter().enumerate() {
        turns[column as usize] = order.turn(position);
    }
    // What a column adds: its own square, and twice its products with those before it.
    let factors = h.f32s()?.iter().enumerate().map(|(at, &h)| match turns[at / n].cmp(&turns[at % n]) {
        std::cmp::Ordering::Less => 2.0 * h,
        std::cmp::Ordering::Equal => h,
        std::cmp::Ordering::Greater => 0.0,
    });
    let factors = Tensor::from_f32(&Device::Cpu, &[n, n], factors.collect())?;
    let mut product = Tensor::uninit(&Device::Cpu, Elem::F32, error.shape())?;
    gemm(Target::of(&mut product), Mat::of(error), Mat::of(&factors), Scaling::SET, None)?;
    let mut added = vec![0f64; n];
    for (at, (&e, &p)) in error.f32s()?.iter().zip(product.f32s()?).enumerate() {
        added[turns[at % n]] += f64::from(e) * f64::from(p);
    }
    Ok(summed(added))
}

fn summed(mut added: Vec<f64>) -> Vec<f64> {
    let mut sum = 0.0;
    for x in &mut added {
        sum += *x;
        *x = sum;
    }
    added
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lesson::layer::tests::layer;

    const SETTING: Setting =
        Setting { bits: 3, group_size: 64, sym: true, search: false, damp_percent: 0.01 };

    #[test]
    fn losses_are_those_that_the_product_reports() {
        let layer = layer("model.layers.0.mlp.down_proj", 512);
        let scheme = SETTING.scheme(Preset::Fast).unwrap();
        let rtn_scheme = SETTING.scheme(Preset::Rtn).unwrap();
        for taken in [Taken::Natural, Taken::Descending, Taken::Ascending] {
            let run = |scheme| quantize(scheme, taken, &layer.weight, &layer.inputs.hessian);
            let (gptq, rtn) = pollster::block_on(async { (run(&scheme).await, run(&rtn_scheme).await) });
            let (gptq, rtn) = (gptq.unwrap(), rtn.unwrap());
            let reported = gptq.quantized.loss.unwrap();
            let found = loss(&gptq.error, &layer.inputs.dense).unwrap();
            assert!((found / reported.gptq - 1.0).abs() < 1e-3, "{found} {reported:?}");
            let rounded = loss(&rtn.error, &layer.inputs.dense).unwrap();
            assert!((rounded / reported.rtn - 1.0).abs() < 1e-3, "{rounded} {reported:?}");
            assert!(found < rounded);

            // The curves end where the losses are, GPTQ's with the damping in it.
            let factor = gptq.factor().unwrap();
            let end = *curve(&gptq.error, factor, &gptq.order).unwrap().last().unwrap();
            let squares: f64 = gptq.error.f32s().unwrap().iter().map(|&e| f64::from(e).powi(2)).sum();
            assert!((end / (found + f64::from(factor.lambda) * squares) - 1.0).abs() < 1e-3);
            let end = *rounding_curve(&rtn.error, &layer.inputs.dense, &gptq.order).unwrap().last().unwrap();
            assert!((end / rounded - 1.0).abs() < 1e-3);
        }
    }

    #[test]
    fn scaling_by_one_changes_nothing() {
        let layer = layer("model.layers.0.self_attn.q_proj", 256);
        let ones = vec![1.0; 256];
        for preset in [Preset::Rtn, Preset::Fast] {
            let scheme = SETTING.scheme(preset).unwrap();
            let plain = quantize(&scheme, Taken::Natural, &layer.weight, &layer.inputs.hessian);
            let plain = pollster::block_on(plain).unwrap().error;
            let scaled = pollster::block_on(scaled(&SETTING, &layer, &ones, preset, Taken::Natural)).unwrap();
            assert_eq!(plain.f32s().unwrap(), scaled.f32s().unwrap());
        }
    }
}

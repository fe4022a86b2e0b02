//! Scaling of inputs by their size, as AWQ does (arXiv 2306.00978).
//!
//! W·diag(s) is rounded instead of W, for inputs divided by s: with s_j = (mean |x_j|)^α the weights of large inputs
//! get a finer grid, at the cost of their neighbours in the group. α is the one of 0, 1/20, … 1 for which rounding to
//! nearest on min-max grids loses least, ‖(W − Q(W·diag(s))·diag(1/s))·X‖².

use std::rc::Rc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::gptq::held::{Goal, Held};
use crate::gptq::layer::{Calibration, Prepared};
use crate::gptq::rounding::{Stretched, rounded};
use crate::kernels::columns::copy;
use crate::kernels::scales::Fit;
use crate::kernels::scatter::add_rows;
use crate::kernels::stretch::stretch;
use crate::kernels::symmetric::{PANEL, SymmetricPanels};
use crate::tensor::{Elem, Tensor};

/// Steps of α from 0 to 1.
pub const STEPS: u32 = 20;

/// s and 1/s on a device, f32 [n] both.
pub struct Scale {
    pub factors: Vec<f32>,
    times: Tensor,
    by: Tensor,
}

impl Scale {
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Device, factors: Vec<f32>) -> Result<Self> {
        let inverse = factors.iter().map(|s| 1.0 / s).collect();
        Ok(Self {
            times: Tensor::from_f32(device, &[factors.len()], factors.clone())?,
            by: Tensor::from_f32(device, &[factors.len()], inverse)?,
            factors,
        })
    }

    /// W·diag(s) of `weight` f32 [rows, n].
    ///
    /// # Errors
    /// Those of the device.
    pub fn times(&self, weight: &mut Tensor) -> Result<()> {
        stretch(weight, &self.times)
    }

    /// X·diag(1/s) of `x` f32 [rows, n].
    ///
    /// # Errors
    /// Those of the device.
    pub fn divide(&self, x: &mut Tensor) -> Result<()> {
        stretch(x, &self.by)
    }

    /// The rounding of W·diag(s) as one of W.
    fn done(&self) -> Stretched<'_> {
        Stretched { to: &self.times, back: &self.by }
    }

    /// The rounding of W as one of W·diag(s).
    pub(super) fn undone(&self) -> Stretched<'_> {
        Stretched { to: &self.by, back: &self.times }
    }

    /// What the inputs say when they are divided.
    ///
    /// # Errors
    /// [`Error::Internal`] where the original's activations go along; those of the device.
    pub fn divided(&self, inputs: &Calibration) -> Result<Calibration> {
        let h = &inputs.hessian;
        let mut panels = vec![];
        for (p, panel) in h.panels.iter().enumerate() {
            let first = p * PANEL;
            let columns = first..first + panel.cols();
            let inverse: Vec<f32> = self.factors[first..].iter().map(|s| 1.0 / s).collect();
            let own = Tensor::from_f32(h.device(), &[columns.len()], inverse[..columns.len()].to_vec())?;
            let mut across = copy(panel)?;
            stretch(&mut across, &own)?;
            let mut out = Tensor::zeros(h.device(), Elem::F32, panel.shape())?;
            add_rows(&mut out, &across, &(0..panel.rows() as u32).collect::<Vec<_>>(), &inverse)?;
            panels.push(out);
        }
        let held = match &inputs.held {
            Some(Held { seen, goal: Goal::Own }) => {
                let mut seen = copy(seen)?;
                self.divide(&mut seen)?;
                Some(Held { seen, goal: Goal::Own })
            }
            Some(_) => return Err(Error::Internal("inputs with a goal are not divided".into())),
            None => None,
        };
        let hessian = Rc::new(SymmetricPanels { n: h.n, panels });
        Ok(Calibration { hessian, drift: None, held })
    }
}

/// (mean |x_j|)^α from the means or multiples of them, normalized so that the product of the smallest and the largest is
/// 1; inputs that are never active keep 1.
pub fn factors(magnitudes: &[f32], alpha: f64) -> Vec<f32> {
    let s: Vec<f64> = magnitudes.iter().map(|&m| f64::from(m).powf(alpha)).collect();
    let alive = || magnitudes.iter().zip(&s).filter(|(m, _)| **m > 0.0).map(|(_, &s)| s);
    let (low, high) = alive().fold((f64::INFINITY, 0f64), |(low, high), s| (low.min(s), high.max(s)));
    let middle = (low * high).sqrt();
    // Very small ones would be lost in the Hessian's 32 bits.
    let of = |(&m, s): (&f32, f64)| if m > 0.0 { (s / middle).clamp(1e-4, 1e4) as f32 } else { 1.0 };
    magnitudes.iter().zip(s).map(of).collect()
}

/// What rounding W·diag(s) to nearest loses for each of `scales`: tr(E·H·Eᵀ) of some rows of a weight, f32, f16 or bf16
/// [rows, n]; `prepared` is that of the inputs as they are.
///
/// # Errors
/// [`Error::Internal`] without a factor; those of the device.
pub async fn losses(prepared: &Prepared, weight: &Tensor, scales: &[Scale]) -> Result<Vec<f64>> {
    let Some(factor) = &prepared.factor else {
        return Err(Error::Internal("a loss needs a factor".into()));
    };
    let mut losses = Vec::with_capacity(scales.len());
    for scale in scales {
        let rounded = rounded(prepared, factor, weight, Fit::MinMax, Some(scale.done())).await?;
        losses.push(rounded.loss);
    }
    Ok(losses)
}

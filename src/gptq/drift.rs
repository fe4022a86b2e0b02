//! How far the quantized model's activations have drifted from the original's.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::add::add_scaled;
use crate::kernels::columns::copy;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::tensor::{Elem, Tensor};

/// Columns in one stored panel: below WebGPU's binding limit for any model, as those of the Hessian.
const PANEL: usize = 512;

/// D = (2/tokens)·Σ (x − x̃)·x̃ᵀ, [n, n], where a layer sees x in the original model and x̃ in the one
/// whose earlier layers are quantized. Kept as block columns.
pub struct Drift {
    n: usize,
    panels: Vec<Tensor>,
}

impl Drift {
    pub fn zeros(device: &Device, n: usize) -> Result<Self> {
        let panels = (0..n)
            .step_by(PANEL)
            .map(|c0| Tensor::zeros(device, Elem::F32, &[n, PANEL.min(n - c0)]))
            .collect::<Result<_>>()?;
        Ok(Self { n, panels })
    }

    /// D += scale·(X − X̃)ᵀ·X̃ for `original` X and `seen` X̃, both [tokens, n].
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes do not fit.
    pub fn accumulate(&mut self, original: &Tensor, seen: &Tensor, scale: f32) -> Result<()> {
        let mut difference = copy(original)?;
        add_scaled(&mut difference, seen, -1.0)?;
        let (difference, tokens) = (Mat::of(&difference).t(), seen.rows());
        for (p, panel) in self.panels.iter_mut().enumerate() {
            let part = Mat::of(seen).part(0, p * PANEL, tokens, panel.cols());
            gemm(Target::of(panel), difference, part, Scaling { alpha: scale, beta: 1.0 }, None)?;
        }
        Ok(())
    }

    /// W·D, f32 [rows, n], for a weight [rows, n] of f32.
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes do not fit.
    pub fn seen_by(&self, weight: &Tensor) -> Result<Tensor> {
        if weight.cols() != self.n {
            return Err(Error::Internal(format!("a drift of {} for {:?}", self.n, weight.shape())));
        }
        let mut out = Tensor::uninit(weight.device(), Elem::F32, weight.shape())?;
        for (p, panel) in self.panels.iter().enumerate() {
            let target = Target::at(&mut out, 0, p * PANEL);
            gemm(target, Mat::of(weight), Mat::of(panel), Scaling::SET, None)?;
        }
        Ok(out)
    }
}

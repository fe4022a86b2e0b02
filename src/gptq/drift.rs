//! How far the quantized model's activations have drifted from the original's.

use std::ops::Range;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::embedding::gather;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::symmetric::{SymmetricPanels, add_product, reordered};
use crate::tensor::{Elem, Tensor};

/// Rows or columns in one stored panel: below WebGPU's binding limit for any model, as those of the Hessian.
const PANEL: usize = 512;

/// Sums over the tokens of what layers see in the quantized model, x̃, with what they should make up for.
pub enum Drift {
    /// D = (2/tokens)·Σ (x − x̃)·x̃ᵀ, [n, n], with the inputs x of the original model, for layers that should
    /// give W·x. Block columns.
    Inputs(Vec<Tensor>),
    /// P = (2/tokens)·Σ y·x̃ᵀ, [rows, n], for one layer that should give y. Block rows.
    Outputs(Vec<Tensor>),
}

impl Drift {
    /// For layers of `n` inputs.
    ///
    /// # Errors
    /// Those of the device.
    pub fn of_inputs(device: &Device, n: usize) -> Result<Self> {
        let panel = |c0| Tensor::zeros(device, Elem::F32, &[n, PANEL.min(n - c0)]);
        (0..n).step_by(PANEL).map(panel).collect::<Result<_>>().map(Self::Inputs)
    }

    /// For a layer of `rows` outputs and `n` inputs.
    ///
    /// # Errors
    /// Those of the device.
    pub fn of_outputs(device: &Device, rows: usize, n: usize) -> Result<Self> {
        let panel = |first| Tensor::zeros(device, Elem::F32, &[PANEL.min(rows - first), n]);
        (0..rows).step_by(PANEL).map(panel).collect::<Result<_>>().map(Self::Outputs)
    }

    /// Adds scale·AᵀX̃: `left` A holds the tokens' x − x̃ or y, `seen` X̃ [tokens, n].
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes do not fit.
    pub fn accumulate(&mut self, left: &Tensor, seen: &Tensor, scale: f32) -> Result<()> {
        let (a, b, tokens) = (Mat::of(left), Mat::of(seen), seen.rows());
        let scaling = Scaling { alpha: scale, beta: 1.0 };
        match self {
            Self::Inputs(panels) => {
                for (p, panel) in panels.iter_mut().enumerate() {
                    let part = b.part(0, p * PANEL, tokens, panel.cols());
                    gemm(Target::of(panel), a.t(), part, scaling, None)?;
                }
            }
            Self::Outputs(panels) => {
                for (p, panel) in panels.iter_mut().enumerate() {
                    let part = a.part(0, p * PANEL, tokens, panel.rows());
                    gemm(Target::of(panel), part.t(), b, scaling, None)?;
                }
            }
        }
        Ok(())
    }

    /// (2/tokens)·Σ (y − W·x̃)·x̃ᵀ, f32 [rows, n], for rows `which` of a layer, y being W·x where inputs were
    /// summed up. `weight` has those rows in f32, `h` is the Hessian of x̃ and `diagonal` f32 [n] its diagonal.
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes do not fit.
    pub fn of_rows(
        &self,
        weight: &Tensor,
        which: Range<usize>,
        h: &SymmetricPanels,
        diagonal: &Tensor,
    ) -> Result<Tensor> {
        let (device, n) = (weight.device(), weight.cols());
        if n != h.n || which.len() != weight.rows() {
            return Err(Error::Internal(format!("a drift of {} inputs for {:?}", h.n, weight.shape())));
        }
        match self {
            Self::Inputs(panels) => {
                let mut out = Tensor::uninit(device, Elem::F32, weight.shape())?;
                for (p, panel) in panels.iter().enumerate() {
                    let target = Target::at(&mut out, 0, p * PANEL);
                    gemm(target, Mat::of(weight), Mat::of(panel), Scaling::SET, None)?;
                }
                Ok(out)
            }
            Self::Outputs(panels) => {
                let rows: Vec<u32> = which.map(|row| row as u32).collect();
                let mut out = gather(&panels.iter().collect::<Vec<_>>(), &rows)?;
                let order = Tensor::from_u32(device, &[n], (0..n as u32).collect())?;
                for c0 in (0..n).step_by(PANEL) {
                    let below = reordered(h, &order, diagonal, c0, n.min(c0 + PANEL))?;
                    add_product(&mut out, c0, weight, h, &below, c0, -1.0)?;
                }
                Ok(out)
            }
        }
    }
}

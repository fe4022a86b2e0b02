//! How far the quantized model's activations have drifted from the original's.

use std::ops::Range;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::add::add_scaled;
use crate::kernels::embedding::gather;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm, gemm_rounded};
use crate::kernels::symmetric::{PANEL, SymmetricPanels, add_product, reordered};
use crate::tensor::{Elem, Tensor};

/// Elements of one stored panel at most: what WebGPU lets a kernel see of one buffer on any device.
const LARGEST: usize = 1 << 25;
/// Rows or columns in one stored panel at most. The fewer panels there are, the less often a product packs the
/// same inputs.
const WIDEST: usize = 2048;

/// Rows or columns of a panel whose other side is `across` long.
fn panel_width(across: usize) -> usize {
    WIDEST.min(LARGEST / across.max(1)).max(1)
}

/// Sums over the tokens of what layers see in the quantized model, x̃, with what they should make up for.
pub enum Drift {
    /// D = (2/tokens)·Σ (x − x̃)·x̃ᵀ, [n, n], with the inputs x of the original model, for layers that should
    /// give W·x; while it is summed up with x in place of x − x̃, see [`Drift::complete`]. Block columns.
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
        let width = panel_width(n);
        let panel = |c0| Tensor::zeros(device, Elem::F32, &[n, width.min(n - c0)]);
        (0..n).step_by(width).map(panel).collect::<Result<_>>().map(Self::Inputs)
    }

    /// For a layer of `rows` outputs and `n` inputs.
    ///
    /// # Errors
    /// Those of the device.
    pub fn of_outputs(device: &Device, rows: usize, n: usize) -> Result<Self> {
        let height = panel_width(n);
        let panel = |first| Tensor::zeros(device, Elem::F32, &[height.min(rows - first), n]);
        (0..rows).step_by(height).map(panel).collect::<Result<_>>().map(Self::Outputs)
    }

    /// Adds scale·AᵀX̃: `left` A holds the tokens' x or y, `seen` X̃ [tokens, n].
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes do not fit.
    pub fn accumulate(&mut self, left: &Tensor, seen: &Tensor, scale: f32) -> Result<()> {
        let (a, b, tokens) = (Mat::of(left), Mat::of(seen), seen.rows());
        let scaling = Scaling { alpha: scale, beta: 1.0 };
        match self {
            Self::Inputs(panels) => {
                let mut first = 0;
                for panel in panels {
                    let part = b.part(0, first, tokens, panel.cols());
                    gemm(Target::of(panel), a.t(), part, scaling, None)?;
                    first += panel.cols();
                }
            }
            Self::Outputs(panels) => {
                let mut first = 0;
                for panel in panels {
                    let part = a.part(0, first, tokens, panel.rows());
                    gemm_rounded(Target::of(panel), part.t(), b, scaling, None)?;
                    first += panel.rows();
                }
            }
        }
        Ok(())
    }

    /// When everything is summed up: takes the Hessian `h` of x̃ from what was summed up of inputs, element by
    /// element. So no micro-batch needs its x − x̃, and inputs that did not drift leave zeros.
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes do not fit.
    pub async fn complete(&mut self, h: &SymmetricPanels) -> Result<()> {
        let Self::Inputs(panels) = self else { return Ok(()) };
        let n = h.n;
        let diagonal = h.diagonal().await?;
        let mut first = 0;
        for panel in panels {
            let end = first + panel.cols();
            // Its columns come first in this order, so that they are there from the first row on.
            let order: Vec<u32> =
                (first..end).chain(0..first).chain(end..n).map(|column| column as u32).collect();
            let diagonal = order.iter().map(|&column| diagonal[column as usize]).collect();
            let diagonal = Tensor::from_f32(h.device(), &[n], diagonal)?;
            let order = Tensor::from_u32(h.device(), &[n], order)?;
            let own = reordered(h, &order, &diagonal, 0, end - first)?;
            let place = |row: usize| match row {
                row if row < first => row + end - first,
                row if row < end => row - first,
                row => row,
            };
            let rows: Vec<u32> = (0..n).map(|row| place(row) as u32).collect();
            add_scaled(panel, &gather(&[&own], &rows)?, -1.0)?;
            first = end;
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
                let mut first = 0;
                for panel in panels {
                    let target = Target::at(&mut out, 0, first);
                    gemm(target, Mat::of(weight), Mat::of(panel), Scaling::SET, None)?;
                    first += panel.cols();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    /// Narrower panels than any model needs, so that there are several.
    fn drift(device: &Device, n: usize, width: usize) -> Drift {
        let panel = |c0| Tensor::zeros(device, Elem::F32, &[n, width.min(n - c0)]).unwrap();
        Drift::Inputs((0..n).step_by(width).map(panel).collect())
    }

    fn sums(device: &Device, n: usize, width: usize, [x, seen]: [&[f32]; 2]) -> Vec<Vec<f32>> {
        let tensor =
            |values: &[f32]| Tensor::from_f32(device, &[values.len() / n, n], values.to_vec()).unwrap();
        let (x, seen) = (tensor(x), tensor(seen));
        let mut h = SymmetricPanels::zeros(device, n).unwrap();
        h.accumulate(&seen, 0.5).unwrap();
        let mut drift = drift(device, n, width);
        drift.accumulate(&x, &seen, 0.5).unwrap();
        pollster::block_on(async {
            drift.complete(&h).await.unwrap();
            let Drift::Inputs(panels) = drift else { panic!("another drift") };
            let mut values = Vec::new();
            for panel in panels {
                values.push(panel.to_f32().await.unwrap());
            }
            values
        })
    }

    #[test]
    fn what_the_quantized_model_sees_is_taken_from_what_the_original_sees() {
        let (n, width, tokens) = (40, 16, 30);
        let (x, seen) = (noise(tokens * n, 1), noise(tokens * n, 2));
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            for (p, panel) in sums(device, n, width, [&x, &seen]).iter().enumerate() {
                let cols = width.min(n - p * width);
                for (at, got) in panel.iter().enumerate() {
                    let (i, j) = (at / cols, p * width + at % cols);
                    let term = |t: usize| (x[t * n + i] - seen[t * n + i]) * seen[t * n + j];
                    let want = 0.5 * (0..tokens).map(term).sum::<f32>();
                    assert!((got - want).abs() < 1e-4, "{}: {i}, {j}: {got}, {want}", device.describe());
                }
            }
        }
    }

    /// The first block's inputs, for one.
    #[test]
    fn inputs_that_did_not_drift_leave_nothing() {
        // Of more than one panel of H.
        let (n, tokens) = (576, 70);
        let x = noise(tokens * n, 1);
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            for width in [576, 200] {
                let found = sums(device, n, width, [&x, &x]);
                assert!(found.iter().flatten().all(|x| *x == 0.0), "{} {width}", device.describe());
            }
        }
    }

    #[test]
    fn a_panel_fits_a_binding_and_small_ones_are_one() {
        assert_eq!(panel_width(576), 2048);
        for n in [1, 8192, 16384, 28672, 53248] {
            assert!(panel_width(n) * n <= LARGEST && panel_width(n) <= WIDEST, "{n}");
        }
    }
}

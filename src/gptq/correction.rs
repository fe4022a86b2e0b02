//! Weights moved before they are rounded, so that a layer makes of the quantized model's activations
//! what the original makes of its own.
//!
//! With y what the layer should give and x̃ the input that is there, the least of
//! Σ‖y − W'·x̃‖² + λ‖W' − W‖² is at W' = W + Z,
//!
//! ```text
//! Z = (2/tokens)·Σ (y − W·x̃)·x̃ᵀ · (H + λI)⁻¹,   H = (2/tokens)·Σ x̃·x̃ᵀ
//! ```
//!
//! and the ordinary sweep then rounds W + α·Z with H. With y = W·x, x being the original's input, QEP
//! (arXiv 2504.09629) and Qronos (arXiv 2505.11695) make the same move. A layer whose outputs are added to
//! the residual stream can do more: y is what brings the quantized model's stream to where the original's is
//! behind the layer, so that what earlier layers left behind is made up for, too. α = 1 and λ = 0 is the
//! whole of the move, which follows the calibration text further than is good for any other.

use std::ops::Range;
use std::rc::Rc;

use super::drift::Drift;
use super::factor::{Factor, factor};
use super::order::Order;
use crate::error::Result;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::symmetric::SymmetricPanels;
use crate::tensor::{Elem, Tensor};

/// λ as a share of mean(diag H).
pub const DAMP: f64 = 0.1;

/// What the linear layers of a stage share for it.
pub struct Correction {
    factor: Factor,
    hessian: Rc<SymmetricPanels>,
    /// diag(H), f32 [n].
    diagonal: Tensor,
    drift: Drift,
}

impl Correction {
    /// `None` when no damping makes H positive definite. `diagonal` is diag(H), natural order, with
    /// dead columns set to 1.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn new(h: &Rc<SymmetricPanels>, diagonal: &[f32], drift: Drift) -> Result<Option<Self>> {
        let order = Order { column: (0..h.n as u32).collect() };
        let Some(factor) = factor(h, &order, diagonal, DAMP).await? else { return Ok(None) };
        let diagonal = Tensor::from_f32(h.device(), &[h.n], diagonal.to_vec())?;
        Ok(Some(Self { factor, hessian: h.clone(), diagonal, drift }))
    }

    /// Z for rows `which` of a weight, f32 [rows, n] → f32 [rows, n].
    ///
    /// # Errors
    /// Those of the device.
    pub fn of(&self, weight: &Tensor, which: Range<usize>) -> Result<Tensor> {
        let (rows, n) = (weight.rows(), weight.cols());
        let mut right = self.drift.of_rows(weight, which, &self.hessian, &self.diagonal)?;
        // Z·L·Lᵀ = R: first Y·Lᵀ = R from the first block on, then Z·L = Y from the last.
        let mut y = Tensor::uninit(weight.device(), Elem::F32, &[rows, n])?;
        for block in &self.factor.blocks {
            let width = block.end - block.start;
            let own = Mat::of(&right).part(0, block.start, rows, width);
            let inverse = Mat::of(&block.inverse).t();
            gemm(Target::at(&mut y, 0, block.start), own, inverse, Scaling::SET, None)?;
            if block.end < n {
                let done = Mat::of(&y).part(0, block.start, rows, width);
                let below = Mat::of(&block.below).t();
                gemm(Target::at(&mut right, 0, block.end), done, below, Scaling::SUB, None)?;
            }
        }
        let mut z = right;
        for block in self.factor.blocks.iter().rev() {
            let width = block.end - block.start;
            if block.end < n {
                let done = Mat::of(&z).part(0, block.end, rows, n - block.end);
                gemm(Target::at(&mut y, 0, block.start), done, Mat::of(&block.below), Scaling::SUB, None)?;
            }
            let own = Mat::of(&y).part(0, block.start, rows, width);
            gemm(Target::at(&mut z, 0, block.start), own, Mat::of(&block.inverse), Scaling::SET, None)?;
        }
        Ok(z)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::device::Device;
    use crate::kernels::testing::{noise, test_gpu};

    /// Z·(H + λI) = Σ (y − W·x̃)·x̃ᵀ on both devices, for layers that should give W·x and for one that should
    /// give something else, of which some rows are asked for.
    #[test]
    fn the_move_solves_its_equation() {
        let (all, which, n, tokens) = (30, 11..18, 300, 700);
        let halved = |x: f32| bf16::from_f32(x).to_f32();
        // A CPU may round what is summed up to bf16, which these are.
        let seen: Vec<f32> = noise(tokens * n, 1).into_iter().map(halved).collect();
        let original: Vec<f32> =
            seen.iter().zip(noise(tokens * n, 2)).map(|(x, noise)| 0.9 * x + 0.2 * noise).collect();
        let weight = noise(all * n, 3);
        let product = |x: &[f32], t: usize, row: usize| -> f64 {
            let terms = x[t * n..][..n].iter().zip(&weight[row * n..]);
            terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
        };
        let other: Vec<f32> = (0..tokens * all)
            .map(|at| product(&original, at / all, at % all) as f32)
            .zip(noise(tokens * all, 4))
            .map(|(y, noise)| halved(y + noise))
            .collect();
        let scale = 2.0 / tokens as f64;
        let h: Vec<f64> = (0..n * n)
            .map(|at| {
                let terms = seen.chunks(n).map(|x| f64::from(x[at / n]) * f64::from(x[at % n]));
                terms.sum::<f64>() * scale
            })
            .collect();
        let lambda = DAMP * (0..n).map(|i| h[i * n + i]).sum::<f64>() / n as f64;

        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            for inputs in [true, false] {
                let tensor = |rows, values: &[f32]| {
                    Tensor::from_f32(device, &[rows, values.len() / rows], values.to_vec()).unwrap()
                };
                let mut panels = SymmetricPanels::zeros(device, n).unwrap();
                let x = tensor(tokens, &seen);
                panels.accumulate(&x, scale as f32).unwrap();
                let mut drift;
                if inputs {
                    drift = Drift::of_inputs(device, n).unwrap();
                    drift.accumulate(&tensor(tokens, &original), &x, scale as f32).unwrap();
                    pollster::block_on(drift.complete(&panels)).unwrap();
                } else {
                    drift = Drift::of_outputs(device, all, n).unwrap();
                    drift.accumulate(&tensor(tokens, &other), &x, scale as f32).unwrap();
                }
                let z = pollster::block_on(async {
                    let diagonal = panels.diagonal().await.unwrap();
                    let correction =
                        Correction::new(&Rc::new(panels), &diagonal, drift).await.unwrap().unwrap();
                    let part = tensor(which.len(), &weight[which.start * n..which.end * n]);
                    correction.of(&part, which.clone()).unwrap().to_f32().await.unwrap()
                });
                let (mut worst, mut largest) = (0f64, 0f64);
                for (z, row) in z.chunks(n).zip(which.clone()) {
                    let left: Vec<f64> = (0..tokens)
                        .map(|t| {
                            let y = match inputs {
                                true => product(&original, t, row),
                                false => f64::from(other[t * all + row]),
                            };
                            y - product(&seen, t, row)
                        })
                        .collect();
                    for j in 0..n {
                        let damped = |k: usize| h[k * n + j] + if k == j { lambda } else { 0.0 };
                        let found: f64 = (0..n).map(|k| f64::from(z[k]) * damped(k)).sum();
                        let wanted: f64 =
                            (0..tokens).map(|t| left[t] * f64::from(seen[t * n + j])).sum::<f64>() * scale;
                        worst = worst.max((found - wanted).abs());
                        largest = largest.max(wanted.abs());
                    }
                }
                assert!(worst < 2e-5 * largest, "{} {inputs}: {worst} of {largest}", device.describe());
            }
        }
    }
}

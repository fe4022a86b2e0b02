//! Weights moved before they are rounded, so that a layer makes of the quantized model's activations
//! what the original makes of its own.
//!
//! With x the original's input and x̃ the one that is there, the least of Σ‖W·x − W'·x̃‖² + λ‖W' − W‖²
//! is at W' = W + Z,
//!
//! ```text
//! Z = W·D·(H + λI)⁻¹,   D = (2/tokens)·Σ (x − x̃)·x̃ᵀ,   H = (2/tokens)·Σ x̃·x̃ᵀ
//! ```
//!
//! and the ordinary sweep then rounds W + α·Z with H. QEP (arXiv 2504.09629) and Qronos (arXiv
//! 2505.11695) make the same move; α = 1 and λ = 0 is the whole of it, which follows the calibration
//! text further than is good for any other.

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
    drift: Drift,
}

impl Correction {
    /// `None` when no damping makes H positive definite. `diagonal` is diag(H), natural order, with
    /// dead columns set to 1.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn new(h: &SymmetricPanels, diagonal: &[f32], drift: Drift) -> Result<Option<Self>> {
        let order = Order { column: (0..h.n as u32).collect() };
        Ok(factor(h, &order, diagonal, DAMP).await?.map(|factor| Self { factor, drift }))
    }

    /// Z for a weight f32 [rows, n] → f32 [rows, n].
    ///
    /// # Errors
    /// Those of the device.
    pub fn of(&self, weight: &Tensor) -> Result<Tensor> {
        let (rows, n) = (weight.rows(), weight.cols());
        let mut right = self.drift.seen_by(weight)?;
        // Z·L·Lᵀ = W·D: first Y·Lᵀ = W·D from the first block on, then Z·L = Y from the last.
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
    use super::*;
    use crate::device::Device;
    use crate::kernels::testing::{noise, test_gpu};

    /// Z·(H + λI) = W·D, on both devices.
    #[test]
    fn the_move_solves_its_equation() {
        let (rows, n, tokens) = (7, 300, 700);
        let values = |count, seed| noise(count, seed);
        let seen: Vec<f32> = values(tokens * n, 1);
        let original: Vec<f32> =
            seen.iter().zip(values(tokens * n, 2)).map(|(x, noise)| 0.9 * x + 0.2 * noise).collect();
        let weight = values(rows * n, 3);
        let scale = 2.0 / tokens as f64;
        let sum = |a: &[f32], i: usize, b: &[f32], j: usize| -> f64 {
            (0..tokens).map(|t| f64::from(a[t * n + i]) * f64::from(b[t * n + j])).sum::<f64>() * scale
        };
        let h: Vec<f64> = (0..n * n).map(|at| sum(&seen, at / n, &seen, at % n)).collect();
        let d: Vec<f64> = (0..n * n).map(|at| sum(&original, at / n, &seen, at % n) - h[at]).collect();
        let lambda = DAMP * (0..n).map(|i| h[i * n + i]).sum::<f64>() / n as f64;

        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let tensor =
                |rows, values: &[f32]| Tensor::from_f32(device, &[rows, n], values.to_vec()).unwrap();
            let (mut panels, mut drift) =
                (SymmetricPanels::zeros(device, n).unwrap(), Drift::zeros(device, n).unwrap());
            let seen = tensor(tokens, &seen);
            panels.accumulate(&seen, scale as f32).unwrap();
            drift.accumulate(&tensor(tokens, &original), &seen, scale as f32).unwrap();
            let z = pollster::block_on(async {
                let diagonal = panels.diagonal().await.unwrap();
                let correction = Correction::new(&panels, &diagonal, drift).await.unwrap().unwrap();
                correction.of(&tensor(rows, &weight)).unwrap().to_f32().await.unwrap()
            });
            let (mut worst, mut largest) = (0f64, 0f64);
            for row in 0..rows {
                for j in 0..n {
                    let left: f64 = (0..n)
                        .map(|k| {
                            let damped = h[k * n + j] + if k == j { lambda } else { 0.0 };
                            f64::from(z[row * n + k]) * damped
                        })
                        .sum();
                    let right: f64 = (0..n).map(|k| f64::from(weight[row * n + k]) * d[k * n + j]).sum();
                    worst = worst.max((left - right).abs());
                    largest = largest.max(right.abs());
                }
            }
            assert!(worst < 1e-5 * largest, "{}: {worst} of {largest}", device.describe());
        }
    }
}

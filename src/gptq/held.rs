//! Calibration rows that take no part in a layer's Hessian, and judge what comes out instead.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::kernels::add::add_scaled;
use crate::kernels::columns::gather;
use crate::kernels::gemm::linear;
use crate::kernels::norm::{add_squared_differences, add_squares};
use crate::tensor::{Elem, Tensor};

/// What a layer should make of the inputs x̃ that it sees in the quantized model.
pub enum Goal {
    /// What its own weights make of them: W·x̃.
    Own,
    /// What they make of the original model's inputs x, [tokens, n]: W·x.
    Inputs(Tensor),
    /// y, [tokens, rows].
    Outputs(Tensor),
}

impl Goal {
    /// With its rows as `f` makes them.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(&self, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Own => Self::Own,
            Self::Inputs(x) => Self::Inputs(f(x)?),
            Self::Outputs(y) => Self::Outputs(f(y)?),
        })
    }

    /// With the rows of the next tokens behind its own.
    ///
    /// # Errors
    /// [`Error::Internal`] for a goal of another kind; those of the device.
    pub fn joined(self, next: Self) -> Result<Self> {
        Ok(match (self, next) {
            (Self::Own, Self::Own) => Self::Own,
            (Self::Inputs(rows), Self::Inputs(next)) => Self::Inputs(rows.joined(&next)?),
            (Self::Outputs(rows), Self::Outputs(next)) => Self::Outputs(rows.joined(&next)?),
            _ => return Err(Error::Internal("goals of two kinds".into())),
        })
    }
}

/// A stage's inputs on rows that were held out.
pub struct Held {
    /// x̃, f32 [tokens, n].
    pub seen: Tensor,
    pub goal: Goal,
}

impl Held {
    /// What rows `which` of a layer should give, f32 [tokens, rows]; `weight` has those rows.
    ///
    /// # Errors
    /// Those of the device.
    pub fn wanted(&self, weight: &Tensor, which: Range<usize>) -> Result<Tensor> {
        match &self.goal {
            Goal::Own => linear(&self.seen, weight, None),
            Goal::Inputs(original) => linear(original, weight, None),
            Goal::Outputs(y) => {
                let columns = which.map(|row| row as u32).collect();
                gather(y, &Tensor::from_u32(y.device(), &[weight.rows()], columns)?)
            }
        }
    }

    /// Ŵ·x̃, f32 [tokens, rows], of Ŵ f32 [rows, n].
    ///
    /// # Errors
    /// Those of the device.
    pub fn outputs(&self, weight: &Tensor) -> Result<Tensor> {
        linear(&self.seen, weight, None)
    }

    /// By how much of the move Z the weight W does best here: the least of ‖y − (W + α·Z)·x̃‖² over α,
    /// which is a parabola, among the candidates 0, ¼, ½, ¾ and 1.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn best_share(&self, wanted: &Tensor, weight: &Tensor, z: &Tensor) -> Result<f64> {
        let (moved, mut left) = (self.outputs(z)?, self.outputs(weight)?);
        add_scaled(&mut left, wanted, -1.0)?;
        // ‖left + α·moved‖² at α = 0 and 1 and ‖moved‖² tell the parabola.
        let at_0 = mean_square(&left).await?;
        let square = mean_square(&moved).await?;
        add_scaled(&mut left, &moved, 1.0)?;
        let at_1 = mean_square(&left).await?;
        let lowest = if square > 0.0 { 0.5 * (1.0 + (at_0 - at_1) / square) } else { 0.0 };
        Ok((4.0 * lowest.clamp(0.0, 1.0)).round() / 4.0)
    }
}

/// (2/tokens)·Σ‖y − y'‖², both f32 [tokens, rows].
///
/// # Errors
/// Those of the device.
pub async fn distance(a: &Tensor, b: &Tensor) -> Result<f64> {
    let mut sums = Tensor::zeros(a.device(), Elem::F32, &[a.rows()])?;
    add_squared_differences(a, b, &mut sums)?;
    mean(&sums).await
}

async fn mean_square(x: &Tensor) -> Result<f64> {
    let mut sums = Tensor::zeros(x.device(), Elem::F32, &[x.rows()])?;
    add_squares(x, &mut sums)?;
    mean(&sums).await
}

/// Twice the mean, as in H.
async fn mean(sums: &Tensor) -> Result<f64> {
    let total: f64 = sums.to_f32().await?.into_iter().map(f64::from).sum();
    Ok(2.0 * total / sums.len() as f64)
}

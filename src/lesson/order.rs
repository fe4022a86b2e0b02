//! In which order columns are taken, and what it costs.

use serde::{Deserialize, Serialize};

use super::layer::{Layer, Place};
use super::methods::{Setting, Taken, curve, loss, quantize, rounding_curve};
use crate::error::{Error, Result};
use crate::gptq::scheme::Preset;

/// What is asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Ordering {
    pub place: Place,
    pub setting: Setting,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Orders {
    pub rows: usize,
    pub tokens: usize,
    pub held_tokens: usize,
    /// diag(H) in natural order.
    pub diagonal: Vec<f32>,
    pub median: f32,
    /// Columns whose input is never active.
    pub dead: Vec<usize>,
    /// Columns with more than [`OUTLIER`] times the median.
    pub outliers: Vec<usize>,
    pub outlier: f32,
    pub orders: Vec<Taking>,
    /// Rounding to nearest, in natural order.
    pub rtn: Taking,
}

/// One order, or rounding.
#[derive(Debug, Clone, Serialize)]
pub struct Taking {
    /// `None` for rounding.
    pub taken: Option<Taken>,
    /// What is lost after each column; for GPTQ with damping counted in.
    pub curve: Vec<f64>,
    /// tr(E·H·Eᵀ), and the same on text that it was not fitted to.
    pub loss: f64,
    pub held_loss: f64,
}

/// A channel that has this many times the median of diag(H) stands out.
pub const OUTLIER: f32 = 20.0;

impl Ordering {
    /// Works it out.
    ///
    /// # Errors
    /// [`Error::Options`] for a setting that makes no sense; [`Error::Numeric`] when no damping helps.
    pub async fn solve(&self, layer: &Layer) -> Result<Orders> {
        let inputs = &layer.inputs;
        let (weight, h) = (&layer.weight, &inputs.hessian);
        let mut orders = Vec::new();
        for taken in [Taken::Natural, Taken::Descending, Taken::Ascending] {
            let done = quantize(&self.setting.scheme(Preset::Fast)?, taken, weight, h).await?;
            let factor = done.factor().ok_or_else(no_factor)?;
            orders.push(Taking {
                taken: Some(taken),
                curve: curve(&done.error, factor, &done.order)?,
                loss: loss(&done.error, &inputs.dense)?,
                held_loss: loss(&done.error, &inputs.held)?,
            });
        }
        let done = quantize(&self.setting.scheme(Preset::Rtn)?, Taken::Natural, weight, h).await?;
        let rtn = Taking {
            taken: None,
            curve: rounding_curve(&done.error, &inputs.dense, &done.order)?,
            loss: loss(&done.error, &inputs.dense)?,
            held_loss: loss(&done.error, &inputs.held)?,
        };
        let mut sorted = inputs.diagonal.clone();
        sorted.sort_by(f32::total_cmp);
        let median = sorted[sorted.len() / 2];
        let where_is = |is: &dyn Fn(f32) -> bool| {
            inputs.diagonal.iter().enumerate().filter(|(_, d)| is(**d)).map(|(j, _)| j).collect()
        };
        Ok(Orders {
            rows: weight.rows(),
            tokens: inputs.tokens,
            held_tokens: inputs.held_tokens,
            diagonal: inputs.diagonal.clone(),
            median,
            dead: where_is(&|d| d <= 0.0),
            outliers: where_is(&|d| d > OUTLIER * median),
            outlier: OUTLIER,
            orders,
            rtn,
        })
    }
}

pub(super) fn no_factor() -> Error {
    Error::numeric(
        "this layer",
        "no damping made its Hessian positive definite",
        "Take more tokens or another layer",
    )
}

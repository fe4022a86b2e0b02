//! The norms of a model: by root mean square, or by mean and variance.

use super::arch::weight;
use super::config::ModelConfig;
use super::weights::{Weights, load_f32};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::input::Input;
use crate::kernels::layernorm::layernorm;
use crate::kernels::rmsnorm::rmsnorm;
use crate::tensor::Tensor;

/// What a family's norms compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// x / √(mean(x²) + ε) · w
    Rms,
    /// x / √(mean(x²) + ε) · (1 + w), as Gemma has it.
    RmsPlusOne,
    /// (x − mean(x)) / √(var(x) + ε) · w + b
    Layer,
}

/// One norm.
pub struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f32,
}

impl Norm {
    /// The norm `name` over rows of `width`, or heads of `width` in rows.
    ///
    /// # Errors
    /// [`Error::Model`](crate::error::Error::Model) when a tensor is absent or has the wrong shape.
    pub async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        name: &str,
        width: usize,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let mut values = load_f32(weights, &weight(name), &[width]).await?;
        if config.norm == NormKind::RmsPlusOne {
            values.iter_mut().for_each(|w| *w += 1.0);
        }
        let bias = match config.norm {
            NormKind::Layer => {
                let values = load_f32(weights, &format!("{name}.bias"), &[width]).await?;
                Some(Tensor::from_f32(device, &[width], values)?)
            }
            _ => None,
        };
        Ok(Self { weight: Tensor::from_f32(device, &[width], values)?, bias, eps: config.norm_eps })
    }

    /// The normalized rows of `x`, f32.
    ///
    /// # Errors
    /// [`Error::Internal`](crate::error::Error::Internal) when the width does not fit.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        match &self.bias {
            None => rmsnorm(x, &self.weight, self.eps),
            Some(bias) => layernorm(x, &self.weight, bias, self.eps),
        }
    }

    /// Calls `with` with the normalized rows as the input of a linear layer, not yet computed where a
    /// kernel can do that.
    ///
    /// # Errors
    /// Those of `with`, and as [`Norm::apply`].
    pub fn before<T>(&self, x: &Tensor, with: impl FnOnce(Input) -> Result<T>) -> Result<T> {
        match &self.bias {
            None => with(Input::RmsNorm { x, weight: &self.weight, eps: self.eps }),
            Some(_) => with(Input::Plain(&self.apply(x)?)),
        }
    }
}

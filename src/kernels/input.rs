//! What a linear layer multiplies: a tensor, or one that is first normalized or gated.
//!
//! The step before a product is named instead of computed, so that a kernel for few rows may do it
//! while it loads its input: decoding is bound by the number of dispatches.

use super::rmsnorm::rmsnorm;
use super::swiglu::swiglu_halves;
use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;

/// The input [tokens, in] of a linear layer, f32.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// The tensor as it is.
    Plain(&'a Tensor),
    /// x / √(mean(x²) + ε) · weight by rows; see [`rmsnorm`].
    RmsNorm { x: &'a Tensor, weight: &'a Tensor, eps: f32 },
    /// silu(gate) · up of a tensor [tokens, 2·in] with the gate in the first half of each row and up
    /// in the second; see [`swiglu_halves`].
    SwiGlu(&'a Tensor),
}

impl<'a> Input<'a> {
    /// The tensor that it is made of.
    pub fn source(&self) -> &'a Tensor {
        match *self {
            Self::Plain(x) | Self::RmsNorm { x, .. } | Self::SwiGlu(x) => x,
        }
    }

    pub fn device(&self) -> &'a Device {
        self.source().device()
    }

    pub fn tokens(&self) -> usize {
        self.source().rows()
    }

    /// The features of each token that the product sees.
    pub fn features(&self) -> usize {
        match self {
            Self::Plain(x) | Self::RmsNorm { x, .. } => x.cols(),
            Self::SwiGlu(x) => x.cols() / 2,
        }
    }

    /// Calls `with` with the input computed.
    ///
    /// # Errors
    /// Those of the step, then those of `with`.
    pub fn computed<T>(&self, with: impl FnOnce(&Tensor) -> Result<T>) -> Result<T> {
        match *self {
            Self::Plain(x) => with(x),
            Self::RmsNorm { x, weight, eps } => with(&rmsnorm(x, weight, eps)?),
            Self::SwiGlu(x) => with(&swiglu_halves(x)?),
        }
    }
}

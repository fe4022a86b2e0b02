//! Y = f(X)·Wᵀ (+ bias) for a weight of 2, 3, 4 or 8 bit codes, which are widened on their way into the
//! product: qgemv for few rows, as decoding has them, qgemm for many. Sums are f32.
//!
//! The weight is `scale[group]·(code − zero[group])`; see [`Packed`] for how it lies in memory.

use super::columns;
use super::gemm::{Target, values};
use super::gemv::{FEW, check};
use super::input::Input;
use super::matmul::{Product, Strided, Values, matmul};
use super::sums::Sums;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

pub(super) mod cpu;
mod gpu;
mod packed;

pub use gpu::KERNELS;
pub use packed::{Form, Packed};

/// y = input·wᵀ + bias, or y += … if `add`: the input [tokens, in], y f32 with `out` columns from where
/// the target starts.
///
/// # Errors
/// [`Error::Internal`] when shapes, element types or devices do not fit.
pub fn multiply(y: Target, input: Input, w: &Packed, bias: Option<&Tensor>, add: bool) -> Result<()> {
    let tokens = input.tokens();
    if input.features() != w.form.k {
        let x = input.source().shape();
        return Err(Error::Internal(format!("qmatmul: {x:?} by {}×{}", w.n, w.form.k)));
    }
    check(&y, &input, w.n, w.device(), bias)?;
    if tokens == 0 || w.n == 0 {
        return Ok(());
    }
    match w.device() {
        Device::Gpu(gpu) if tokens <= FEW => gpu::few_rows(gpu, y, input, w, bias, add),
        device => input.computed(|x| {
            let gathered = w.order.as_ref().map(|order| columns::gather(x, order)).transpose()?;
            let x = gathered.as_ref().unwrap_or(x);
            match device {
                Device::Gpu(gpu) => gpu::many_rows(gpu, y, x, w, bias, add),
                Device::Cpu => on_cpu(y, x, w, bias, add),
            }
        }),
    }
}

/// `x` [tokens, depth] has its columns in the order of the weight's slots.
fn on_cpu(y: Target, x: &Tensor, w: &Packed, bias: Option<&Tensor>, add: bool) -> Result<()> {
    let weight = cpu::Weight { words: w.words.u32s()?, grid: w.grid.u32s()?, form: w.form, zeros: w.zeros };
    let tokens = x.rows();
    if tokens <= FEW {
        let mut sums = Sums::new(w.n, tokens);
        cpu::few_rows(weight, x.f32s()?, tokens, &mut sums.values);
        return sums.store(y, bias, add);
    }
    let product = Product {
        m: tokens,
        n: w.n,
        k: w.form.depth,
        a: Strided { values: values(x, 0)?, row: x.cols(), col: 1 },
        b: Strided { values: Values::Packed(weight), row: 0, col: 0 },
        alpha: 1.0,
        beta: if add { 1.0 } else { 0.0 },
        bias: bias.map(Tensor::f32s).transpose()?,
        lower: false,
        parallel: true,
    };
    matmul(&mut y.tensor.f32s_mut()?[y.offset..], y.ld, product);
    Ok(())
}

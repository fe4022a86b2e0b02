//! Y = f(X)·Wᵀ (+ bias) for a dense weight: few rows as decoding has them, without packing, or many by
//! [`super::gemm`].

use super::gemm::{Mat, Scaling, Target, gemm, values};
use super::input::Input;
use super::sums::Sums;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

mod cpu;
pub(super) mod gpu;

pub use gpu::KERNELS;

/// The most rows that are few.
pub const FEW: usize = 4;

/// y = input·wᵀ + bias, or y += … if `add`: the input [tokens, in], `w` [out, in] (f32, f16 or bf16), y
/// f32 with `out` columns from where the target starts.
///
/// # Errors
/// [`Error::Internal`] when shapes, element types or devices do not fit.
pub fn multiply(y: Target, input: Input, w: &Tensor, bias: Option<&Tensor>, add: bool) -> Result<()> {
    let (tokens, n, k) = (input.tokens(), w.rows(), w.cols());
    if input.features() != k {
        return Err(Error::Internal(format!("gemv: {:?} by {n}×{k}", input.source().shape())));
    }
    check(&y, &input, n, w.device(), bias)?;
    let few = (1..=FEW).contains(&tokens) && n > 0 && k > 0;
    match w.device() {
        Device::Cpu if few => input.computed(|x| {
            let mut sums = Sums::new(n, tokens);
            cpu::few_rows(values(w, 0)?, n, k, x.f32s()?, tokens, &mut sums.values);
            sums.store(y, bias, add)
        }),
        Device::Gpu(gpu) if few && gpu::takes(w) => gpu::few_rows(gpu, y, input, w, bias, add),
        _ => {
            let scaling = if add { Scaling::ADD } else { Scaling::SET };
            input.computed(|x| gemm(y, Mat::of(x), Mat::of(w).t(), scaling, bias))
        }
    }
}

/// What both forms of a linear layer's weight ask of its surroundings.
pub(super) fn check(
    y: &Target,
    input: &Input,
    n: usize,
    device: &Device,
    bias: Option<&Tensor>,
) -> Result<()> {
    let tokens = input.tokens();
    let end = if tokens == 0 { 0 } else { y.offset + (tokens - 1) * y.ld + n };
    let floats = [Some(&*y.tensor), Some(input.source()), bias];
    if n > y.ld
        || end > y.tensor.len()
        || bias.is_some_and(|bias| bias.len() != n)
        || floats.iter().flatten().any(|tensor| tensor.elem() != Elem::F32 || !tensor.device().same(device))
    {
        return Err(Error::Internal(format!(
            "a linear layer of {n} outputs, {:?} to {:?}",
            input.source().shape(),
            y.tensor.shape()
        )));
    }
    Ok(())
}

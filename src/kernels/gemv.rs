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

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    fn weight(device: &Device, elem: Elem, n: usize, k: usize) -> Tensor {
        let values = noise(n * k, 1);
        let bytes: Vec<u8> = match elem {
            Elem::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            Elem::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        Tensor::from_bytes(device, elem, &[n, k], &bytes).unwrap()
    }

    /// y [rows, n + 3] from column 2 on, by few rows or by the matrix product that serves many.
    fn run(device: &Device, elem: Elem, [rows, n, k]: [usize; 3], step: usize, few: bool) -> Vec<f32> {
        let w = weight(device, elem, n, k);
        let tensor = |shape: &[usize], seed| {
            Tensor::from_f32(device, shape, noise(shape.iter().product(), seed)).unwrap()
        };
        let (x, norm, bias) = (tensor(&[rows, k * (1 + step / 2)], 2), tensor(&[k], 3), tensor(&[n], 4));
        let input = match step {
            0 => Input::Plain(&x),
            1 => Input::RmsNorm { x: &x, weight: &norm, eps: 1e-3 },
            _ => Input::SwiGlu(&x),
        };
        let mut y = tensor(&[rows, n + 3], 5);
        let target = Target::at(&mut y, 0, 2);
        if few {
            multiply(target, input, &w, Some(&bias), step != 1).unwrap();
        } else {
            let scaling = if step != 1 { Scaling::ADD } else { Scaling::SET };
            input.computed(|x| gemm(target, Mat::of(x), Mat::of(&w).t(), scaling, Some(&bias))).unwrap();
        }
        pollster::block_on(y.to_f32()).unwrap()
    }

    #[test]
    fn few_rows_give_what_many_give_on_both_devices() {
        let gpu = test_gpu();
        for (index, shape) in
            [[1, 64, 32], [2, 37, 40], [3, 1, 8], [4, 130, 1200], [1, 5, 5000], [2, 33, 12], [1, 70, 52]]
                .into_iter()
                .enumerate()
        {
            for (turn, elem) in [Elem::F32, Elem::F16, Elem::BF16].into_iter().enumerate() {
                let step = (index + turn) % 3;
                let want = run(&Device::Cpu, elem, shape, step, false);
                // A GPU makes a pipeline for every kind: one of three for each shape.
                let gpu = gpu.clone().filter(|_| index % 3 == turn || elem == Elem::BF16);
                for device in [Some(Device::Cpu), gpu].iter().flatten() {
                    let error = relative_error(&run(device, elem, shape, step, true), &want);
                    assert!(error < 3e-6, "{} {elem:?} {shape:?} {step}: {error}", device.describe());
                }
            }
        }
    }

    /// On the CPU any length will do, on a GPU the matrix product takes over.
    #[test]
    fn rows_of_odd_lengths_are_multiplied_too() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            for elem in [Elem::F32, Elem::F16, Elem::BF16] {
                let want = run(&Device::Cpu, elem, [2, 19, 45], 0, false);
                assert!(relative_error(&run(device, elem, [2, 19, 45], 0, true), &want) < 3e-6);
            }
        }
    }
}

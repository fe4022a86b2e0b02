//! Functions of single elements: the activations that are not [gated by silu](super::swiglu), alone or
//! times another tensor, and the soft cap of logits.

use super::parallel::for_chunks;
use super::simd::{exp, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Elements per piece of parallel work.
const PIECE: usize = 1 << 14;

/// A function f(x) of single elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Function {
    /// x / (1 + e⁻ˣ)
    Silu,
    /// x/2 · (1 + erf(x/√2))
    Gelu,
    /// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))
    GeluTanh,
    /// max(x, 0)
    Relu,
    /// c · tanh(x / c)
    SoftCap(f32),
    /// c · x
    Scale(f32),
}

/// x ← f(x), or x ← f(x) · `by` where there is one; all f32 of one shape.
///
/// # Errors
/// [`Error::Internal`] when the shapes differ.
pub fn apply(x: &mut Tensor, function: Function, by: Option<&Tensor>) -> Result<()> {
    if let Some(by) = by.filter(|by| by.len() != x.len() || !by.device().same(x.device())) {
        return Err(Error::Internal(format!("activation: {:?} and {:?}", x.shape(), by.shape())));
    }
    match x.device().clone() {
        Device::Cpu => {
            let by = by.map(Tensor::f32s).transpose()?;
            for_chunks(x.f32s_mut()?, PIECE, |piece, x| {
                match function {
                    Function::Silu => silu(x, by, piece * PIECE),
                    Function::Gelu => gelu(x, by, piece * PIECE),
                    Function::GeluTanh => gelu_tanh(x, by, piece * PIECE),
                    Function::Relu => relu(x, by, piece * PIECE),
                    Function::SoftCap(cap) => soft_cap(x, cap),
                    Function::Scale(by) => x.iter_mut().for_each(|x| *x *= by),
                };
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::apply(&gpu, x, function, by),
    }
}

/// tanh x with an absolute error of about 1e-7.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// erf x to 1.5e-7 (Abramowitz and Stegun 1964, formula 7.1.26).
#[inline(always)]
fn erf(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let p = 1.061_405_4;
    let p = p * t - 1.453_152;
    let p = p * t + 1.421_413_7;
    let p = p * t - 0.284_496_74;
    let p = p * t + 0.254_829_6;
    (1.0 - p * t * exp(-x * x)).copysign(x)
}

#[inline(always)]
fn each(x: &mut [f32], by: Option<&[f32]>, start: usize, function: impl Fn(f32) -> f32) {
    match by {
        None => x.iter_mut().for_each(|x| *x = function(*x)),
        Some(by) => {
            for (x, by) in x.iter_mut().zip(&by[start..]) {
                *x = function(*x) * by;
            }
        }
    }
}

multiversion! {
    fn silu(x: &mut [f32], by: Option<&[f32]>, start: usize) {
        each(x, by, start, |x| x / (1.0 + exp(-x)));
    }
}

multiversion! {
    fn gelu(x: &mut [f32], by: Option<&[f32]>, start: usize) {
        each(x, by, start, |x| 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)));
    }
}

multiversion! {
    fn gelu_tanh(x: &mut [f32], by: Option<&[f32]>, start: usize) {
        each(x, by, start, |x| 0.5 * x * (1.0 + tanh(0.797_884_6 * (x + 0.044_715 * x * x * x))));
    }
}

multiversion! {
    fn relu(x: &mut [f32], by: Option<&[f32]>, start: usize) {
        // Written so that NaN stays.
        each(x, by, start, |x| if x < 0.0 { 0.0 } else { x });
    }
}

multiversion! {
    /// cap · tanh(x / cap) in place, for scores of attention too.
    pub(super) fn soft_cap(x: &mut [f32], cap: f32) {
        each(x, None, 0, |x| cap * tanh(x / cap));
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::GROUP;
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        quads: u32,
        constant: f32,
    }

    const ACTIVATION: Kernel = Kernel {
        name: "activation",
        source: include_str!("../../shaders/activation.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&ACTIVATION, size_of::<Params>())];

    pub fn apply(gpu: &Gpu, x: &Tensor, function: Function, by: Option<&Tensor>) -> Result<()> {
        let (number, constant) = match function {
            Function::Silu => (0.0, 1.0),
            Function::Gelu => (1.0, 1.0),
            Function::GeluTanh => (2.0, 1.0),
            Function::Relu => (3.0, 1.0),
            Function::SoftCap(cap) => (4.0, cap),
            Function::Scale(by) => (5.0, by),
        };
        // The last quad may reach into the padding that every buffer has.
        let params = Params { quads: x.len().div_ceil(4) as u32, constant };
        let alone = Tensor::uninit(x.device(), crate::tensor::Elem::F32, &[4])?;
        gpu.dispatch(
            &ACTIVATION,
            &[("FUNCTION", number), ("GATED", u8::from(by.is_some()).into())],
            &[by.unwrap_or(&alone).gpu()?, x.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((params.quads as usize).div_ceil(GROUP)),
            40.0 * f64::from(params.quads),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    /// erf by its series, in f64.
    fn exact_erf(x: f64) -> f64 {
        if x.abs() > 5.0 {
            return x.signum();
        }
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn both_devices_agree_with_the_definitions_far_from_zero_too() {
        let (rows, cols) = (199, 101);
        let x: Vec<f32> =
            noise(rows * cols, 1).iter().enumerate().map(|(i, x)| x * [1.0, 8.0, 120.0][i % 3]).collect();
        let by = noise(rows * cols, 2);
        let gpu = test_gpu();
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let functions: [(Function, &dyn Fn(f64) -> f64); 6] = [
            (Function::Silu, &|x| x / (1.0 + (-x).exp())),
            (Function::Gelu, &|x| 0.5 * x * (1.0 + exact_erf(x / 2f64.sqrt()))),
            (Function::GeluTanh, &|x| 0.5 * x * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh())),
            (Function::Relu, &|x| x.max(0.0)),
            (Function::SoftCap(30.0), &|x| 30.0 * (x / 30.0).tanh()),
            (Function::Scale(7.5), &|x| 7.5 * x),
        ];
        for (function, exact) in functions {
            for gated in [false, true] {
                if gated && matches!(function, Function::SoftCap(_) | Function::Scale(_)) {
                    continue;
                }
                let want: Vec<f32> = (x.iter().zip(&by))
                    .map(|(&x, &by)| (exact(f64::from(x)) * if gated { f64::from(by) } else { 1.0 }) as f32)
                    .collect();
                for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                    let mut y = Tensor::from_f32(device, &[rows, cols], x.clone()).unwrap();
                    let by = Tensor::from_f32(device, &[rows, cols], by.clone()).unwrap();
                    apply(&mut y, function, gated.then_some(&by)).unwrap();
                    let error = relative_error(&pollster::block_on(y.to_f32()).unwrap(), &want);
                    assert!(error < 1e-6, "{function:?} on {}: {error}", device.describe());
                }
            }
        }
    }
}

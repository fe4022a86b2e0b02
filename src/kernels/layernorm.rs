//! Layer normalization: y = (x − mean(x)) / √(var(x) + ε) · weight + bias, row by row.
//! (Ba et al. 2016, arXiv 1607.06450.)

use super::cut::lanes;
use super::parallel::for_chunks;
use super::simd::{multiversion, sum};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Rows per piece of parallel work hold about this many elements.
const PIECE: usize = 1 << 13;

/// Normalizes each row of `x` [tokens, hidden]; weight and bias have hidden elements. All f32.
///
/// # Errors
/// [`Error::Internal`] when the shapes or devices do not fit.
pub fn layernorm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
    let cols = weight.len();
    let fits = cols > 0
        && x.cols() == cols
        && bias.len() == cols
        && x.device().same(weight.device())
        && x.device().same(bias.device());
    if !fits {
        let shapes = [x, weight, bias].map(Tensor::shape);
        return Err(Error::Internal(format!("layernorm: x, weight and bias {shapes:?}")));
    }
    let mut y = Tensor::uninit(x.device(), Elem::F32, x.shape())?;
    match x.device() {
        Device::Cpu => {
            let (x, weight, bias) = (x.f32s()?, weight.f32s()?, bias.f32s()?);
            let piece_len = (PIECE / cols).max(1) * cols;
            for_chunks(y.f32s_mut()?, piece_len, |piece, y| {
                let start = piece * piece_len;
                normalize(y, &x[start..start + y.len()], weight, bias, eps);
            });
        }
        Device::Gpu(gpu) => gpu::layernorm(gpu, lanes(gpu, cols / 4), &y, x, weight, bias, eps)?,
    }
    Ok(y)
}

multiversion! {
    fn normalize(y: &mut [f32], x: &[f32], weight: &[f32], bias: &[f32], eps: f32) {
        let n = weight.len() as f32;
        for (y, x) in y.chunks_mut(weight.len()).zip(x.chunks(weight.len())) {
            let mean = sum(x, |x| x) / n;
            let scale = 1.0 / (sum(x, |x| (x - mean) * (x - mean)) / n + eps).sqrt();
            for (((y, x), weight), bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = (x - mean) * scale * weight + bias;
            }
        }
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{GROUP, whole_quads};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        rows: u32,
        row_quads: u32,
        eps: f32,
    }

    const LAYERNORM: Kernel = Kernel {
        name: "layernorm",
        source: include_str!("../../shaders/layernorm.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&LAYERNORM, size_of::<Params>())];

    pub fn layernorm(
        gpu: &Gpu,
        lanes: usize,
        y: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        eps: f32,
    ) -> Result<()> {
        let rows = x.rows();
        let row_quads = whole_quads("layernorm", "row", weight.len(), 4)?;
        let params = Params { rows: rows as u32, row_quads, eps };
        gpu.dispatch(
            &LAYERNORM,
            &[("LANES", lanes as f64)],
            &[x.gpu()?, weight.gpu()?, bias.gpu()?, y.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((rows * lanes).div_ceil(GROUP)),
            6.0 * x.len() as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    #[test]
    fn both_devices_agree_with_the_definition() {
        let gpu = test_gpu();
        let (rows, cols) = (7, 96);
        // Far from zero, where a variance from squares alone would lose its digits.
        let x: Vec<f32> = noise(rows * cols, 1).into_iter().map(|x| x + 20.0).collect();
        let (w, b) = (noise(cols, 2), noise(cols, 3));
        let mut want = vec![];
        for row in x.chunks(cols) {
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / cols as f64;
            let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / cols as f64;
            let scale = 1.0 / (variance + 1e-5).sqrt();
            want.extend(
                (0..cols)
                    .map(|i| ((f64::from(row[i]) - mean) * scale * f64::from(w[i]) + f64::from(b[i])) as f32),
            );
        }
        for device in [Some(Device::Cpu), gpu].iter().flatten() {
            let tensor =
                |shape: &[usize], values: &[f32]| Tensor::from_f32(device, shape, values.to_vec()).unwrap();
            let (x, w, b) = (tensor(&[rows, cols], &x), tensor(&[cols], &w), tensor(&[cols], &b));
            let y = layernorm(&x, &w, &b, 1e-5).unwrap();
            assert!(relative_error(&pollster::block_on(y.to_f32()).unwrap(), &want) < 1e-5);
            // A software adapter takes one thread per row; hardware shares rows.
            if let Device::Gpu(gpu) = device {
                for lanes in [4, 64] {
                    let y = Tensor::uninit(device, Elem::F32, &[rows, cols]).unwrap();
                    super::gpu::layernorm(gpu, lanes, &y, &x, &w, &b, 1e-5).unwrap();
                    assert!(relative_error(&pollster::block_on(y.to_f32()).unwrap(), &want) < 1e-5);
                }
            }
            assert!(layernorm(&x, &w, &tensor(&[4], &[0.0; 4]), 1e-5).is_err());
        }
    }
}

//! Root-mean-square normalization: y = x / √(mean(x²) + ε) · weight, row by row.

use super::cut::lanes;
use super::parallel::for_chunks;
use super::simd::{multiversion, sum};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Rows per piece of parallel work hold about this many elements.
const PIECE: usize = 1 << 13;

/// Normalizes each run of `weight.len()` elements of `x`: rows of [tokens, hidden], or the heads of
/// [tokens, heads · head_dim] when the weight has head_dim elements. All f32; the result has the
/// shape of `x`.
///
/// # Errors
/// [`Error::Internal`] when the weight's length does not divide a row.
pub fn rmsnorm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let cols = weight.len();
    if cols == 0 || !x.cols().is_multiple_of(cols) || !x.device().same(weight.device()) {
        return Err(Error::Internal(format!("rmsnorm: {:?} by {:?}", x.shape(), weight.shape())));
    }
    let mut y = Tensor::uninit(x.device(), Elem::F32, x.shape())?;
    match x.device() {
        Device::Cpu => {
            let (x, weight) = (x.f32s()?, weight.f32s()?);
            let piece_len = (PIECE / cols).max(1) * cols;
            for_chunks(y.f32s_mut()?, piece_len, |piece, y| {
                let start = piece * piece_len;
                normalize(y, &x[start..start + y.len()], weight, eps);
            });
        }
        Device::Gpu(gpu) => gpu::rmsnorm(gpu, lanes(gpu, cols / 4), &y, x, weight, eps)?,
    }
    Ok(y)
}

multiversion! {
    fn normalize(y: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
        for (y, x) in y.chunks_mut(weight.len()).zip(x.chunks(weight.len())) {
            let scale = 1.0 / (sum(x, |x| x * x) / weight.len() as f32 + eps).sqrt();
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = x * scale * weight;
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

    const RMSNORM: Kernel = Kernel {
        name: "rmsnorm",
        source: include_str!("../../shaders/rmsnorm.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&RMSNORM, size_of::<Params>())];

    pub fn rmsnorm(gpu: &Gpu, lanes: usize, y: &Tensor, x: &Tensor, weight: &Tensor, eps: f32) -> Result<()> {
        let rows = x.len() / weight.len();
        let row_quads = whole_quads("rmsnorm", "row", weight.len(), 4)?;
        let params = Params { rows: rows as u32, row_quads, eps };
        gpu.dispatch(
            &RMSNORM,
            &[("LANES", lanes as f64)],
            &[x.gpu()?, weight.gpu()?, y.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((rows * lanes).div_ceil(GROUP)),
            4.0 * x.len() as f64,
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
        for (rows, cols, parts) in [(7, 96, 1), (5, 64, 4)] {
            let (x, w) = (noise(rows * cols, 1), noise(cols / parts, 2));
            let mut want = vec![];
            for row in x.chunks(cols / parts) {
                let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
                let scale = 1.0 / (mean + 1e-3).sqrt();
                want.extend(row.iter().zip(&w).map(|(&x, &w)| (f64::from(x) * scale * f64::from(w)) as f32));
            }
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let x = Tensor::from_f32(device, &[rows, cols], x.clone()).unwrap();
                let w = Tensor::from_f32(device, &[cols / parts], w.clone()).unwrap();
                let y = rmsnorm(&x, &w, 1e-3).unwrap();
                assert_eq!(y.shape(), [rows, cols]);
                assert!(relative_error(&pollster::block_on(y.to_f32()).unwrap(), &want) < 1e-6);
                // A software adapter takes one thread per row; hardware shares rows.
                if let Device::Gpu(gpu) = device {
                    for lanes in [4, 64] {
                        let y = Tensor::uninit(device, Elem::F32, &[rows, cols]).unwrap();
                        super::gpu::rmsnorm(gpu, lanes, &y, &x, &w, 1e-3).unwrap();
                        assert!(relative_error(&pollster::block_on(y.to_f32()).unwrap(), &want) < 1e-6);
                    }
                }
            }
        }
    }
}

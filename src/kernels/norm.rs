//! Σx² of each row, for losses.

use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Adds Σ_j x[r][j]² to `sums` f32 [rows].
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn add_squares(x: &Tensor, sums: &mut Tensor) -> Result<()> {
    if sums.len() != x.rows() {
        return Err(Error::Internal("norm: one sum for each row".into()));
    }
    match x.device().clone() {
        Device::Cpu => {
            let (values, n) = (x.f32s()?, x.cols());
            for_chunks(sums.f32s_mut()?, 1, |row, sum| {
                let squares = values[row * n..(row + 1) * n].iter().map(|&v| f64::from(v) * f64::from(v));
                sum[0] += squares.sum::<f64>() as f32;
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::add_squares(&gpu, x, sums),
    }
}

mod gpu {
    use super::*;
    use crate::device::Gpu;

    pub fn add_squares(_gpu: &Gpu, _x: &Tensor, _sums: &mut Tensor) -> Result<()> {
        Err(Error::Internal("norm has no GPU kernel yet".into()))
    }
}

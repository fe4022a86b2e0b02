//! Root-mean-square normalization: y = x / √(mean(x²) + ε) · weight, row by row.

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
        Device::Gpu(_) => return Err(Error::Internal("rmsnorm has no GPU kernel yet".into())),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error};

    #[test]
    fn the_cpu_twin_agrees_with_the_definition() {
        for (rows, cols, parts) in [(7, 96, 1), (5, 64, 4)] {
            let (x, w) = (noise(rows * cols, 1), noise(cols / parts, 2));
            let mut want = vec![];
            for row in x.chunks(cols / parts) {
                let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
                let scale = 1.0 / (mean + 1e-3).sqrt();
                want.extend(row.iter().zip(&w).map(|(&x, &w)| (f64::from(x) * scale * f64::from(w)) as f32));
            }
            let x = Tensor::from_f32(&Device::Cpu, &[rows, cols], x).unwrap();
            let w = Tensor::from_f32(&Device::Cpu, &[cols / parts], w).unwrap();
            let y = rmsnorm(&x, &w, 1e-3).unwrap();
            assert_eq!(y.shape(), [rows, cols]);
            assert!(relative_error(y.f32s().unwrap(), &want) < 1e-6);
        }
    }
}

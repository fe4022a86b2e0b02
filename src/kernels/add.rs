//! Residual addition: x += y.

use super::parallel::for_chunks;
use super::simd::multiversion;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Elements per piece of parallel work; a piece and its result stay in the second-level cache.
const PIECE: usize = 1 << 14;

/// x += y, element by element; both f32 of one shape.
///
/// # Errors
/// [`Error::Internal`] when the shapes differ.
pub fn add_assign(x: &mut Tensor, y: &Tensor) -> Result<()> {
    if x.len() != y.len() || !x.device().same(y.device()) {
        return Err(Error::Internal(format!("add: {:?} and {:?}", x.shape(), y.shape())));
    }
    match x.device() {
        Device::Cpu => {
            let y = y.f32s()?;
            for_chunks(x.f32s_mut()?, PIECE, |piece, x| {
                let start = piece * PIECE;
                add(x, &y[start..start + x.len()]);
            });
            Ok(())
        }
        Device::Gpu(_) => Err(Error::Internal("add has no GPU kernel yet".into())),
    }
}

multiversion! {
    fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

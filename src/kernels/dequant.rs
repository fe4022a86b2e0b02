//! Weights from codes: ŵ[r][k] = scale[r][g]·(code[r][k] − zero[r][g]) with g = group_of[k].

use super::parallel::for_chunks;
use super::scales::Grid;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// `codes` u8 [rows, n], `group_of` u32 [n] → f32 [rows, n]. Exact: an f16 scale times a small
/// integer has at most 19 significant bits.
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn dequantize(codes: &Tensor, grid: &Grid, group_of: &Tensor) -> Result<Tensor> {
    let (rows, n) = (codes.rows(), codes.cols());
    if group_of.len() != n || grid.scales.rows() != rows {
        return Err(Error::Internal("dequant: shapes do not fit".into()));
    }
    let mut out = Tensor::uninit(codes.device(), Elem::F32, &[rows, n])?;
    match codes.device().clone() {
        Device::Cpu => {
            let (codes, group_of, groups) = (codes.u8s()?, group_of.u32s()?, grid.groups());
            let (scales, zeros) = (grid.scales.f32s()?, grid.zeros.f32s()?);
            for_chunks(out.f32s_mut()?, n, |row, out| {
                let codes = &codes[row * n..(row + 1) * n];
                for ((out, &code), &group) in out.iter_mut().zip(codes).zip(group_of) {
                    let at = row * groups + group as usize;
                    *out = scales[at] * (f32::from(code) - zeros[at]);
                }
            });
        }
        Device::Gpu(gpu) => gpu::dequantize(&gpu, codes, grid, group_of, &mut out)?,
    }
    Ok(out)
}

mod gpu {
    use super::*;
    use crate::device::Gpu;

    pub fn dequantize(
        _gpu: &Gpu,
        _codes: &Tensor,
        _grid: &Grid,
        _group_of: &Tensor,
        _out: &mut Tensor,
    ) -> Result<()> {
        Err(Error::Internal("dequant has no GPU kernel yet".into()))
    }
}

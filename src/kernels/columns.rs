//! Columns of a weight in another order, widened to f32: out[r][j] = w[r][columns[j]].

use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

/// In place of a column number: a column of zeros, for inputs that are never active.
pub const ZERO_COLUMN: u32 = u32::MAX;

/// `w` [rows, n] of f32, f16 or bf16, `columns` u32 [m] → f32 [rows, m].
///
/// # Errors
/// [`Error::Internal`] when `w` does not hold floats.
pub fn gather(w: &Tensor, columns: &Tensor) -> Result<Tensor> {
    let mut out = Tensor::uninit(w.device(), Elem::F32, &[w.rows(), columns.len()])?;
    match w.device().clone() {
        Device::Cpu => cpu(w, columns.u32s()?, &mut out)?,
        Device::Gpu(gpu) => gpu::gather(&gpu, w, columns, &mut out)?,
    }
    Ok(out)
}

fn cpu(w: &Tensor, columns: &[u32], out: &mut Tensor) -> Result<()> {
    let n = w.cols();
    if columns.iter().any(|&c| c != ZERO_COLUMN && c as usize >= n) {
        return Err(Error::Internal("columns: a column number is out of range".into()));
    }
    let out = out.f32s_mut()?;
    match w.host_data()? {
        Host::F32(v) => pick(out, columns, n, |at| v[at]),
        Host::F16(v) => pick(out, columns, n, |at| v[at].to_f32()),
        Host::BF16(v) => pick(out, columns, n, |at| v[at].to_f32()),
        Host::U32(_) | Host::U8(_) => return Err(Error::Internal("columns: not a weight".into())),
    }
    Ok(())
}

fn pick(out: &mut [f32], columns: &[u32], n: usize, at: impl Fn(usize) -> f32 + Sync) {
    for_chunks(out, columns.len(), |row, out| {
        for (out, &column) in out.iter_mut().zip(columns) {
            *out = if column == ZERO_COLUMN { 0.0 } else { at(row * n + column as usize) };
        }
    });
}

mod gpu {
    use super::*;
    use crate::device::Gpu;

    pub fn gather(_gpu: &Gpu, _w: &Tensor, _columns: &Tensor, _out: &mut Tensor) -> Result<()> {
        Err(Error::Internal("columns has no GPU kernel yet".into()))
    }
}

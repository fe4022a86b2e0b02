//! Weighted rows added to where they came from: out[ids[i]] += weights[i] · y[i], as the outputs of an expert
//! go back to the tokens that were routed to it.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// `out` [tokens, d] and `y` [rows, d] are f32; `ids` has one token a row, none twice, `weights` as many.
///
/// # Errors
/// [`Error::Internal`] when the shapes do not fit; [`Error::Unsupported`] for a d that is not a multiple of
/// 4 on a GPU.
pub fn add_rows(out: &mut Tensor, y: &Tensor, ids: &[u32], weights: &[f32]) -> Result<()> {
    let (tokens, cols) = (out.rows(), out.cols());
    let fits = y.cols() == cols
        && y.rows() == ids.len()
        && weights.len() == ids.len()
        && ids.iter().all(|&id| (id as usize) < tokens)
        && out.elem() == Elem::F32
        && y.elem() == Elem::F32
        && y.device().same(out.device());
    if !fits {
        let count = ids.len();
        return Err(Error::Internal(format!("scatter: {count} of {:?} to {:?}", y.shape(), out.shape())));
    }
    match out.device().clone() {
        Device::Cpu => {
            let (y, out) = (y.f32s()?, out.f32s_mut()?);
            for ((y, &id), weight) in y.chunks_exact(cols).zip(ids).zip(weights) {
                for (out, y) in out[id as usize * cols..][..cols].iter_mut().zip(y) {
                    *out += weight * y;
                }
            }
            Ok(())
        }
        Device::Gpu(gpu) => gpu::add_rows(&gpu, out, y, ids, weights),
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
    }

    const SCATTER: Kernel = Kernel {
        name: "scatter",
        source: include_str!("../../shaders/scatter.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&SCATTER, size_of::<Params>())];

    pub fn add_rows(gpu: &Gpu, out: &Tensor, y: &Tensor, ids: &[u32], weights: &[f32]) -> Result<()> {
        let row_quads = whole_quads("scatter", "row", y.cols(), 4)?;
        let params = Params { rows: y.rows() as u32, row_quads };
        let ids = Tensor::from_u32(y.device(), &[ids.len()], ids.to_vec())?;
        let weights = Tensor::from_f32(y.device(), &[weights.len()], weights.to_vec())?;
        gpu.dispatch(
            &SCATTER,
            &[],
            &[y.gpu()?, ids.gpu()?, weights.gpu()?, out.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((y.len() / 4).div_ceil(GROUP)),
            2.0 * y.len() as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    #[test]
    fn rows_are_added_where_they_came_from_on_both_devices() {
        let (tokens, cols) = (40, 12);
        let ids: Vec<u32> = (0..25).map(|i| (i * 7 + 3) % tokens).collect();
        let (y, weights, before) =
            (noise(ids.len() * cols, 1), noise(ids.len(), 2), noise(tokens as usize * cols, 3));
        let mut want = before.clone();
        for ((y, &id), weight) in y.chunks(cols).zip(&ids).zip(&weights) {
            for (want, y) in want[id as usize * cols..].iter_mut().zip(y) {
                *want += weight * y;
            }
        }
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let mut out = Tensor::from_f32(device, &[tokens as usize, cols], before.clone()).unwrap();
            let rows = Tensor::from_f32(device, &[ids.len(), cols], y.clone()).unwrap();
            add_rows(&mut out, &rows, &ids, &weights).unwrap();
            assert!(relative_error(&pollster::block_on(out.to_f32()).unwrap(), &want) < 1e-6);
            assert!(add_rows(&mut out, &rows, &ids[1..], &weights[1..]).is_err());
        }
    }
}

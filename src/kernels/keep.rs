//! Rows into a cache: keys or values of new tokens, rounded to what the cache holds.
//! [`super::append`] does it together with norm and rope.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

/// Rows `start..` of `cache` [capacity, width], of f32 or f16, become `x` [tokens, width] of f32.
///
/// # Errors
/// [`Error::Internal`] when they do not fit; [`Error::Unsupported`] for a width that is not a multiple of
/// 4 on a GPU.
pub fn keep(cache: &mut Tensor, x: &Tensor, start: usize) -> Result<()> {
    let width = x.cols();
    let fits = width == cache.cols()
        && start + x.rows() <= cache.rows()
        && x.elem() == Elem::F32
        && matches!(cache.elem(), Elem::F32 | Elem::F16)
        && x.device().same(cache.device());
    if !fits {
        return Err(Error::Internal(format!("keep: {:?} at {start} of {:?}", x.shape(), cache.shape())));
    }
    match x.device().clone() {
        Device::Cpu => {
            let (x, at) = (x.f32s()?, start * width);
            match cache.host_data_mut()? {
                Host::F32(cache) => cache[at..at + x.len()].copy_from_slice(x),
                Host::F16(cache) => {
                    let rows: &mut [f16] = &mut cache[at..at + x.len()];
                    rows.convert_from_f32_slice(x);
                }
                _ => return Err(Error::Internal("keep: a cache holds f32 or f16".into())),
            }
            Ok(())
        }
        Device::Gpu(gpu) => gpu::keep(&gpu, cache, x, start),
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
        quads: u32,
        start: u32,
    }

    const KEEP: Kernel = Kernel {
        name: "keep",
        source: include_str!("../../shaders/keep.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&KEEP, size_of::<Params>())];

    pub fn keep(gpu: &Gpu, cache: &Tensor, x: &Tensor, start: usize) -> Result<()> {
        let row_quads = whole_quads("keep", "row", x.cols(), 4)?;
        let params = Params { quads: row_quads * x.rows() as u32, start: row_quads * start as u32 };
        gpu.dispatch(
            &KEEP,
            &[("ELEM", cache.elem().shader_constant())],
            &[x.gpu()?, cache.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((params.quads as usize).div_ceil(GROUP)),
            x.len() as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    #[test]
    fn rows_go_where_they_belong_on_both_devices() {
        let (tokens, width, start, capacity) = (5, 12, 3, 10);
        let x = noise(tokens * width, 1);
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            for (elem, tolerance) in [(Elem::F32, 0.0), (Elem::F16, 6e-4)] {
                let mut cache = Tensor::zeros(device, elem, &[capacity, width]).unwrap();
                let rows = Tensor::from_f32(device, &[tokens, width], x.clone()).unwrap();
                keep(&mut cache, &rows, start).unwrap();
                let got = pollster::block_on(cache.to_f32()).unwrap();
                let (before, rest) = got.split_at(start * width);
                let (kept, after) = rest.split_at(x.len());
                assert!(before.iter().chain(after).all(|&x| x == 0.0), "other rows are left alone");
                assert!(relative_error(kept, &x) <= tolerance);
                assert!(keep(&mut cache, &rows, 6).is_err(), "a full cache is refused");
            }
        }
    }
}

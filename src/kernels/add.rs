//! Addition: x += y, the residual's, and x += scale·y.

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
    add_scaled(x, y, 1.0)
}

/// x += scale·y, element by element; both f32 of one shape.
///
/// # Errors
/// [`Error::Internal`] when the shapes differ.
pub fn add_scaled(x: &mut Tensor, y: &Tensor, scale: f32) -> Result<()> {
    if x.len() != y.len() || !x.device().same(y.device()) {
        return Err(Error::Internal(format!("add: {:?} and {:?}", x.shape(), y.shape())));
    }
    match x.device() {
        Device::Cpu => {
            let y = y.f32s()?;
            for_chunks(x.f32s_mut()?, PIECE, |piece, x| {
                let start = piece * PIECE;
                add(x, &y[start..start + x.len()], scale);
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::add(&gpu.clone(), x, y, scale),
    }
}

multiversion! {
    fn add(x: &mut [f32], y: &[f32], scale: f32) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += scale * y;
        }
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
        scale: f32,
    }

    const ADD: Kernel = Kernel {
        name: "add",
        source: include_str!("../../shaders/add.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&ADD, size_of::<Params>())];

    pub fn add(gpu: &Gpu, x: &Tensor, y: &Tensor, scale: f32) -> Result<()> {
        // The last quad may reach into the padding that every buffer has.
        let quads = x.len().div_ceil(4);
        gpu.dispatch(
            &ADD,
            &[],
            &[y.gpu()?, x.gpu()?],
            bytemuck::bytes_of(&Params { quads: quads as u32, scale }),
            gpu.unfold(quads.div_ceil(GROUP)),
            x.len() as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    fn run(device: &Device, len: usize, scale: f32) -> Vec<f32> {
        let mut x = Tensor::from_f32(device, &[len], noise(len, 1)).unwrap();
        let y = Tensor::from_f32(device, &[len], noise(len, 2)).unwrap();
        add_scaled(&mut x, &y, scale).unwrap();
        pollster::block_on(x.to_f32()).unwrap()
    }

    #[test]
    fn both_devices_add_to_the_last_element() {
        let devices = [Some(Device::Cpu), test_gpu()];
        for len in [1, 5, 64, 20_003] {
            // Powers of two are exact however a device adds.
            for scale in [1.0, -0.5] {
                let pairs = noise(len, 1).into_iter().zip(noise(len, 2));
                let want: Vec<f32> = pairs.map(|(x, y)| x + scale * y).collect();
                for device in devices.iter().flatten() {
                    assert_eq!(run(device, len, scale), want);
                }
            }
        }
    }

    #[test]
    fn shapes_that_differ_are_refused() {
        let mut x = Tensor::from_f32(&Device::Cpu, &[3], noise(3, 1)).unwrap();
        let y = Tensor::from_f32(&Device::Cpu, &[4], noise(4, 1)).unwrap();
        assert!(add_assign(&mut x, &y).is_err());
    }
}

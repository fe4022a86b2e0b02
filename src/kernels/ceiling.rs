//! What a device can do at best, to hold kernels against: a copy, and multiplications and additions
//! that need no memory.

use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Elements that a GPU's workgroup takes: tensors hold a multiple of it.
pub const BLOCK: usize = 1024;

const FACTOR: f32 = 0.999;
const SUMMAND: f32 = 0.001;

/// y = x for 0 steps, otherwise `steps` times v ↦ v·0.999 + 0.001 on each element.
///
/// # Errors
/// [`Error::Internal`] when the lengths differ or are no multiple of [`BLOCK`].
pub fn ceiling(y: &mut Tensor, x: &Tensor, steps: usize) -> Result<()> {
    if x.len() != y.len() || !x.len().is_multiple_of(BLOCK) || !x.device().same(y.device()) {
        return Err(Error::Internal(format!("ceiling: {:?} and {:?}", x.shape(), y.shape())));
    }
    match x.device() {
        Device::Cpu => {
            let x = x.f32s()?;
            for_chunks(y.f32s_mut()?, 16 * BLOCK, |piece, y| {
                y.copy_from_slice(&x[piece * 16 * BLOCK..][..y.len()]);
                if steps > 0 {
                    multiply(y, steps);
                }
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::ceiling(gpu, y, x, steps),
    }
}

/// Elements that stay in registers.
const HELD: usize = 128;

fn multiply(values: &mut [f32], steps: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(values: &mut [f32], steps: usize) {
            held(values, steps, |v| v.mul_add(FACTOR, SUMMAND));
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(values: &mut [f32], steps: usize) {
            held(values, steps, |v| v.mul_add(FACTOR, SUMMAND));
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has what the function was compiled for.
            return unsafe { avx512(values, steps) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: as above.
            return unsafe { avx2(values, steps) };
        }
    }
    held(values, steps, |v| v * FACTOR + SUMMAND);
}

#[inline(always)]
fn held(values: &mut [f32], steps: usize, step: impl Fn(f32) -> f32) {
    for values in values.chunks_exact_mut(HELD) {
        let mut held = [0f32; HELD];
        held.copy_from_slice(values);
        for _ in 0..steps {
            for value in &mut held {
                *value = step(*value);
            }
        }
        values.copy_from_slice(&held);
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        factor: f32,
        summand: f32,
        quads: u32,
    }

    const CEILING: Kernel = Kernel {
        name: "ceiling",
        source: include_str!("../../shaders/ceiling.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&CEILING, size_of::<Params>())];

    pub fn ceiling(gpu: &Gpu, y: &Tensor, x: &Tensor, steps: usize) -> Result<()> {
        let params = Params { factor: FACTOR, summand: SUMMAND, quads: (x.len() / 4) as u32 };
        gpu.dispatch(
            &CEILING,
            &[("STEPS", steps as f64)],
            &[x.gpu()?, y.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold(x.len() / BLOCK),
            2.0 * (x.len() * steps.max(1)) as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};
    use crate::tensor::Elem;

    #[test]
    fn both_devices_copy_and_take_every_step() {
        let x = noise(3 * BLOCK, 1);
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let tensor = Tensor::from_f32(device, &[x.len()], x.clone()).unwrap();
            let mut y = Tensor::uninit(device, Elem::F32, &[x.len()]).unwrap();
            ceiling(&mut y, &tensor, 0).unwrap();
            assert_eq!(pollster::block_on(y.to_f32()).unwrap(), x);
            ceiling(&mut y, &tensor, 20).unwrap();
            let want: Vec<f32> =
                x.iter().map(|&x| (0..20).fold(x, |v, _| v.mul_add(FACTOR, SUMMAND))).collect();
            assert!(relative_error(&pollster::block_on(y.to_f32()).unwrap(), &want) < 1e-5);
            assert!(ceiling(&mut y, &Tensor::zeros(device, Elem::F32, &[BLOCK]).unwrap(), 0).is_err());
        }
    }
}

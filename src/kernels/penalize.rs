//! The repetition penalty of Keskar et al. 2019 (arXiv 1909.05858), as Transformers applies it: logits of
//! tokens that occurred are divided by it where positive, multiplied where not.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Changes the `logits` [vocab] (f32) of `ids`, each of which must occur once.
///
/// # Errors
/// [`Error::Internal`] when an id is not below vocab.
pub fn penalize(logits: &mut Tensor, ids: &[u32], penalty: f32) -> Result<()> {
    if ids.iter().any(|&id| id as usize >= logits.len()) || logits.elem() != Elem::F32 {
        return Err(Error::Internal(format!("penalize: ids beyond the logits {:?}", logits.shape())));
    }
    if ids.is_empty() {
        return Ok(());
    }
    if let Device::Gpu(gpu) = logits.device() {
        return gpu::penalize(gpu, logits, ids, penalty);
    }
    let logits = logits.f32s_mut()?;
    for &id in ids {
        let logit = &mut logits[id as usize];
        *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    }
    Ok(())
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
        count: u32,
        penalty: f32,
    }

    const PENALIZE: Kernel = Kernel {
        name: "penalize",
        source: include_str!("../../shaders/penalize.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&PENALIZE, size_of::<Params>())];

    pub fn penalize(gpu: &Gpu, logits: &Tensor, ids: &[u32], penalty: f32) -> Result<()> {
        let list = Tensor::from_u32(logits.device(), &[ids.len()], ids.to_vec())?;
        let params = Params { count: ids.len() as u32, penalty };
        gpu.dispatch(
            &PENALIZE,
            &[],
            &[list.gpu()?, logits.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold(ids.len().div_ceil(GROUP)),
            4.0 * ids.len() as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::test_gpu;

    #[test]
    fn what_occurred_becomes_less_likely_and_the_rest_stays() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let values = vec![2.0, -2.0, 0.0, 3.0, -4.0];
            let mut logits = Tensor::from_f32(device, &[5], values).unwrap();
            penalize(&mut logits, &[4, 0, 2], 2.0).unwrap();
            let got = pollster::block_on(logits.to_f32()).unwrap();
            assert_eq!(got, [1.0, -2.0, 0.0, 3.0, -8.0]);
            assert!(penalize(&mut logits, &[5], 2.0).is_err());
        }
    }
}

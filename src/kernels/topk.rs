//! The most likely tokens of a row of logits, found where the logits are.

use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;

/// The `k` largest of `logits` [vocab] (f32) with their ids, in falling order; of equal ones the smaller
/// id comes first. All of them when there are no more than `k`.
///
/// # Errors
/// [`Error::Device`] when the device fails.
pub async fn topk(logits: &Tensor, k: usize) -> Result<Vec<(f32, u32)>> {
    let k = k.min(logits.len());
    if k == 0 {
        return Ok(vec![]);
    }
    match logits.device() {
        Device::Cpu => Ok(cpu(logits.f32s()?, k)),
        Device::Gpu(gpu) => {
            let found = gpu::topk(gpu, logits, k)?.to_u32().await?;
            Ok(found.chunks_exact(2).take(k).map(|pair| (f32::from_bits(pair[0]), pair[1])).collect())
        }
    }
}

/// A whole number that rises with the float: a total order.
fn rising(x: f32) -> u32 {
    let bits = x.to_bits();
    bits ^ if bits >> 31 == 0 { 1 << 31 } else { u32::MAX }
}

fn cpu(logits: &[f32], k: usize) -> Vec<(f32, u32)> {
    // Falling logits, then rising ids.
    let order = |&(x, id): &(f32, u32)| (std::cmp::Reverse(rising(x)), id);
    let mut kept: Vec<(f32, u32)> = Vec::with_capacity(2 * k);
    // What a logit must exceed to be among the k; later ones lose a tie.
    let mut floor = None;
    for (id, &x) in logits.iter().enumerate() {
        if floor.is_some_and(|floor| rising(x) <= floor) {
            continue;
        }
        kept.push((x, id as u32));
        if kept.len() == 2 * k {
            kept.select_nth_unstable_by_key(k - 1, order);
            kept.truncate(k);
            floor = Some(rising(kept[k - 1].0));
        }
    }
    kept.sort_unstable_by_key(order);
    kept.truncate(k);
    kept
}

pub use gpu::KERNELS;

mod gpu {
    use std::rc::Rc;

    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::GROUP;
    use crate::kernels::registry::Registered;
    use crate::tensor::Elem;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        count: u32,
        piece: u32,
        k: u32,
    }

    const TOPK: Kernel = Kernel {
        name: "topk",
        source: include_str!("../../shaders/topk.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&TOPK, size_of::<Params>())];

    /// Pairs of u32, the first k of which count.
    pub fn topk(gpu: &Rc<Gpu>, logits: &Tensor, k: usize) -> Result<Tensor> {
        // Each round leaves an eighth or less.
        let piece = (8 * k).next_multiple_of(GROUP).max(512);
        let mut count = logits.len();
        let mut found: Option<Tensor> = None;
        loop {
            let pieces = count.div_ceil(piece);
            let kept = (pieces - 1) * k + k.min(count - (pieces - 1) * piece);
            let result = Tensor::uninit(logits.device(), Elem::U32, &[kept, 2])?;
            let params = Params { count: count as u32, piece: piece as u32, k: k as u32 };
            gpu.dispatch(
                &TOPK,
                &[("FIRST", f64::from(u8::from(found.is_none())))],
                &[found.as_ref().unwrap_or(logits).gpu()?, result.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold(count.div_ceil(GROUP)),
                4.0 * (count * piece.min(count)) as f64,
            )?;
            if pieces == 1 {
                return Ok(result);
            }
            (count, found) = (kept, Some(result));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    fn sorted(values: &[f32]) -> Vec<(f32, u32)> {
        let mut all: Vec<(f32, u32)> = values.iter().zip(0..).map(|(&x, id)| (x, id)).collect();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        all
    }

    #[test]
    fn both_devices_agree_with_sorting() {
        let gpu = test_gpu();
        for (len, k) in
            [(1, 1), (5, 9), (64, 64), (513, 50), (5000, 1), (5000, 256), (49_152, 64), (9001, 40)]
        {
            // Coarse numbers make ties.
            let values: Vec<f32> = noise(len, len as u64).iter().map(|x| (x * 40.0).round() / 4.0).collect();
            let mut want = sorted(&values);
            want.truncate(k);
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let logits = Tensor::from_f32(device, &[len], values.clone()).unwrap();
                let got = pollster::block_on(topk(&logits, k)).unwrap();
                assert_eq!(got, want, "{k} of {len} on {}", device.describe());
            }
        }
    }

    #[test]
    fn one_value_for_all_and_falling_ones_are_found_too() {
        let gpu = test_gpu();
        for values in
            [vec![2.5; 2000], (0..2000).map(|i| -(i as f32)).collect(), (0..2000).map(|i| i as f32).collect()]
        {
            let mut want = sorted(&values);
            want.truncate(7);
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let logits = Tensor::from_f32(device, &[2000], values.clone()).unwrap();
                assert_eq!(pollster::block_on(topk(&logits, 7)).unwrap(), want);
            }
        }
    }
}

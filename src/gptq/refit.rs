//! Scales fitted once more, to the codes that a sweep has chosen.

use crate::error::Result;
use crate::gptq::factor::Factor;
use crate::gptq::layer::Prepared;
use crate::gptq::rounding::Rounded;
use crate::kernels::add::add_scaled;
use crate::kernels::columns::gather;
use crate::kernels::dequant::dequantize;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::refit::{Group, refit};
use crate::kernels::scales::Grid;
use crate::kernels::symmetric::{PANEL, SymmetricPanels, reordered};
use crate::tensor::{Elem, Tensor};

/// Scales fitted to the codes of `from`, so that ‖(target − Ŵ)·L‖² is least; a pass over the groups.
///
/// # Errors
/// Those of the device.
pub async fn refitted(
    prepared: &Prepared,
    factor: &Factor,
    h: &SymmetricPanels,
    target: &Tensor,
    from: &Rounded,
) -> Result<Grid> {
    let device = target.device();
    let (n, group) = (prepared.n, prepared.scheme.group_len(prepared.n));
    let mut ones = Grid::new(device, target.rows(), from.grid.groups())?;
    let count = ones.scales.len();
    ones.scales = Tensor::from_f32(device, ones.scales.shape(), vec![1.0; count])?;
    ones.zeros = Tensor::from_f32(device, ones.zeros.shape(), from.grid.zeros.to_f32().await?)?;
    let units = dequantize(&from.codes, &ones, &prepared.group_of)?;
    let mut errors = gather(target, &prepared.natural)?;
    add_scaled(&mut errors, &from.dequantized, -1.0)?;
    let mut scales = Tensor::from_f32(device, ones.scales.shape(), from.grid.scales.to_f32().await?)?;
    let order = Tensor::from_u32(device, &[n], (0..n as u32).collect())?;
    let damped = factor.diagonal.iter().map(|&d| d + factor.lambda).collect();
    let damped = Tensor::from_f32(device, &[n], damped)?;
    let rows = target.rows();
    for (index, c0) in (0..n).step_by(group).enumerate() {
        let width = group.min(n - c0);
        // Rows c0.. of these columns; what is above them lies across in the panels before.
        let below = reordered(h, &order, &damped, c0, c0 + width)?;
        let mut pull = Tensor::uninit(device, Elem::F32, &[rows, width])?;
        let right = Mat::of(&errors).part(0, c0, rows, n - c0);
        gemm(Target::of(&mut pull), right, Mat::of(&below), Scaling::SET, None)?;
        for (p, panel) in h.panels.iter().enumerate() {
            let first = p * PANEL;
            let columns = panel.cols().min(c0.saturating_sub(first));
            if columns > 0 {
                let left = Mat::of(&errors).part(0, first, rows, columns);
                let across = Mat::of(panel).part(c0 - first, 0, width, columns).t();
                gemm(Target::of(&mut pull), left, across, Scaling::ADD, None)?;
            }
        }
        let mut push = Tensor::uninit(device, Elem::F32, &[rows, width])?;
        let own = Mat::of(&units).part(0, c0, rows, width);
        gemm(Target::of(&mut push), own, Mat::of(&below).part(0, 0, width, width), Scaling::SET, None)?;
        let group = Group { pull: &pull, push: &push, units: &units, c0, index };
        refit(group, prepared.kind.scale_type, &mut scales, &mut errors)?;
    }
    Ok(Grid { scales, zeros: ones.zeros })
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::device::Device;
    use crate::gptq::layer::{Calibration, prepare};
    use crate::gptq::rounding::swept;
    use crate::gptq::scheme::{Preset, Scheme};
    use crate::kernels::scales::ScaleType;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    /// tr(E·(H + λI)·Eᵀ) of the same codes with old and new scales, in f64, and the new scales.
    fn losses(device: &Device, n: usize, group: usize) -> ([f64; 2], Vec<f32>) {
        let (rows, tokens) = (20, 900);
        let values = noise(tokens * n, 1);
        let mix = |i: usize| values[i] + 0.8 * values[i / n * n + (i * 7) % n];
        let x: Vec<f32> = (0..tokens * n).map(mix).collect();
        let tensor = |count, values: Vec<f32>| Tensor::from_f32(device, &[count, n], values).unwrap();
        let mut hessian = SymmetricPanels::zeros(device, n).unwrap();
        let scale = 2.0 / tokens as f32;
        hessian.accumulate(&tensor(tokens, x.clone()), scale).unwrap();
        let weight = noise(rows * n, 3);
        let scheme = Scheme { refit: true, ..Scheme::preset(Preset::Default, 3, Some(group)) };
        pollster::block_on(async {
            let calibration = Calibration::from(Rc::new(hessian));
            let prepared =
                prepare(&scheme, ScaleType::F16, device, n, Some(calibration), "test").await.unwrap();
            let target = tensor(rows, weight.clone());
            let before = swept(&prepared, &target, None).await.unwrap();
            let (factor, h) = (prepared.factor.as_ref().unwrap(), prepared.hessian.as_ref().unwrap());
            let grid = refitted(&prepared, factor, h, &target, &before).await.unwrap();
            let after = dequantize(&before.codes, &grid, &prepared.group_of).unwrap();
            let mut found = vec![];
            for dequantized in [&before.dequantized, &after] {
                let e: Vec<f64> = dequantized
                    .to_f32()
                    .await
                    .unwrap()
                    .iter()
                    .zip(&weight)
                    .map(|(q, w)| f64::from(*w) - f64::from(*q))
                    .collect();
                let outputs = e.chunks(n).flat_map(|e| {
                    x.chunks(n).map(move |x| e.iter().zip(x).map(|(e, x)| e * f64::from(*x)).sum::<f64>())
                });
                let squares: f64 = outputs.map(|y| y * y).sum();
                found.push(
                    squares * f64::from(scale)
                        + f64::from(factor.lambda) * e.iter().map(|e| e * e).sum::<f64>(),
                );
            }
            ([found[0], found[1]], grid.scales.to_f32().await.unwrap())
        })
    }

    /// Over more than one panel of H, too.
    #[test]
    fn the_same_codes_lose_less_with_refitted_scales() {
        let gpu = test_gpu();
        for (n, group) in [(96, 32), (640, 128), (96, 96)] {
            let ([before, after], scales) = losses(&Device::Cpu, n, group);
            assert!(after < 0.999 * before, "{n}: {after}, not below {before}");
            if let (Some(gpu), 96) = (&gpu, n) {
                let (found, others) = losses(gpu, n, group);
                assert!((found[1] / after - 1.0).abs() < 0.02, "{found:?}, {after}");
                assert!(relative_error(&others, &scales) < 0.05);
            }
        }
    }
}

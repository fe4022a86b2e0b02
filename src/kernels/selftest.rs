//! What an adapter must get right before it is trusted: small operations against their CPU twins.
//!
//! Drivers and browsers that compute wrong numbers without an error do exist, and the checkpoint
//! they would write looks like any other. So each device is asked a few questions when it is
//! opened, and one that answers wrongly is refused.

use std::future::Future;
use std::pin::Pin;

use half::bf16;

use super::cholesky::factor_diagonal;
use super::dequant::dequantize;
use super::gemm::{self, Mat, Scaling, Target};
use super::scales::Grid;
use super::sweep::{Block, sweep};
use crate::device::{AdapterChoice, Device, Gpu, GpuOptions, pick_adapter};
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// One operation on fixed inputs, on whatever device is given.
type Check = for<'a> fn(&'a Device) -> Pin<Box<dyn Future<Output = Result<Vec<f32>>> + 'a>>;

/// Name of the step, the operation, and the largest difference from the CPU twin that is allowed,
/// relative to the largest value. To add a step write such a function and list it here.
const CHECKS: &[(&str, Check, f32)] = &[
    ("gemm (A·Bᵀ, bf16 weights)", |device| Box::pin(product(device, false, true)), 1e-4),
    ("gemm (A·B, bf16 weights)", |device| Box::pin(product(device, false, false)), 1e-4),
    ("gemm (Aᵀ·B, bf16 weights)", |device| Box::pin(product(device, true, false)), 1e-4),
    ("cholesky (factor and inverse)", |device| Box::pin(factored(device)), 1e-3),
    ("sweep and dequant", |device| Box::pin(quantized(device)), 1e-4),
];

/// Opens the adapter that `choice` means, measures it, and checks it.
///
/// # Errors
/// [`Error::Device`] when there is none, the driver refuses it, or it computes wrongly.
pub async fn open_gpu(choice: &AdapterChoice, options: &GpuOptions) -> Result<Device> {
    let adapter = pick_adapter(choice).await?;
    let device = Device::Gpu(Gpu::open(&adapter, options).await?);
    gemm::tune(&device).await?;
    self_test(&device).await?;
    Ok(device)
}

/// Compares `device` with the CPU on every check.
///
/// # Errors
/// [`Error::Device`] naming the step that differs.
pub async fn self_test(device: &Device) -> Result<()> {
    run(CHECKS, device).await
}

async fn run(checks: &[(&str, Check, f32)], device: &Device) -> Result<()> {
    for (step, check, tolerance) in checks {
        let want = check(&Device::Cpu).await?;
        let refused = |problem: String| {
            Error::device(
                format!("refused: self-test of {step} failed on {}", device.describe()),
                problem,
                "Update the graphics driver, choose another adapter, or use the CPU device",
            )
        };
        let got = check(device).await.map_err(|error| refused(error.to_string()))?;
        let error = difference(&got, &want);
        if error > *tolerance {
            return Err(refused(format!("results differ from the CPU's by {error:.1e} of their size")));
        }
    }
    Ok(())
}

/// The largest difference relative to the largest wanted value; infinite for what is not a number.
fn difference(got: &[f32], want: &[f32]) -> f32 {
    let largest = want.iter().fold(f32::MIN_POSITIVE, |max, x| max.max(x.abs()));
    let pairs = got.iter().zip(want).map(|(got, want)| (got - want).abs() / largest);
    let worst = pairs.fold(0f32, |max, x| if x.is_finite() { max.max(x) } else { f32::INFINITY });
    if got.len() == want.len() { worst } else { f32::INFINITY }
}

/// Numbers in −1..1 that all bf16 hold exactly.
fn numbers(count: usize) -> Vec<bf16> {
    (0..count as u32)
        .map(|i| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 25) as f32 / 64.0 - 1.0))
        .collect()
}

/// A product that has edges in every direction, added to something, with a bias.
async fn product(device: &Device, a_transposed: bool, b_transposed: bool) -> Result<Vec<f32>> {
    let (m, n, k) = (44, 76, 52);
    let shape = |swap: bool, rows, cols| if swap { [cols, rows] } else { [rows, cols] };
    let wide = |count| numbers(count).into_iter().map(f32::from).collect::<Vec<f32>>();
    let a = Tensor::from_f32(device, &shape(a_transposed, m, k), wide(m * k))?;
    let b = numbers(n * k);
    let b = Tensor::from_bytes(device, Elem::BF16, &shape(b_transposed, k, n), bytemuck::cast_slice(&b))?;
    let bias = Tensor::from_f32(device, &[n], wide(n))?;
    let mut c = Tensor::from_f32(device, &[m, n], wide(m * n))?;
    let a = if a_transposed { Mat::of(&a).t() } else { Mat::of(&a) };
    let b = if b_transposed { Mat::of(&b).t() } else { Mat::of(&b) };
    gemm::gemm(Target::of(&mut c), a, b, Scaling { alpha: 0.5, beta: -1.0 }, Some(&bias))?;
    c.to_f32().await
}

/// The factor and the inverse of a well-conditioned block, one after the other.
async fn factored(device: &Device) -> Result<Vec<f32>> {
    let n = 60;
    let entry = |i: usize, j: usize| if i == j { 4.0 } else { 1.0 / (1.0 + i.abs_diff(j) as f32) };
    let values = (0..n * n).map(|at| entry(at / n, at % n)).collect();
    let block = Tensor::from_f32(device, &[n, n], values)?;
    let mut status = Tensor::zeros(device, Elem::U32, &[1])?;
    let (factor, inverse) = factor_diagonal(&block, &mut status)?;
    let mut results = factor.to_f32().await?;
    results.extend(inverse.to_f32().await?);
    results.push(status.to_u32().await?[0] as f32);
    Ok(results)
}

/// A sweep over one block with errors spread, and the weights that its codes stand for. Every weight
/// is a quarter of a step away from a tie, and errors are spread so thinly that it stays there.
async fn quantized(device: &Device) -> Result<Vec<f32>> {
    let (rows, n) = (20, 32);
    let step = |at: usize| (at * 7 % 13) as f32 - 6.0 + if at % 2 == 0 { 0.25 } else { -0.25 };
    let mut w = Tensor::from_f32(device, &[rows, n], (0..rows * n).map(|at| 0.125 * step(at)).collect())?;
    let spread = |i: usize, j: usize| match i {
        _ if i == j => 1.0,
        _ if i > j => 0.001,
        _ => 0.0,
    };
    let inverse = (0..n * n).map(|at| spread(at / n, at % n)).collect();
    let inverse = Tensor::from_f32(device, &[n, n], inverse)?;
    let grid = Grid {
        scales: Tensor::from_f32(device, &[rows, 1], vec![0.125; rows])?,
        zeros: Tensor::from_f32(device, &[rows, 1], vec![8.0; rows])?,
    };
    let columns = Tensor::from_u32(device, &[n, 2], (0..n as u32).flat_map(|column| [column, 0]).collect())?;
    let mut codes = Tensor::zeros(device, Elem::U8, &[rows, n])?;
    let mut loss = Tensor::zeros(device, Elem::F32, &[rows])?;
    let block = Block {
        start: 0,
        compensation: None,
        inverse: Some(&inverse),
        width: n,
        columns: &columns,
        maxq: 15.0,
    };
    sweep(&mut w, block, &grid, &mut codes, &mut loss)?;
    let group_of = Tensor::from_u32(device, &[n], vec![0; n])?;
    let mut results = dequantize(&codes, &grid, &group_of)?.to_f32().await?;
    results.extend(w.to_f32().await?);
    results.extend(loss.to_f32().await?);
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::test_gpu;

    #[test]
    fn a_sound_device_passes() {
        pollster::block_on(self_test(&Device::Cpu)).unwrap();
        let Some(device) = test_gpu() else { return };
        pollster::block_on(self_test(&device)).unwrap();
    }

    #[test]
    fn a_device_that_computes_wrongly_or_fails_is_refused_by_name() {
        let Some(device) = test_gpu() else { return };
        let wrong: Check =
            |device| Box::pin(async { Ok(vec![1.0, if device.is_cpu() { 2.0 } else { 2.1 }]) });
        let failing: Check = |device| {
            Box::pin(async {
                if device.is_cpu() { Ok(vec![]) } else { Err(Error::device("a", "lost", "b")) }
            })
        };
        for (check, reason) in [(wrong, "differ"), (failing, "lost")] {
            let error = pollster::block_on(run(&[("adding", check, 1e-4)], &device)).unwrap_err();
            assert!(matches!(error, Error::Device { .. }));
            let text = error.to_string();
            let step = format!("refused: self-test of adding failed on {}", device.describe());
            assert!(text.starts_with(&step) && text.contains(reason), "{text}");
        }
    }

    #[test]
    fn what_differs_is_noticed() {
        assert_eq!(difference(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert_eq!(difference(&[1.0, 2.5], &[1.0, 2.0]), 0.25);
        assert_eq!(difference(&[1.0, f32::NAN], &[1.0, 2.0]), f32::INFINITY);
        assert_eq!(difference(&[1.0], &[1.0, 2.0]), f32::INFINITY);
    }

    #[test]
    fn a_device_is_opened_measured_and_checked() {
        let Some(test_device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &test_device else { return };
        let choice = AdapterChoice { name: Some(gpu.summary().name.clone()), allow_software: true };
        let device = pollster::block_on(open_gpu(&choice, &GpuOptions { default_limits: true })).unwrap();
        assert_eq!(device.describe(), test_device.describe());
        let none = AdapterChoice { name: Some("no such adapter".into()), allow_software: true };
        assert!(pollster::block_on(open_gpu(&none, &GpuOptions::default())).is_err());
    }
}

//! Scales by least squares, with the codes as they are.
//!
//! The loss tr(E·H·Eᵀ), E = W − Ŵ, is a parabola in the scale s of a group g of a row. With the group's
//! codes less their zero point, q, its lowest point is at
//!
//! ```text
//! s + (E·H_{:,g})·q / (q·H_gg)·q
//! ```
//!
//! One group after another, each on what the others left, is a descent by coordinates.

use super::parallel::for_chunks;
use super::scales::{ScaleType, round_scales};
use super::simd::multiversion;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// One group of all rows.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// q·H_gg, f32 [rows, width].
    pub push: &'a Tensor,
    /// q of all groups, f32 [rows, n].
    pub units: &'a Tensor,
    /// The group's first column.
    pub c0: usize,
    /// Its number among the scales.
    pub index: usize,
}

/// The largest finite f16.
const LARGEST: f32 = 65504.0;

/// Moves the group's scales, f32 [rows, groups], to the lowest point, rounded to what the file stores,
/// and `errors` E, f32 [rows, n], with them. `pull` is (E·H)_{:,g}, f32 [rows, width], and follows. A scale
/// whose sign would change stays.
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn refit(
    group: Group,
    scale_type: ScaleType,
    pull: &mut Tensor,
    scales: &mut Tensor,
    errors: &mut Tensor,
) -> Result<()> {
    let (rows, n, width) = (errors.rows(), errors.cols(), pull.cols());
    let fits = group.units.shape() == errors.shape()
        && pull.rows() == rows
        && group.push.shape() == pull.shape()
        && group.c0 + width <= n
        && scales.rows() == rows
        && group.index < scales.cols();
    if !fits {
        return Err(Error::Internal("refit: shapes do not fit".into()));
    }
    match errors.device().clone() {
        Device::Cpu => cpu(group, scale_type, pull, scales, errors),
        Device::Gpu(gpu) => gpu::refit(&gpu, group, scale_type, pull, scales, errors),
    }
}

fn cpu(
    group: Group,
    scale_type: ScaleType,
    pull: &mut Tensor,
    scales: &mut Tensor,
    errors: &mut Tensor,
) -> Result<()> {
    let Group { push, units, c0, index } = group;
    let (n, width, groups) = (errors.cols(), pull.cols(), scales.cols());
    let (push, units) = (push.f32s()?, units.f32s()?);
    let mut rows: Vec<Row> = pull
        .f32s_mut()?
        .chunks_mut(width)
        .zip(errors.f32s_mut()?.chunks_mut(n))
        .zip(scales.f32s_mut()?.iter_mut().skip(index).step_by(groups))
        .map(|((pull, errors), scale)| Row { pull, errors: &mut errors[c0..c0 + width], scale })
        .collect();
    for_chunks(&mut rows, 1, |row, slice| {
        let Row { pull, errors, scale } = &mut slice[0];
        let (push, units) = (&push[row * width..][..width], &units[row * n + c0..][..width]);
        let below = dot(push, units);
        let best = **scale + dot(pull, units) / below;
        if !(below > 0.0 && best * scale.signum() > 0.0 && best.abs() <= LARGEST) {
            return;
        }
        let mut new = [best.abs()];
        round_scales(scale_type, &mut new);
        let new = new[0] * scale.signum();
        follow(**scale - new, push, units, pull, errors);
        **scale = new;
    });
    Ok(())
}

struct Row<'a> {
    pull: &'a mut [f32],
    errors: &'a mut [f32],
    scale: &'a mut f32,
}

multiversion! {
    fn follow(moved: f32, push: &[f32], units: &[f32], pull: &mut [f32], errors: &mut [f32]) {
        for (error, unit) in errors.iter_mut().zip(units) {
            *error += moved * unit;
        }
        for (pull, push) in pull.iter_mut().zip(push) {
            *pull += moved * push;
        }
    }
}

multiversion! {
    fn dot(x: &[f32], y: &[f32]) -> f32 {
        const LANES: usize = 16;
        let mut sums = [0f32; LANES];
        for (x, y) in x.chunks(LANES).zip(y.chunks(LANES)) {
            for (sum, (x, y)) in sums.iter_mut().zip(x.iter().zip(y)) {
                *sum += x * y;
            }
        }
        sums.iter().sum()
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{ELEMENT, GROUP, ranges};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        n: u32,
        c0: u32,
        width: u32,
        groups: u32,
        group: u32,
        first: u32,
        end: u32,
    }

    const REFIT: Kernel = Kernel {
        name: "refit",
        source: include_str!("../../shaders/refit.wgsl"),
        bindings: &[Access::ReadWrite, Access::Read, Access::Read, Access::ReadWrite, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&REFIT, size_of::<Params>())];

    pub fn refit(
        gpu: &Gpu,
        group: Group,
        scale_type: ScaleType,
        pull: &mut Tensor,
        scales: &mut Tensor,
        errors: &mut Tensor,
    ) -> Result<()> {
        let width = pull.cols();
        let cost = 2.0 * ELEMENT * width as f64;
        for rows in ranges(gpu, errors.rows(), cost) {
            let params = Params {
                n: errors.cols() as u32,
                c0: group.c0 as u32,
                width: width as u32,
                groups: scales.cols() as u32,
                group: group.index as u32,
                first: rows.start as u32,
                end: rows.end as u32,
            };
            gpu.dispatch(
                &REFIT,
                &[("STORED", scale_type.shader_constant())],
                &[pull.gpu()?, group.push.gpu()?, group.units.gpu()?, scales.gpu()?, errors.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold(rows.len().div_ceil(GROUP)),
                cost * rows.len() as f64,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    const ROWS: usize = 70;
    const N: usize = 40;
    const C0: usize = 16;
    const WIDTH: usize = 13;
    const GROUPS: usize = 3;

    struct Case {
        pull: Vec<f32>,
        push: Vec<f32>,
        units: Vec<f32>,
        scales: Vec<f32>,
        errors: Vec<f32>,
    }

    fn case() -> Case {
        let mut units: Vec<f32> = noise(ROWS * N, 1).iter().map(|x| (7.0 * x).round()).collect();
        // A group of nothing but zero points.
        units[N..2 * N].fill(0.0);
        let unit = |i: usize| units[i / WIDTH * N + C0 + i % WIDTH];
        let push = noise(ROWS * WIDTH, 3).iter().enumerate().map(|(i, x)| unit(i) * (1.5 + x)).collect();
        let mut scales: Vec<f32> =
            noise(ROWS * GROUPS, 2).iter().map(|x| half::f16::from_f32(*x).to_f32()).collect();
        // Most of these would change their sign.
        scales.iter_mut().skip(30 * GROUPS).for_each(|scale| *scale *= 0.01);
        Case { pull: noise(ROWS * WIDTH, 4), push, units, scales, errors: noise(ROWS * N, 5) }
    }

    /// Scales, errors and pull after group 1, columns 16 to 29, was refitted.
    fn run(device: &Device, scale_type: ScaleType) -> [Vec<f32>; 3] {
        let case = case();
        let tensor =
            |values: Vec<f32>| Tensor::from_f32(device, &[ROWS, values.len() / ROWS], values).unwrap();
        let (mut pull, push, units) = (tensor(case.pull), tensor(case.push), tensor(case.units));
        let (mut scales, mut errors) = (tensor(case.scales), tensor(case.errors));
        let group = Group { push: &push, units: &units, c0: C0, index: 1 };
        refit(group, scale_type, &mut pull, &mut scales, &mut errors).unwrap();
        [scales, errors, pull].map(|t| pollster::block_on(t.to_f32()).unwrap())
    }

    #[test]
    fn scales_go_to_the_lowest_point_unless_their_sign_would_change() {
        let Case { pull, push, units, scales, errors } = case();
        let [new_scales, new_errors, new_pull] = run(&Device::Cpu, ScaleType::F32);
        let (mut moved, mut kept) = (0, 0);
        for row in 0..ROWS {
            let units = &units[row * N + C0..][..WIDTH];
            let sum = |x: &[f32]| -> f64 {
                let x = &x[row * WIDTH..][..WIDTH];
                x.iter().zip(units).map(|(&x, &q)| f64::from(x) * f64::from(q)).sum()
            };
            let old = f64::from(scales[row * GROUPS + 1]);
            let best = old + sum(&pull) / sum(&push);
            let want = if best.is_finite() && best * old > 0.0 { best } else { old };
            (moved, kept) = (moved + usize::from(want != old), kept + usize::from(want == old));
            assert!((f64::from(new_scales[row * GROUPS + 1]) - want).abs() < 1e-5);
            for other in [0, 2] {
                assert_eq!(new_scales[row * GROUPS + other], scales[row * GROUPS + other]);
            }
            for (i, new) in new_pull[row * WIDTH..][..WIDTH].iter().enumerate() {
                let want = f64::from(pull[row * WIDTH + i]) + (old - want) * f64::from(push[row * WIDTH + i]);
                assert!((f64::from(*new) - want).abs() < 1e-4);
            }
            for column in 0..N {
                let unit = if (C0..C0 + WIDTH).contains(&column) { units[column - C0] } else { 0.0 };
                let want = f64::from(errors[row * N + column]) + (old - want) * f64::from(unit);
                assert!((f64::from(new_errors[row * N + column]) - want).abs() < 1e-4);
            }
        }
        assert!(moved > 20 && kept > 5, "{moved} {kept}");
    }

    #[test]
    fn both_devices_move_scales_and_errors_alike() {
        let Some(gpu) = test_gpu() else { return };
        // A sum in another order may round to the neighbour of a scale.
        for (scale_type, step) in [(ScaleType::F16, 5e-4), (ScaleType::BF16, 4e-3), (ScaleType::F32, 1e-5)] {
            let [want, got] = [&Device::Cpu, &gpu].map(|device| run(device, scale_type));
            assert!(relative_error(&got[0], &want[0]) < step, "{scale_type:?}");
            for at in [1, 2] {
                assert!(relative_error(&got[at], &want[at]) < 7.0 * step, "{scale_type:?}");
            }
        }
    }
}

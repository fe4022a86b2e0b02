//! Codes moved one by one to where the loss is lower, with the scales as they are.
//!
//! The loss tr(E·H·Eᵀ), E = W − Ŵ, is a parabola in each weight ŵ_j of a row. Its lowest point is at
//!
//! ```text
//! ŵ_j + (E·H)_j / H_jj
//! ```
//!
//! and of the grid's values the nearest to it loses least. One column after another, each on what the others
//! left, the loss never rises: a descent by coordinates (QuantEase, arXiv 2309.01885, does it from rounded
//! weights on; here it begins where GPTQ ended).

use super::parallel::for_chunks;
use super::scales::Grid;
use super::simd::{cut, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The columns of one group.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// H_gg, symmetric, f32 [at least width, width].
    pub square: &'a Tensor,
    /// Its first column.
    pub c0: usize,
    /// Its number among the scales.
    pub index: usize,
    pub maxq: f32,
}

/// Moves the codes of a group: `units`, f32 [rows, n], codes less their zero points, and E with them,
/// `errors`, f32 [rows, n]. `pull` is (E·H)_{:,g}, f32 [rows, width], and follows.
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn descend(
    group: Group,
    grid: &Grid,
    pull: &mut Tensor,
    units: &mut Tensor,
    errors: &mut Tensor,
) -> Result<()> {
    let (rows, n, width) = (errors.rows(), errors.cols(), pull.cols());
    let fits = units.shape() == errors.shape()
        && pull.rows() == rows
        && group.square.cols() == width
        && group.square.rows() >= width
        && group.c0 + width <= n
        && grid.scales.rows() == rows
        && group.index < grid.groups();
    if !fits {
        return Err(Error::Internal("descend: shapes do not fit".into()));
    }
    match errors.device().clone() {
        Device::Cpu => cpu(group, grid, pull, units, errors),
        Device::Gpu(gpu) => gpu::descend(&gpu, group, grid, pull, units, errors),
    }
}

fn cpu(group: Group, grid: &Grid, pull: &mut Tensor, units: &mut Tensor, errors: &mut Tensor) -> Result<()> {
    let (n, width, groups) = (errors.cols(), pull.cols(), grid.groups());
    let (square, scales, zeros) = (group.square.f32s()?, grid.scales.f32s()?, grid.zeros.f32s()?);
    struct Row<'a> {
        pull: &'a mut [f32],
        units: &'a mut [f32],
        errors: &'a mut [f32],
    }
    let columns = group.c0..group.c0 + width;
    let mut rows: Vec<Row> = pull
        .f32s_mut()?
        .chunks_mut(width)
        .zip(units.f32s_mut()?.chunks_mut(n))
        .zip(errors.f32s_mut()?.chunks_mut(n))
        .map(|((pull, units), errors)| Row {
            pull,
            units: &mut units[columns.clone()],
            errors: &mut errors[columns.clone()],
        })
        .collect();
    for_chunks(&mut rows, 1, |row, slice| {
        let Row { pull, units, errors } = &mut slice[0];
        let at = row * groups + group.index;
        descend_row(square, scales[at], zeros[at], group.maxq, pull, units, errors);
    });
    Ok(())
}

multiversion! {
    fn descend_row(
        square: &[f32],
        scale: f32,
        zero: f32,
        maxq: f32,
        pull: &mut [f32],
        units: &mut [f32],
        errors: &mut [f32],
    ) {
        let width = pull.len();
        for j in 0..width {
            let across = &square[j * width..(j + 1) * width];
            let best = units[j] + pull[j] / (scale * across[j]);
            let new = cut(best.round_ties_even(), -zero, maxq - zero);
            if new == units[j] {
                continue;
            }
            let moved = scale * (new - units[j]);
            units[j] = new;
            errors[j] -= moved;
            for (pull, across) in pull.iter_mut().zip(across) {
                *pull -= moved * across;
            }
        }
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
        maxq: f32,
        first: u32,
        end: u32,
    }

    const DESCEND: Kernel = Kernel {
        name: "descend",
        source: include_str!("../../shaders/descend.wgsl"),
        bindings: &[
            Access::Read,
            Access::Read,
            Access::Read,
            Access::ReadWrite,
            Access::ReadWrite,
            Access::ReadWrite,
        ],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&DESCEND, size_of::<Params>())];

    pub fn descend(
        gpu: &Gpu,
        group: Group,
        grid: &Grid,
        pull: &mut Tensor,
        units: &mut Tensor,
        errors: &mut Tensor,
    ) -> Result<()> {
        let width = pull.cols();
        // Most codes stay where they are.
        let cost = 4.0 * ELEMENT * width as f64 + 2.0 * (width * width) as f64;
        for rows in ranges(gpu, errors.rows(), cost) {
            let params = Params {
                n: errors.cols() as u32,
                c0: group.c0 as u32,
                width: width as u32,
                groups: grid.groups() as u32,
                group: group.index as u32,
                maxq: group.maxq,
                first: rows.start as u32,
                end: rows.end as u32,
            };
            gpu.dispatch(
                &DESCEND,
                &[],
                &[
                    group.square.gpu()?,
                    grid.scales.gpu()?,
                    grid.zeros.gpu()?,
                    pull.gpu()?,
                    units.gpu()?,
                    errors.gpu()?,
                ],
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
    const WIDTH: usize = 12;
    const GROUPS: usize = 3;
    const MAXQ: f32 = 7.0;

    struct Case {
        square: Vec<f32>,
        scales: Vec<f32>,
        zeros: Vec<f32>,
        units: Vec<f32>,
        errors: Vec<f32>,
        /// (E·H)_{:,g}, where columns of other groups pull, too.
        pull: Vec<f32>,
    }

    fn case() -> Case {
        let x = noise(50 * WIDTH, 1);
        let square: Vec<f32> = (0..WIDTH * WIDTH)
            .map(|at| x.chunks(WIDTH).map(|x| x[at / WIDTH] * x[at % WIDTH]).sum::<f32>() / 50.0)
            .collect();
        let scales: Vec<f32> = noise(ROWS * GROUPS, 2).iter().map(|x| 0.2 * (x + x.signum())).collect();
        // A zero point in the middle, and others.
        let zeros: Vec<f32> = (0..ROWS * GROUPS).map(|at| [4.0, 3.0, 6.0][at / GROUPS % 3]).collect();
        let codes = noise(ROWS * N, 3);
        let units: Vec<f32> = (0..ROWS * N)
            .map(|at| (3.5 + 3.5 * codes[at]).round().clamp(0.0, MAXQ) - zeros[at / N * GROUPS + 1])
            .collect();
        let errors = noise(ROWS * N, 4);
        let others = noise(ROWS * WIDTH, 5);
        let pull = (0..ROWS * WIDTH)
            .map(|at| {
                let own = &errors[at / WIDTH * N + C0..][..WIDTH];
                let across = &square[at % WIDTH * WIDTH..][..WIDTH];
                own.iter().zip(across).map(|(e, h)| e * h).sum::<f32>() + 0.05 * others[at]
            })
            .collect();
        Case { square, scales, zeros, units, errors, pull }
    }

    /// Units, errors and pull after group 1, columns 16 to 27, was descended.
    fn run(device: &Device) -> [Vec<f32>; 3] {
        let case = case();
        let tensor =
            |rows, values: Vec<f32>| Tensor::from_f32(device, &[rows, values.len() / rows], values).unwrap();
        let grid = Grid { scales: tensor(ROWS, case.scales), zeros: tensor(ROWS, case.zeros) };
        let square = tensor(WIDTH, case.square);
        let (mut pull, mut units, mut errors) =
            (tensor(ROWS, case.pull), tensor(ROWS, case.units), tensor(ROWS, case.errors));
        let group = Group { square: &square, c0: C0, index: 1, maxq: MAXQ };
        descend(group, &grid, &mut pull, &mut units, &mut errors).unwrap();
        [units, errors, pull].map(|t| pollster::block_on(t.to_f32()).unwrap())
    }

    /// By the definition, in f64: each code in turn is the one of all that loses least.
    #[test]
    fn each_code_goes_where_the_loss_is_lowest() {
        let case = case();
        let [units, errors, pull] = run(&Device::Cpu);
        let mut moved = 0;
        for row in 0..ROWS {
            let (scale, zero) =
                (f64::from(case.scales[row * GROUPS + 1]), f64::from(case.zeros[row * GROUPS + 1]));
            let mut want_pull: Vec<f64> =
                case.pull[row * WIDTH..][..WIDTH].iter().copied().map(f64::from).collect();
            for j in 0..WIDTH {
                let at = row * N + C0 + j;
                let before = f64::from(case.units[at]);
                let curve = f64::from(case.square[j * WIDTH + j]);
                // What moving by d adds to the loss.
                let loss = |unit: f64| {
                    let d = scale * (unit - before);
                    curve * d * d - 2.0 * want_pull[j] * d
                };
                let all = (0..=MAXQ as i32).map(|code| f64::from(code) - zero);
                let best = all.min_by(|a, b| loss(*a).total_cmp(&loss(*b))).unwrap();
                assert_eq!(f64::from(units[at]), best, "row {row}, column {j}");
                let d = scale * (best - before);
                assert!((f64::from(errors[at]) - (f64::from(case.errors[at]) - d)).abs() < 1e-5);
                for (pull, h) in want_pull.iter_mut().zip(&case.square[j * WIDTH..]) {
                    *pull -= d * f64::from(*h);
                }
                moved += usize::from(d != 0.0);
            }
            for (pull, want) in pull[row * WIDTH..].iter().zip(&want_pull) {
                assert!((f64::from(*pull) - want).abs() < 1e-4);
            }
            for column in (0..C0).chain(C0 + WIDTH..N) {
                let at = row * N + column;
                assert!(units[at] == case.units[at] && errors[at] == case.errors[at]);
            }
        }
        assert!(moved > ROWS, "{moved} codes moved");
    }

    #[test]
    fn both_devices_move_codes_alike() {
        let Some(gpu) = test_gpu() else { return };
        let [want, got] = [&Device::Cpu, &gpu].map(run);
        assert_eq!(got[0], want[0]);
        assert!(relative_error(&got[1], &want[1]) < 1e-5 && relative_error(&got[2], &want[2]) < 1e-4);
    }
}

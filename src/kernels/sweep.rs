//! The inner loop of GPTQ on one block of columns: round a column, spread its error over the
//! columns of the block that are still to come.
//!
//! Columns stand in the order in which they are taken *from last to first*, so that the factor is an
//! ordinary lower Cholesky factor L of the damped Hessian (see `gptq/factor.rs`). With the rows of
//! L_bb⁻¹ of the block's diagonal square:
//!
//! ```text
//! for j = last … first:  q = round(w_j);  e = (w_j − ŵ_j) / L_bb⁻¹[j][j];  w_k −= e · L_bb⁻¹[j][k]  (k < j)
//! ```

use super::parallel::for_chunks;
use super::scales::Grid;
use super::simd::{cut, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// One block of columns.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// First column of the block in `w`.
    pub start: usize,
    /// f32 [rows, width]: what the columns done before add to this block's weights; `None` for the
    /// first block.
    pub compensation: Option<&'a Tensor>,
    /// L_bb⁻¹, f32 [width, width]; `None` rounds each column for itself (no error spreading).
    pub inverse: Option<&'a Tensor>,
    pub width: usize,
    /// u32 [n, 2]: for each column of `w` its number in the natural order and its group.
    pub columns: &'a Tensor,
    pub maxq: f32,
}

/// Quantizes the block's columns of `w` f32 [rows, n].
///
/// Writes codes to `codes` u8 [rows, n] at their natural columns, replaces the block in `w` by
/// E = w − ŵ against the *original* weights, and adds Σe² of each row to `loss` f32 [rows]
/// (tr(E(H+λI)Eᵀ) in the end; nothing without `inverse`).
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn sweep(w: &mut Tensor, block: Block, grid: &Grid, codes: &mut Tensor, loss: &mut Tensor) -> Result<()> {
    let (rows, n) = (w.rows(), w.cols());
    let square = |t: &Tensor| t.rows() == block.width && t.cols() == block.width;
    let fits = block.start + block.width <= n
        && block.columns.len() == 2 * n
        && codes.len() == rows * n
        && loss.len() == rows
        && grid.scales.rows() == rows
        && block.inverse.is_none_or(square)
        && block.compensation.is_none_or(|c| c.rows() == rows && c.cols() == block.width);
    if !fits {
        return Err(Error::Internal("sweep: shapes do not fit".into()));
    }
    match w.device().clone() {
        Device::Cpu => cpu(w, block, grid, codes, loss),
        Device::Gpu(gpu) => gpu::sweep(&gpu, w, block, grid, codes, loss),
    }
}

/// Rows that go through the loop side by side. Their weights (32 KiB for 128 columns) stay in the
/// first-level cache.
const LANES: usize = 64;

/// What every row group needs.
struct Shared<'a> {
    inverse: Option<&'a [f32]>,
    columns: &'a [u32],
    width: usize,
    maxq: f32,
}

/// The rows of one group: weights in, errors and codes out; each [.., lanes], a lane for each row.
struct Rows {
    lanes: usize,
    /// [width] compensated weights, then errors against the original weights.
    weights: Vec<f32>,
    original: Vec<f32>,
    codes: Vec<u8>,
    /// [groups] each.
    scales: Vec<f32>,
    zeros: Vec<f32>,
    loss: Vec<f32>,
}

fn cpu(w: &mut Tensor, block: Block, grid: &Grid, codes: &mut Tensor, loss: &mut Tensor) -> Result<()> {
    let (n, width, start) = (w.cols(), block.width, block.start);
    let groups = grid.groups();
    let (scales, zeros) = (grid.scales.f32s()?, grid.zeros.f32s()?);
    let compensation = block.compensation.map(Tensor::f32s).transpose()?;
    let columns = &block.columns.u32s()?[2 * start..2 * (start + width)];
    let shared =
        Shared { inverse: block.inverse.map(Tensor::f32s).transpose()?, columns, width, maxq: block.maxq };

    // Rows are cut into groups of LANES; each group owns its rows of w, codes and loss.
    struct Slice<'a> {
        w: &'a mut [f32],
        codes: &'a mut [u8],
        loss: &'a mut [f32],
    }
    let mut slices: Vec<Slice> = w
        .f32s_mut()?
        .chunks_mut(LANES * n)
        .zip(codes.u8s_mut()?.chunks_mut(LANES * n))
        .zip(loss.f32s_mut()?.chunks_mut(LANES))
        .map(|((w, codes), loss)| Slice { w, codes, loss })
        .collect();
    for_chunks(&mut slices, 1, |index, slice| {
        let slice = &mut slice[0];
        let (first, count) = (index * LANES, slice.loss.len());
        let lanes = count;
        let mut rows = Rows {
            lanes,
            weights: vec![0.0; width * lanes],
            original: vec![0.0; width * lanes],
            codes: vec![0; width * lanes],
            scales: vec![1.0; groups * lanes],
            zeros: vec![0.0; groups * lanes],
            loss: vec![0.0; lanes],
        };
        for lane in 0..lanes {
            for (j, &w) in slice.w[lane * n + start..][..width].iter().enumerate() {
                rows.original[j * lanes + lane] = w;
            }
            for g in 0..groups {
                rows.scales[g * lanes + lane] = scales[(first + lane) * groups + g];
                rows.zeros[g * lanes + lane] = zeros[(first + lane) * groups + g];
            }
        }
        rows.weights.copy_from_slice(&rows.original);
        if let Some(compensation) = compensation {
            for (lane, added) in compensation[first * width..].chunks(width).take(lanes).enumerate() {
                for (j, added) in added.iter().enumerate() {
                    rows.weights[j * lanes + lane] += added;
                }
            }
        }
        sweep_rows(&shared, &mut rows);
        for lane in 0..lanes {
            for (j, w) in slice.w[lane * n + start..][..width].iter_mut().enumerate() {
                *w = rows.weights[j * lanes + lane];
            }
            for j in 0..width {
                slice.codes[lane * n + columns[2 * j] as usize] = rows.codes[j * lanes + lane];
            }
            slice.loss[lane] += rows.loss[lane];
        }
    });
    Ok(())
}

multiversion! {
    fn sweep_rows(shared: &Shared, rows: &mut Rows) {
        // A number that is not known here keeps compilers at vectors of lanes; with a constant they
        // unroll the lanes and make vectors of columns, slowly.
        let lanes = rows.lanes;
        let mut error = vec![0f32; lanes];
        for j in (0..shared.width).rev() {
            let group = shared.columns[2 * j + 1] as usize * lanes;
            let (scale, zero) = (&rows.scales[group..group + lanes], &rows.zeros[group..group + lanes]);
            let (before, rest) = rows.weights.split_at_mut(j * lanes);
            let w = &mut rest[..lanes];
            let original = &rows.original[j * lanes..(j + 1) * lanes];
            let codes = &mut rows.codes[j * lanes..(j + 1) * lanes];
            let error = &mut error[..lanes];
            for l in 0..lanes {
                let code = cut((w[l] / scale[l]).round_ties_even() + zero[l], 0.0, shared.maxq);
                let value = scale[l] * (code - zero[l]);
                error[l] = w[l] - value;
                // SAFETY: a whole number from 0 to maxq, at most 255.
                codes[l] = unsafe { code.to_int_unchecked() };
                w[l] = original[l] - value;
            }
            let Some(inverse) = shared.inverse else { continue };
            let row = &inverse[j * shared.width..(j + 1) * shared.width];
            let loss = &mut rows.loss[..lanes];
            for l in 0..lanes {
                error[l] /= row[j];
                loss[l] += error[l] * error[l];
            }
            for (w, &factor) in before.chunks_exact_mut(lanes).zip(row) {
                for l in 0..lanes {
                    w[l] -= error[l] * factor;
                }
            }
        }
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cholesky::BLOCK;
    use crate::kernels::cut::{ELEMENT, ranges, whole_quads};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        n: u32,
        start: u32,
        width: u32,
        groups: u32,
        maxq: f32,
        has_compensation: u32,
        has_inverse: u32,
        first: u32,
        end: u32,
    }

    const SWEEP: Kernel = Kernel {
        name: "sweep",
        source: include_str!("../../shaders/sweep.wgsl"),
        bindings: &[
            Access::ReadWrite,
            Access::Read,
            Access::Read,
            Access::Read,
            Access::Read,
            Access::Read,
            Access::ReadWrite,
            Access::ReadWrite,
        ],
    };

    pub const KERNELS: &[Registered] = &[(&SWEEP, size_of::<Params>())];

    /// Rows of one workgroup.
    const ROWS: usize = 32;

    pub fn sweep(
        gpu: &Gpu,
        w: &mut Tensor,
        block: Block,
        grid: &Grid,
        codes: &mut Tensor,
        loss: &mut Tensor,
    ) -> Result<()> {
        let (n, width) = (w.cols(), block.width);
        if width > BLOCK {
            return Err(Error::Internal(format!("sweep: {width} columns in a block")));
        }
        // Codes lie four in a word, and no two rows may share one.
        whole_quads("sweep", "row", n, 4)?;
        if !width.is_multiple_of(4) || !block.start.is_multiple_of(4) {
            return Err(Error::Internal(format!("sweep: {width} columns at {}", block.start)));
        }
        let scales = grid.scales.gpu()?;
        // A kernel that reads no compensation must have something bound in its place.
        let compensation = block.compensation.map_or(Ok(scales), Tensor::gpu)?;
        let inverse = block.inverse.map_or(Ok(scales), Tensor::gpu)?;
        // Each row's steps wait for one another, so they cost several times their operations.
        let cost = 4.0 * ELEMENT * width as f64 + 8.0 * (width * width) as f64;
        for rows in ranges(gpu, w.rows(), cost) {
            let params = Params {
                n: n as u32,
                start: block.start as u32,
                width: width as u32,
                groups: grid.groups() as u32,
                maxq: block.maxq,
                has_compensation: block.compensation.is_some().into(),
                has_inverse: block.inverse.is_some().into(),
                first: rows.start as u32,
                end: rows.end as u32,
            };
            gpu.dispatch(
                &SWEEP,
                &[],
                &[
                    w.gpu()?,
                    compensation,
                    inverse,
                    block.columns.gpu()?,
                    scales,
                    grid.zeros.gpu()?,
                    codes.gpu()?,
                    loss.gpu()?,
                ],
                bytemuck::bytes_of(&params),
                gpu.unfold(rows.len().div_ceil(ROWS)),
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
    use crate::tensor::Elem;

    /// One block somewhere in a weight.
    #[derive(Debug, Clone, Copy)]
    struct Case {
        rows: usize,
        n: usize,
        start: usize,
        width: usize,
        bits: u32,
        sym: bool,
        compensation: bool,
        inverse: bool,
    }

    struct Swept {
        errors: Vec<f32>,
        codes: Vec<u8>,
        loss: Vec<f32>,
    }

    impl Case {
        fn groups(&self) -> usize {
            3
        }

        /// u32 [n, 2]: a permutation of the columns, and groups in no order.
        fn columns(&self) -> Vec<u32> {
            // No number of columns in a case is a multiple of 7.
            (0..self.n).flat_map(|j| [(j * 7 % self.n) as u32, (j * 5 % self.groups()) as u32]).collect()
        }

        fn scales(&self) -> Vec<f32> {
            let span = 2.0 / f64::from(1u32 << self.bits);
            noise(self.rows * self.groups(), 4)
                .iter()
                .map(|&x| {
                    let scale = half::f16::from_f64(span * (1.0 + 0.3 * f64::from(x))).to_f32();
                    // Symmetric grids have scales of either sign.
                    if self.sym && x > 0.0 { -scale } else { scale }
                })
                .collect()
        }

        fn zeros(&self) -> Vec<f32> {
            let middle = (1u32 << (self.bits - 1)) as f32;
            (0..self.rows * self.groups())
                .map(|i| if self.sym { middle } else { middle - (i % 2) as f32 })
                .collect()
        }

        /// A lower triangle as the inverse of a factor is: of moderate size, positive pivots.
        fn inverse(&self) -> Vec<f32> {
            let off_diagonal = noise(self.width * self.width, 5);
            let mut inverse = vec![0.0; self.width * self.width];
            for j in 0..self.width {
                for k in 0..j {
                    inverse[j * self.width + k] = 0.1 * off_diagonal[j * self.width + k];
                }
                inverse[j * self.width + j] = 1.0 + 0.5 * off_diagonal[j * self.width + j];
            }
            inverse
        }

        fn run(&self, device: &Device) -> Swept {
            let Self { rows, n, start, width, .. } = *self;
            let floats = |shape: &[usize], values| Tensor::from_f32(device, shape, values).unwrap();
            let mut w = floats(&[rows, n], noise(rows * n, 1));
            let compensation =
                floats(&[rows, width], noise(rows * width, 2).iter().map(|x| 0.1 * x).collect());
            let inverse = floats(&[width, width], self.inverse());
            let grid = Grid {
                scales: floats(&[rows, self.groups()], self.scales()),
                zeros: floats(&[rows, self.groups()], self.zeros()),
            };
            let columns = Tensor::from_u32(device, &[n, 2], self.columns()).unwrap();
            // Codes that the block does not own stay as they are.
            let mut codes = Tensor::from_bytes(device, Elem::U8, &[rows, n], &vec![0xa5; rows * n]).unwrap();
            let mut loss = floats(&[rows], noise(rows, 3));
            let block = Block {
                start,
                compensation: self.compensation.then_some(&compensation),
                inverse: self.inverse.then_some(&inverse),
                width,
                columns: &columns,
                maxq: ((1u32 << self.bits) - 1) as f32,
            };
            sweep(&mut w, block, &grid, &mut codes, &mut loss).unwrap();
            pollster::block_on(async {
                Swept {
                    errors: w.to_f32().await.unwrap(),
                    codes: codes.to_bytes().await.unwrap(),
                    loss: loss.to_f32().await.unwrap(),
                }
            })
        }
    }

    fn cases() -> Vec<Case> {
        let mut cases = vec![];
        for bits in [2, 3, 4, 8] {
            for sym in [true, false] {
                for (compensation, inverse) in [(false, false), (false, true), (true, true)] {
                    cases.push(Case {
                        rows: 37,
                        n: 260,
                        start: 128,
                        width: 128,
                        bits,
                        sym,
                        compensation,
                        inverse,
                    });
                }
            }
        }
        let whole = Case { inverse: true, ..cases[0] };
        cases.push(Case { rows: 1, n: 4, start: 0, width: 4, ..whole });
        cases.push(Case { rows: 70, n: 60, start: 0, width: 60, compensation: true, ..whole });
        cases.push(Case { rows: 33, n: 132, start: 4, width: 128, compensation: true, ..whole });
        cases
    }

    /// The definition, in f64: q = round(w_j); e = (w_j − ŵ_j)/V_jj; w_k −= e·V_jk.
    #[test]
    fn the_cpu_twin_follows_the_definition() {
        for case in cases() {
            let got = case.run(&Device::Cpu);
            let (w, compensation) = (noise(case.rows * case.n, 1), noise(case.rows * case.width, 2));
            let (scales, zeros, inverse, columns) =
                (case.scales(), case.zeros(), case.inverse(), case.columns());
            let (mut wrong, mut codes, mut errors) = (0, vec![0xa5; w.len()], w.clone());
            for row in 0..case.rows {
                let mut current: Vec<f64> = (0..case.width)
                    .map(|j| {
                        let added =
                            if case.compensation { 0.1 * compensation[row * case.width + j] } else { 0.0 };
                        f64::from(w[row * case.n + case.start + j] + added)
                    })
                    .collect();
                for j in (0..case.width).rev() {
                    let [column, group] = [0, 1].map(|i| columns[2 * (case.start + j) + i] as usize);
                    let at = row * case.groups() + group;
                    let (scale, zero) = (f64::from(scales[at]), f64::from(zeros[at]));
                    let maxq = f64::from((1u32 << case.bits) - 1);
                    let code = ((current[j] / scale).round_ties_even() + zero).clamp(0.0, maxq);
                    let value = scale * (code - zero);
                    codes[row * case.n + column] = code as u8;
                    let original = &mut errors[row * case.n + case.start + j];
                    *original = (f64::from(*original) - value) as f32;
                    if case.inverse {
                        let error = (current[j] - value) / f64::from(inverse[j * case.width + j]);
                        for k in 0..j {
                            current[k] -= error * f64::from(inverse[j * case.width + k]);
                        }
                    }
                }
                // A row that differs in one code differs in those that come after, too.
                let range = row * case.n..(row + 1) * case.n;
                if got.codes[range.clone()] == codes[range.clone()] {
                    assert!(relative_error(&got.errors[range.clone()], &errors[range]) < 1e-5, "{case:?}");
                } else {
                    wrong += 1;
                }
            }
            assert!(wrong * 20 <= case.rows, "{case:?}: {wrong} rows differ");
        }
    }

    #[test]
    fn the_kernel_agrees_with_the_cpu_twin() {
        let Some(device) = test_gpu() else { return };
        for case in cases() {
            let (got, want) = (case.run(&device), case.run(&Device::Cpu));
            let wrong = got.codes.iter().zip(&want.codes).filter(|(got, want)| got != want).count();
            assert!(wrong * 10_000 <= want.codes.len(), "{case:?}: {wrong} codes differ");
            assert!(relative_error(&got.errors, &want.errors) < 1e-5, "{case:?}");
            assert!(relative_error(&got.loss, &want.loss) < 1e-5, "{case:?}");
        }
    }

    #[test]
    fn rows_in_many_dispatches_come_out_the_same() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        let case = Case { rows: 70, ..cases()[2] };
        let whole = case.run(&device);
        gpu.set_submit_budget(2e6);
        let parts = case.run(&device);
        assert!(whole.codes == parts.codes && whole.errors == parts.errors && whole.loss == parts.loss);
    }

    #[test]
    fn a_row_that_is_no_multiple_of_four_is_refused_on_a_gpu() {
        let Some(device) = test_gpu() else { return };
        let mut w = Tensor::zeros(&device, Elem::F32, &[2, 6]).unwrap();
        let grid = Grid::new(&device, 2, 1).unwrap();
        let columns = Tensor::zeros(&device, Elem::U32, &[6, 2]).unwrap();
        let mut codes = Tensor::zeros(&device, Elem::U8, &[2, 6]).unwrap();
        let mut loss = Tensor::zeros(&device, Elem::F32, &[2]).unwrap();
        let block =
            Block { start: 0, compensation: None, inverse: None, width: 6, columns: &columns, maxq: 15.0 };
        let error = sweep(&mut w, block, &grid, &mut codes, &mut loss).unwrap_err().to_string();
        assert!(error.contains("a row of 6 is not a multiple of 4"), "{error}");
    }
}

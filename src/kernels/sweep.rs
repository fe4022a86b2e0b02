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
use super::simd::multiversion;
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

/// Rows that go through the loop side by side, one in each lane of a vector.
const LANES: usize = 16;

/// What every row group needs.
struct Shared<'a> {
    inverse: Option<&'a [f32]>,
    columns: &'a [u32],
    width: usize,
    maxq: f32,
}

/// One column's worth of rows.
type Column = [f32; LANES];

/// The rows of one group: weights in, errors and codes out.
struct Rows {
    /// [width] compensated weights, then errors against the original weights.
    weights: Vec<Column>,
    original: Vec<Column>,
    codes: Vec<Column>,
    /// [groups] each.
    scales: Vec<Column>,
    zeros: Vec<Column>,
    loss: Column,
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
        let mut rows = Rows {
            weights: vec![[0.0; LANES]; width],
            original: vec![[0.0; LANES]; width],
            codes: vec![[0.0; LANES]; width],
            scales: vec![[1.0; LANES]; groups],
            zeros: vec![[0.0; LANES]; groups],
            loss: [0.0; LANES],
        };
        for lane in 0..count {
            for j in 0..width {
                rows.original[j][lane] = slice.w[lane * n + start + j];
                let added = compensation.map_or(0.0, |c| c[(first + lane) * width + j]);
                rows.weights[j][lane] = rows.original[j][lane] + added;
            }
            for g in 0..groups {
                rows.scales[g][lane] = scales[(first + lane) * groups + g];
                rows.zeros[g][lane] = zeros[(first + lane) * groups + g];
            }
        }
        sweep_rows(&shared, &mut rows);
        for lane in 0..count {
            for j in 0..width {
                slice.w[lane * n + start + j] = rows.weights[j][lane];
                slice.codes[lane * n + columns[2 * j] as usize] = rows.codes[j][lane] as u8;
            }
            slice.loss[lane] += rows.loss[lane];
        }
    });
    Ok(())
}

multiversion! {
    fn sweep_rows(shared: &Shared, rows: &mut Rows) {
        for j in (0..shared.width).rev() {
            let group = shared.columns[2 * j + 1] as usize;
            let (scale, zero) = (rows.scales[group], rows.zeros[group]);
            let (before, rest) = rows.weights.split_at_mut(j);
            let w = &mut rest[0];
            let mut error = [0f32; LANES];
            #[expect(clippy::needless_range_loop, reason = "seven arrays side by side, one lane of each")]
            for l in 0..LANES {
                let code = ((w[l] / scale[l]).round_ties_even() + zero[l]).max(0.0).min(shared.maxq);
                let value = scale[l] * (code - zero[l]);
                error[l] = w[l] - value;
                rows.codes[j][l] = code;
                w[l] = rows.original[j][l] - value;
            }
            let Some(inverse) = shared.inverse else { continue };
            let row = &inverse[j * shared.width..(j + 1) * shared.width];
            for l in 0..LANES {
                error[l] /= row[j];
                rows.loss[l] += error[l] * error[l];
            }
            for (w, &factor) in before.iter_mut().zip(row) {
                for l in 0..LANES {
                    w[l] -= error[l] * factor;
                }
            }
        }
    }
}

mod gpu {
    use super::*;
    use crate::device::Gpu;

    pub fn sweep(
        _gpu: &Gpu,
        _w: &mut Tensor,
        _block: Block,
        _grid: &Grid,
        _codes: &mut Tensor,
        _loss: &mut Tensor,
    ) -> Result<()> {
        Err(Error::Internal("sweep has no GPU kernel yet".into()))
    }
}

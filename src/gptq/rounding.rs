//! Ways to round some rows of a weight: the sweep that spreads errors, and plain rounding to compare
//! with.

use crate::error::Result;
use crate::gptq::factor::{Factor, FactorBlock};
use crate::gptq::order::Order;
use crate::gptq::stage::Prepared;
use crate::kernels::add::add_scaled;
use crate::kernels::columns::gather;
use crate::kernels::dequant::dequantize;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::norm::add_squares;
use crate::kernels::scales::{self, Columns, Fit, Grid, GridKind};
use crate::kernels::stretch::stretch;
use crate::kernels::sweep::{Block, sweep};
use crate::tensor::{Elem, Tensor};

/// One way to round some rows.
pub struct Rounded {
    pub codes: Tensor,
    pub grid: Grid,
    pub dequantized: Tensor,
    /// tr(E·H·Eᵀ); 0 without a factor.
    pub loss: f64,
}

/// Rounds `target` f32 [rows, n], natural columns, spreading errors where there is a factor; on `grid`, or
/// on one fitted here.
pub async fn swept(prepared: &Prepared, target: &Tensor, grid: Option<Grid>) -> Result<Rounded> {
    let (device, rows, n) = (target.device().clone(), target.rows(), prepared.n);
    let fixed = grid.is_some();
    let mut grid = match grid {
        Some(grid) => grid,
        None => Grid::new(&device, rows, prepared.scheme.groups(n))?,
    };
    if !fixed && !prepared.follows_order {
        scales::fit(prepared.kind, prepared.whole(target), &mut grid)?;
    }
    let mut codes = Tensor::zeros(&device, Elem::U8, &[rows, n])?;
    let mut sums = Tensor::zeros(&device, Elem::F32, &[rows])?;
    let mut w = gather(target, &prepared.permuted)?;
    let loss = match &prepared.factor {
        Some(factor) => {
            compensate(prepared, factor, &mut w, &mut grid, &mut codes, &mut sums)?;
            undamped(factor, &sums, &w).await?
        }
        None => {
            round(prepared.kind, &prepared.columns, &mut w, &grid, &mut codes, &mut sums)?;
            0.0
        }
    };
    drop(w);
    let dequantized = dequantize(&codes, &grid, &prepared.group_of)?;
    Ok(Rounded { codes, grid, dequantized, loss })
}

/// The GPTQ loop over blocks, from the last positions to the first. Leaves E in `w`.
fn compensate(
    prepared: &Prepared,
    factor: &Factor,
    w: &mut Tensor,
    grid: &mut Grid,
    codes: &mut Tensor,
    loss: &mut Tensor,
) -> Result<()> {
    for index in (0..factor.blocks.len()).rev() {
        let block = &factor.blocks[index];
        if prepared.follows_order {
            fit_block(prepared, factor, index, w, grid)?;
        }
        let compensation = if block.end < prepared.n {
            Some(corrected(block, &uncorrected(block, w, block.end, &[])?)?)
        } else {
            None
        };
        let columns = Block {
            start: block.start,
            compensation: compensation.as_ref(),
            inverse: Some(&block.inverse),
            width: block.end - block.start,
            columns: &prepared.columns,
            maxq: prepared.kind.maxq(),
        };
        sweep(w, columns, grid, codes, loss)?;
    }
    Ok(())
}

/// C = E_{≥end} · L_{≥end,b} − Σ V_c · L_{c,b} over the blocks c between b and `end`: times L_bb⁻¹ it is
/// V_b, what the errors made at positions from `end` on add to the weights of block b.
fn uncorrected(
    block: &FactorBlock,
    w: &Tensor,
    end: usize,
    between: &[(&FactorBlock, Tensor)],
) -> Result<Tensor> {
    let (rows, n, width) = (w.rows(), w.cols(), block.end - block.start);
    let below = Mat::of(&block.below);
    let mut sum = Tensor::zeros(w.device(), Elem::F32, &[rows, width])?;
    if end < n {
        let errors = Mat::of(w).part(0, end, rows, n - end);
        let factor = below.part(end - block.end, 0, n - end, width);
        gemm(Target::of(&mut sum), errors, factor, Scaling::SET, None)?;
    }
    for (done, v) in between {
        let factor = below.part(done.start - block.end, 0, done.end - done.start, width);
        gemm(Target::of(&mut sum), Mat::of(v), factor, Scaling::SUB, None)?;
    }
    Ok(sum)
}

/// V_b from [`uncorrected`].
fn corrected(block: &FactorBlock, sum: &Tensor) -> Result<Tensor> {
    let mut v = Tensor::uninit(sum.device(), Elem::F32, sum.shape())?;
    gemm(Target::of(&mut v), Mat::of(sum), Mat::of(&block.inverse), Scaling::SET, None)?;
    Ok(v)
}

/// Fits the groups that begin in block `index`, on weights compensated by the blocks done before. A
/// group may reach into the next blocks: they are compensated too, as far as it reaches.
fn fit_block(prepared: &Prepared, factor: &Factor, index: usize, w: &Tensor, grid: &mut Grid) -> Result<()> {
    let (n, group, device) = (prepared.n, prepared.scheme.group_len(prepared.n), w.device());
    let (start, end) = (factor.blocks[index].start, factor.blocks[index].end);
    // The turns of this block, and the blocks that its groups reach.
    let turns = n - end..n - start;
    let lowest = n - n.min(turns.end.next_multiple_of(group));
    let reached: Vec<&FactorBlock> =
        factor.blocks[..=index].iter().rev().take_while(|block| block.end > lowest).collect();
    let first = reached.last().map_or(start, |block| block.start);

    let positions = Tensor::from_u32(device, &[end - first], (first as u32..end as u32).collect())?;
    let mut current = gather(w, &positions)?;
    let importance = gather(&prepared.permuted_importance, &positions)?;
    if end < n {
        let mut between = Vec::with_capacity(reached.len());
        for block in reached {
            let sum = uncorrected(block, w, end, &between)?;
            let target = Target::at(&mut current, 0, block.start - first);
            gemm(target, Mat::of(&sum), Mat::of(&block.inverse), Scaling::ADD, None)?;
            between.push((block, corrected(block, &sum)?));
        }
    }
    for turn in turns.filter(|turn| turn % group == 0) {
        let (low, high) = (n - n.min(turn + group), n - turn);
        let columns = Columns {
            w: &current,
            importance: &importance,
            c0: low - first,
            cols: high - low,
            group,
            first: turn / group,
        };
        scales::fit(prepared.kind, columns, grid)?;
    }
    Ok(())
}

/// Rounds every column for itself. Leaves W − Ŵ in `w`.
fn round(
    kind: GridKind,
    columns: &Tensor,
    w: &mut Tensor,
    grid: &Grid,
    codes: &mut Tensor,
    loss: &mut Tensor,
) -> Result<()> {
    for (start, end) in Order::blocks(w.cols()) {
        let block = Block {
            start,
            compensation: None,
            inverse: None,
            width: end - start,
            columns,
            maxq: kind.maxq(),
        };
        sweep(w, block, grid, codes, loss)?;
    }
    Ok(())
}

/// tr(E·H·Eᵀ) from `damped` = the rows' shares of tr(E(H+λI)Eᵀ) and E.
async fn undamped(factor: &Factor, damped: &Tensor, e: &Tensor) -> Result<f64> {
    let mut squares = Tensor::zeros(e.device(), Elem::F32, &[e.rows()])?;
    add_squares(e, &mut squares)?;
    let sum = |values: Vec<f32>| values.into_iter().map(f64::from).sum::<f64>();
    let total = sum(damped.to_f32().await?) - f64::from(factor.lambda) * sum(squares.to_f32().await?);
    Ok(total.max(0.0))
}

/// Weights that are rounded as others: column by column times `to`, and what comes out times `back`, the inverse. Both
/// f32 [n], natural columns.
pub struct Stretched<'a> {
    pub to: &'a Tensor,
    pub back: &'a Tensor,
}

/// `weight` rounded to nearest, column by column, on grids of the same kind but for their `fit`. Where it is stretched
/// for that, loss and `dequantized` are those of `weight` itself.
pub async fn rounded(
    prepared: &Prepared,
    factor: &Factor,
    weight: &Tensor,
    fit: Fit,
    stretched: Option<Stretched<'_>>,
) -> Result<Rounded> {
    let (rows, n, device) = (weight.rows(), prepared.n, weight.device());
    let kind = GridKind { fit, ..prepared.kind };
    let mut grid = Grid::new(device, rows, prepared.scheme.groups(n))?;
    let mut natural = gather(weight, &prepared.natural)?;
    if let Some(Stretched { to, .. }) = &stretched {
        stretch(&mut natural, to)?;
    }
    scales::fit(kind, prepared.whole(&natural), &mut grid)?;
    let mut d = gather(&natural, &prepared.permuted)?;
    drop(natural);
    let mut codes = Tensor::zeros(device, Elem::U8, &[rows, n])?;
    let mut sums = Tensor::zeros(device, Elem::F32, &[rows])?;
    round(kind, &prepared.rtn_columns, &mut d, &grid, &mut codes, &mut sums)?;
    let mut dequantized = dequantize(&codes, &grid, &prepared.rtn_group_of)?;
    if let Some(Stretched { back, .. }) = &stretched {
        stretch(&mut d, &gather(back, &prepared.permuted)?)?;
        stretch(&mut dequantized, back)?;
    }
    let loss = lost(prepared, factor, &d).await?;
    Ok(Rounded { codes, grid, dequantized, loss })
}

/// What `values`, f32 [rows, n] in natural columns, are as codes: they lie on `grid` but for rounding.
///
/// # Errors
/// Those of the device.
pub async fn read_off(
    prepared: &Prepared,
    factor: &Factor,
    target: &Tensor,
    values: &Tensor,
    grid: Grid,
) -> Result<Rounded> {
    let (rows, n, device) = (target.rows(), prepared.n, target.device());
    let mut w = gather(values, &prepared.permuted)?;
    let mut codes = Tensor::zeros(device, Elem::U8, &[rows, n])?;
    let mut sums = Tensor::zeros(device, Elem::F32, &[rows])?;
    round(prepared.kind, &prepared.columns, &mut w, &grid, &mut codes, &mut sums)?;
    let dequantized = dequantize(&codes, &grid, &prepared.group_of)?;
    let mut d = gather(target, &prepared.permuted)?;
    add_scaled(&mut d, &gather(&dequantized, &prepared.permuted)?, -1.0)?;
    let loss = lost(prepared, factor, &d).await?;
    Ok(Rounded { codes, grid, dequantized, loss })
}

/// tr(D·H·Dᵀ), D [rows, n] by position: tr(D(H+λI)Dᵀ) = ‖D·L‖², block column by block column.
async fn lost(prepared: &Prepared, factor: &Factor, d: &Tensor) -> Result<f64> {
    let (rows, n, device) = (d.rows(), prepared.n, d.device());
    let mut sums = Tensor::zeros(device, Elem::F32, &[rows])?;
    for block in &factor.blocks {
        let width = block.end - block.start;
        let mut product = Tensor::uninit(device, Elem::F32, &[rows, width])?;
        let own = Mat::of(d).part(0, block.start, rows, width);
        gemm(Target::of(&mut product), own, Mat::of(&block.square), Scaling::SET, None)?;
        if block.end < n {
            let rest = Mat::of(d).part(0, block.end, rows, n - block.end);
            gemm(Target::of(&mut product), rest, Mat::of(&block.below), Scaling::ADD, None)?;
        }
        add_squares(&product, &mut sums)?;
    }
    undamped(factor, &sums, d).await
}

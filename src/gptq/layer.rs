//! One stage of a model: what its linear layers share, then each of them, some rows at a time.
//!
//! Linear layers that see the same inputs (q, k, v; gate, up) share one Hessian, one order of
//! columns and one factor: [`Prepared`]. Rows of a weight do not influence each other, so a weight
//! of any size goes through [`quantize_rows`] in pieces.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::gptq::factor::{Factor, FactorBlock, factor};
use crate::gptq::order::Order;
use crate::gptq::scheme::Scheme;
use crate::kernels::columns::{ZERO_COLUMN, gather};
use crate::kernels::dequant::dequantize;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::norm::add_squares;
use crate::kernels::scales::{self, Columns, Fit, Grid, GridKind, ScaleType};
use crate::kernels::sweep::{Block, sweep};
use crate::kernels::symmetric::SymmetricPanels;
use crate::tensor::{Elem, Tensor};

/// What the linear layers of one stage share.
pub struct Prepared {
    scheme: Scheme,
    kind: GridKind,
    n: usize,
    /// `None` for the preset rtn, and when no damping made H positive definite.
    factor: Option<Factor>,
    /// Natural order, dead columns as [`ZERO_COLUMN`].
    natural: Tensor,
    /// The same in the order's positions.
    permuted: Tensor,
    /// diag(H), natural order.
    importance: Tensor,
    /// diag(H) by position, [1, n].
    permuted_importance: Tensor,
    /// u32 [n, 2] by position: natural column and group.
    columns: Tensor,
    /// The same with natural groups, for the comparison with plain rounding.
    rtn_columns: Tensor,
    /// Groups follow the order of columns; their scales are fitted when they begin.
    follows_order: bool,
    /// Group of each natural column.
    g_idx: Vec<u32>,
    group_of: Tensor,
}

impl Prepared {
    /// λ / mean(diag H) as used; `None` without a factor.
    pub fn damp_used(&self) -> Option<f64> {
        self.factor.as_ref().map(|factor| factor.damp_percent)
    }

    /// No damping helped: the layers are rounded to nearest instead.
    pub fn fell_back(&self) -> bool {
        self.scheme.needs_inputs() && self.factor.is_none()
    }

    /// `None` for the preset rtn, and when no damping made H positive definite.
    pub fn factor(&self) -> Option<&Factor> {
        self.factor.as_ref()
    }

    /// The largest code.
    pub fn maxq(&self) -> f32 {
        self.kind.maxq()
    }

    /// Group of each input column, natural order.
    pub fn g_idx(&self) -> &[u32] {
        &self.g_idx
    }
}

/// Orders the columns and factors the Hessian.
///
/// `h` is (2/tokens)·XᵀX; `None` only for a scheme that needs no inputs, `n` then tells the columns.
/// `place` names the stage in messages.
///
/// # Errors
/// [`Error::Numeric`] when activations were not finite.
pub async fn prepare(
    scheme: &Scheme,
    scale_type: ScaleType,
    device: &Device,
    n: usize,
    h: Option<&SymmetricPanels>,
    place: &str,
) -> Result<Prepared> {
    let order = |diagonal: &[f32]| match scheme.desc_act {
        true => Order::descending(diagonal),
        false => Order::natural(n),
    };
    prepare_in_order(scheme, scale_type, device, n, h, place, order).await
}

/// [`prepare`] with columns in an order that `order` makes of diag(H), with dead columns set to 1.
///
/// # Errors
/// As [`prepare`].
pub async fn prepare_in_order(
    scheme: &Scheme,
    scale_type: ScaleType,
    device: &Device,
    n: usize,
    h: Option<&SymmetricPanels>,
    place: &str,
    order: impl FnOnce(&[f32]) -> Order,
) -> Result<Prepared> {
    let mut diagonal = match h {
        Some(h) => h.diagonal().await?,
        None => vec![1.0; n],
    };
    if let Some(column) = diagonal.iter().position(|d| !d.is_finite()) {
        return Err(Error::numeric(
            place,
            format!("the activations of input column {column} are not finite"),
            "The weights before it overflow in 32-bit arithmetic; check the model file",
        ));
    }
    let dead: Vec<bool> = diagonal.iter().map(|&d| d <= 0.0).collect();
    for (d, _) in diagonal.iter_mut().zip(&dead).filter(|(_, dead)| **dead) {
        *d = 1.0;
    }
    let order = order(&diagonal);
    let factor = match h {
        Some(h) if scheme.needs_inputs() => factor(h, &order, &diagonal, scheme.damp_percent).await?,
        _ => None,
    };
    let group = scheme.group_len(n);
    let follows_order = factor.is_some() && scheme.group_size.is_some() && !scheme.static_groups;
    let mut g_idx = vec![0; n];
    for (position, &column) in order.column.iter().enumerate() {
        let natural = column as usize;
        g_idx[natural] = (if follows_order { order.turn(position) } else { natural } / group) as u32;
    }
    let alive = |column: u32| if dead[column as usize] { ZERO_COLUMN } else { column };
    let table = |group_of: &dyn Fn(u32) -> u32| {
        let pairs = order.column.iter().flat_map(|&c| [c, group_of(c)]).collect();
        Tensor::from_u32(device, &[n, 2], pairs)
    };
    Ok(Prepared {
        kind: scheme.grid_kind(scale_type),
        natural: Tensor::from_u32(device, &[n], (0..n as u32).map(alive).collect())?,
        permuted: Tensor::from_u32(device, &[n], order.column.iter().map(|&c| alive(c)).collect())?,
        permuted_importance: Tensor::from_f32(
            device,
            &[1, n],
            order.column.iter().map(|&c| diagonal[c as usize]).collect(),
        )?,
        columns: table(&|c| g_idx[c as usize])?,
        rtn_columns: table(&|c| c / group as u32)?,
        group_of: Tensor::from_u32(device, &[n], g_idx.clone())?,
        importance: Tensor::from_f32(device, &[n], diagonal)?,
        scheme: scheme.clone(),
        n,
        factor,
        follows_order,
        g_idx,
    })
}

/// Some rows of a quantized weight.
pub struct QuantizedRows {
    /// u8 [rows, n], natural columns.
    pub codes: Vec<u8>,
    /// [rows, groups]
    pub scales: Vec<f32>,
    /// [rows, groups]
    pub zeros: Vec<u8>,
    /// ŵ, f32 [rows, n], on the device.
    pub dequantized: Tensor,
    /// tr(E·H·Eᵀ) of these rows, and of the same rows rounded to nearest on min-max grids; `None`
    /// without a factor.
    pub loss: Option<Losses>,
}

/// What rounding costs: tr(E·H·Eᵀ) with H = (2/tokens)·XᵀX, undamped.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Losses {
    pub gptq: f64,
    pub rtn: f64,
}

/// Quantizes `weight` [rows, n], some rows of a linear layer as stored (f32, f16 or bf16).
///
/// # Errors
/// Those of the device.
pub async fn quantize_rows(prepared: &Prepared, weight: &Tensor) -> Result<QuantizedRows> {
    let device = weight.device().clone();
    let (rows, n) = (weight.rows(), prepared.n);
    if weight.cols() != n {
        return Err(Error::Internal(format!("a weight {:?} for {n} inputs", weight.shape())));
    }
    let natural = gather(weight, &prepared.natural)?;
    let mut grid = Grid::new(&device, rows, prepared.scheme.groups(n))?;
    let whole = Columns {
        w: &natural,
        importance: &prepared.importance,
        c0: 0,
        cols: n,
        group: prepared.scheme.group_len(n),
        first: 0,
    };
    if !prepared.follows_order {
        scales::fit(prepared.kind, whole, &mut grid)?;
    }
    let mut codes = Tensor::zeros(&device, Elem::U8, &[rows, n])?;
    let mut loss = Tensor::zeros(&device, Elem::F32, &[rows])?;
    let mut w = gather(weight, &prepared.permuted)?;
    match &prepared.factor {
        Some(factor) => compensate(prepared, factor, &mut w, &mut grid, &mut codes, &mut loss)?,
        None => round(prepared.kind, &prepared.columns, &mut w, &grid, &mut codes, &mut loss)?,
    }
    let dequantized = dequantize(&codes, &grid, &prepared.group_of)?;
    let loss = match &prepared.factor {
        None => None,
        Some(factor) => {
            let gptq = undamped(factor, &loss, &w).await?;
            drop(w);
            let rtn = rtn_loss(prepared, factor, weight, whole).await?;
            Some(Losses { gptq, rtn })
        }
    };
    Ok(QuantizedRows {
        codes: codes.to_bytes().await?,
        scales: grid.scales.to_f32().await?,
        zeros: grid.zeros.to_f32().await?.iter().map(|&z| z as u8).collect(),
        dequantized,
        loss,
    })
}

/// Codes, u8 [rows, n] in natural columns, of `weight` [rows, n] on a grid that is there already, by the
/// loop of [`quantize_rows`].
///
/// # Errors
/// [`Error::Internal`] without a factor; those of the device.
pub fn codes_on_grid(prepared: &Prepared, weight: &Tensor, grid: &mut Grid) -> Result<Tensor> {
    let Some(factor) = prepared.factor.as_ref().filter(|_| !prepared.follows_order) else {
        return Err(Error::Internal("a grid that is there needs a factor and static groups".into()));
    };
    let mut codes = Tensor::zeros(weight.device(), Elem::U8, weight.shape())?;
    let mut loss = Tensor::zeros(weight.device(), Elem::F32, &[weight.rows()])?;
    compensate(prepared, factor, &mut gather(weight, &prepared.permuted)?, grid, &mut codes, &mut loss)?;
    Ok(codes)
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

/// The loss of rounding the same weights to nearest on min-max grids of the same kind:
/// tr(D(H+λI)Dᵀ) = ‖D·L‖², block column by block column.
async fn rtn_loss(prepared: &Prepared, factor: &Factor, weight: &Tensor, whole: Columns<'_>) -> Result<f64> {
    let (rows, n, device) = (weight.rows(), prepared.n, weight.device());
    let kind = GridKind { fit: Fit::MinMax, ..prepared.kind };
    let mut grid = Grid::new(device, rows, prepared.scheme.groups(n))?;
    scales::fit(kind, whole, &mut grid)?;
    let mut d = gather(weight, &prepared.permuted)?;
    let mut codes = Tensor::uninit(device, Elem::U8, &[rows, n])?;
    let mut sums = Tensor::zeros(device, Elem::F32, &[rows])?;
    round(kind, &prepared.rtn_columns, &mut d, &grid, &mut codes, &mut sums)?;
    for block in &factor.blocks {
        let width = block.end - block.start;
        let mut product = Tensor::uninit(device, Elem::F32, &[rows, width])?;
        let own = Mat::of(&d).part(0, block.start, rows, width);
        gemm(Target::of(&mut product), own, Mat::of(&block.square), Scaling::SET, None)?;
        if block.end < n {
            let rest = Mat::of(&d).part(0, block.end, rows, n - block.end);
            gemm(Target::of(&mut product), rest, Mat::of(&block.below), Scaling::ADD, None)?;
        }
        add_squares(&product, &mut sums)?;
    }
    undamped(factor, &sums, &d).await
}

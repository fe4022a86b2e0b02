//! One stage of a model: what its linear layers share, then each of them, some rows at a time.
//!
//! Linear layers that see the same inputs (q, k, v; gate, up) share one Hessian, one order of
//! columns and one factor: [`Prepared`]. Rows of a weight do not influence each other, so a weight
//! of any size goes through [`quantize_rows`] in pieces.

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::gptq::correction::Correction;
use crate::gptq::drift::Drift;
use crate::gptq::factor::{Factor, FactorBlock, factor};
use crate::gptq::held::Held;
use crate::gptq::order::Order;
use crate::gptq::scheme::{Alpha, Scheme};
use crate::kernels::add::add_scaled;
use crate::kernels::columns::{ZERO_COLUMN, gather};
use crate::kernels::dequant::dequantize;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::norm::add_squares;
use crate::kernels::refit;
use crate::kernels::scales::{self, Columns, Fit, Grid, GridKind, ScaleType};
use crate::kernels::sweep::{Block, sweep};
use crate::kernels::symmetric::{PANEL, SymmetricPanels, reordered};
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
    /// The same for plain rounding, whose groups are natural.
    rtn_group_of: Tensor,
    correction: Option<Correction>,
    /// For a refit.
    hessian: Option<SymmetricPanels>,
    held: Option<Held>,
}

/// What the calibration text says about a stage's inputs.
pub struct Calibration {
    /// (2/tokens)·XᵀX.
    pub hessian: SymmetricPanels,
    /// For a scheme with an [`Alpha`].
    pub drift: Option<Drift>,
    pub held: Option<Held>,
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

    /// All columns of `w` [rows, n], natural order, for a fit of scales.
    fn whole<'a>(&'a self, w: &'a Tensor) -> Columns<'a> {
        let group = self.scheme.group_len(self.n);
        Columns { w, importance: &self.importance, c0: 0, cols: self.n, group, first: 0 }
    }

    /// Group of each input column, natural order.
    pub fn g_idx(&self) -> &[u32] {
        &self.g_idx
    }
}

/// Orders the columns and factors the Hessian.
///
/// `inputs` is `None` only for a scheme that needs none, `n` then tells the columns. `place` names the stage
/// in messages.
///
/// # Errors
/// [`Error::Numeric`] when activations were not finite.
pub async fn prepare(
    scheme: &Scheme,
    scale_type: ScaleType,
    device: &Device,
    n: usize,
    inputs: Option<Calibration>,
    place: &str,
) -> Result<Prepared> {
    let (h, drift, held) = match inputs {
        Some(inputs) => (Some(inputs.hessian), inputs.drift, inputs.held),
        None => (None, None, None),
    };
    let mut diagonal = match &h {
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
    let order = if scheme.desc_act { Order::descending(&diagonal) } else { Order::natural(n) };
    let factor = match &h {
        Some(h) if scheme.needs_inputs() => factor(h, &order, &diagonal, scheme.damp_percent).await?,
        _ => None,
    };
    let correction = match (&h, drift) {
        (Some(h), Some(drift)) if factor.is_some() => Correction::new(h, &diagonal, drift).await?,
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
        rtn_group_of: Tensor::from_u32(device, &[n], (0..n as u32).map(|c| c / group as u32).collect())?,
        importance: Tensor::from_f32(device, &[n], diagonal)?,
        scheme: scheme.clone(),
        n,
        held: held.filter(|_| factor.is_some()),
        hessian: h.filter(|_| scheme.refit && factor.is_some()),
        correction,
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
    /// `None` without a factor.
    pub loss: Option<Losses>,
}

/// What rounding costs: tr(E·H·Eᵀ) with H = (2/tokens)·XᵀX, undamped.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Losses {
    /// E against what the sweep aimed at.
    pub gptq: f64,
    /// Rounded to nearest on min-max grids.
    pub rtn: f64,
    pub held: Option<HeldLosses>,
}

/// What is lost on held-out rows against the outputs of the original layer; see [`Held::loss`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeldLosses {
    pub rtn: f64,
    /// A sweep without a correction and without a refit.
    pub plain: f64,
    /// Of what was kept.
    pub kept: f64,
    /// By which share of the correction the weights were moved, times the number of rows.
    pub alpha: f64,
    pub choice: Choice,
}

/// What was kept of several candidates, from the most that was done to the least.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// With the correction and the refit that were asked for.
    #[default]
    Full,
    /// Without the refit.
    Swept,
    /// Without the correction.
    Plain,
    /// Rounded to nearest.
    Rtn,
}

impl Losses {
    /// Takes in those of other rows of the same weight.
    pub fn add(&mut self, other: Self) {
        self.gptq += other.gptq;
        self.rtn += other.rtn;
        self.held = match (self.held, other.held) {
            (Some(a), Some(b)) => Some(HeldLosses {
                rtn: a.rtn + b.rtn,
                plain: a.plain + b.plain,
                kept: a.kept + b.kept,
                alpha: a.alpha + b.alpha,
                choice: a.choice.max(b.choice),
            }),
            (a, b) => a.or(b),
        };
    }
}

/// One way to round some rows.
struct Rounded {
    codes: Tensor,
    grid: Grid,
    dequantized: Tensor,
    /// tr(E·H·Eᵀ); 0 without a factor.
    loss: f64,
}

/// Quantizes `weight` [rows, n], some rows of a linear layer as stored (f32, f16 or bf16).
///
/// # Errors
/// Those of the device.
pub async fn quantize_rows(prepared: &Prepared, weight: &Tensor) -> Result<QuantizedRows> {
    if weight.cols() != prepared.n {
        return Err(Error::Internal(format!("a weight {:?} for {} inputs", weight.shape(), prepared.n)));
    }
    let Some(factor) = &prepared.factor else {
        let target = gather(weight, &prepared.natural)?;
        return finished(swept(prepared, &target, None).await?, None).await;
    };
    let rtn = rounded(prepared, factor, weight).await?;
    let judge = match &prepared.held {
        Some(held) => Some(Judge { held, wanted: held.wanted(weight)? }),
        None => None,
    };
    let mut target = gather(weight, &prepared.natural)?;
    let alpha = match &prepared.correction {
        Some(correction) => {
            let z = correction.of(&target)?;
            let alpha = match (prepared.scheme.alpha, &judge) {
                (Alpha::Fixed(alpha), _) => alpha,
                (Alpha::Measured, Some(judge)) => judge.held.best_share(&judge.wanted, &target, &z).await?,
                (Alpha::Measured, None) => 0.0,
            };
            add_scaled(&mut target, &z, alpha as f32)?;
            alpha
        }
        None => 0.0,
    };
    let mut kept = swept(prepared, &target, None).await?;
    let mut losses = Losses { gptq: kept.loss, rtn: rtn.loss, held: None };
    let refitted = match &prepared.hessian {
        Some(hessian) => {
            let grid = refit(prepared, factor, hessian, &target, &kept).await?;
            Some(swept(prepared, &target, Some(grid)).await?)
        }
        None => None,
    };
    let Some(judge) = judge else {
        // The sums that a sweep minimizes have to do.
        if let Some(refitted) = refitted.filter(|refitted| refitted.loss < kept.loss) {
            losses.gptq = refitted.loss;
            kept = refitted;
        }
        return finished(kept, Some(losses)).await;
    };
    let mut held = HeldLosses { kept: judge.loss(&kept).await?, ..HeldLosses::default() };
    held.alpha = alpha * weight.rows() as f64;
    held.choice = Choice::Swept;
    held.rtn = judge.loss(&rtn).await?;
    held.plain = held.kept;
    let take = |candidate: Rounded, loss: f64, choice, kept: &mut Rounded, held: &mut HeldLosses| {
        if loss < held.kept {
            (held.kept, held.choice, *kept) = (loss, choice, candidate);
        }
    };
    if let Some(refitted) = refitted {
        let loss = judge.loss(&refitted).await?;
        take(refitted, loss, Choice::Full, &mut kept, &mut held);
    }
    if alpha > 0.0 {
        let plain = swept(prepared, &gather(weight, &prepared.natural)?, None).await?;
        held.plain = judge.loss(&plain).await?;
        take(plain, held.plain, Choice::Plain, &mut kept, &mut held);
    }
    // Rounding has its groups in natural order.
    if !prepared.scheme.needs_g_idx() {
        take(rtn, held.rtn, Choice::Rtn, &mut kept, &mut held);
    }
    losses.gptq = kept.loss;
    losses.held = Some(held);
    finished(kept, Some(losses)).await
}

/// Held-out rows, and what the original weight makes of them.
struct Judge<'a> {
    held: &'a Held,
    wanted: Tensor,
}

impl Judge<'_> {
    async fn loss(&self, rounded: &Rounded) -> Result<f64> {
        self.held.loss(&self.wanted, &rounded.dequantized).await
    }
}

async fn finished(rounded: Rounded, loss: Option<Losses>) -> Result<QuantizedRows> {
    Ok(QuantizedRows {
        codes: rounded.codes.to_bytes().await?,
        scales: rounded.grid.scales.to_f32().await?,
        zeros: rounded.grid.zeros.to_f32().await?.iter().map(|&z| z as u8).collect(),
        dequantized: rounded.dequantized,
        loss,
    })
}

/// Rounds `target` f32 [rows, n], natural columns, spreading errors where there is a factor; on `grid`, or
/// on one fitted here.
async fn swept(prepared: &Prepared, target: &Tensor, grid: Option<Grid>) -> Result<Rounded> {
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

/// Scales fitted to the codes of `from`, so that ‖(target − Ŵ)·L‖² is least; a pass over the groups.
async fn refit(
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
        let group = refit::Group { pull: &pull, push: &push, units: &units, c0, index };
        refit::refit(group, prepared.kind.scale_type, &mut scales, &mut errors)?;
    }
    Ok(Grid { scales, zeros: ones.zeros })
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

/// The same weights rounded to nearest on min-max grids of the same kind, and what that loses:
/// tr(D(H+λI)Dᵀ) = ‖D·L‖², block column by block column.
async fn rounded(prepared: &Prepared, factor: &Factor, weight: &Tensor) -> Result<Rounded> {
    let (rows, n, device) = (weight.rows(), prepared.n, weight.device());
    let kind = GridKind { fit: Fit::MinMax, ..prepared.kind };
    let mut grid = Grid::new(device, rows, prepared.scheme.groups(n))?;
    let natural = gather(weight, &prepared.natural)?;
    scales::fit(kind, prepared.whole(&natural), &mut grid)?;
    drop(natural);
    let mut d = gather(weight, &prepared.permuted)?;
    let mut codes = Tensor::zeros(device, Elem::U8, &[rows, n])?;
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
    let loss = undamped(factor, &sums, &d).await?;
    drop(d);
    let dequantized = dequantize(&codes, &grid, &prepared.rtn_group_of)?;
    Ok(Rounded { codes, grid, dequantized, loss })
}

//! One stage of a model: what its linear layers share, then each of them, some rows at a time.
//!
//! Linear layers that see the same inputs (q, k, v; gate, up) share one Hessian, one order of
//! columns and one factor: [`Prepared`]. Rows of a weight do not influence each other, so a weight
//! of any size goes through [`quantize_rows`] in pieces.

use std::ops::Range;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::gptq::awq::Scale;
use crate::gptq::correction::Correction;
use crate::gptq::drift::Drift;
use crate::gptq::factor::{Factor, factor};
use crate::gptq::held::Held;
use crate::gptq::order::Order;
use crate::gptq::refit::refined;
use crate::gptq::rounding::{Rounded, rounded, swept};
use crate::gptq::scheme::{Alpha, Scheme};
use crate::kernels::add::add_scaled;
use crate::kernels::columns::{ZERO_COLUMN, gather};
use crate::kernels::scales::{Columns, Fit, Grid, GridKind, ScaleType};
use crate::kernels::symmetric::SymmetricPanels;
use crate::tensor::Tensor;

/// What the linear layers of one stage share.
pub struct Prepared {
    pub(super) scheme: Scheme,
    pub(super) kind: GridKind,
    pub(super) n: usize,
    /// `None` for the preset rtn, and when no damping made H positive definite.
    pub(super) factor: Option<Factor>,
    /// Natural order, dead columns as [`ZERO_COLUMN`].
    pub(super) natural: Tensor,
    /// The same in the order's positions.
    pub(super) permuted: Tensor,
    /// How much an error of a column counts, natural order.
    pub(super) importance: Tensor,
    /// The same by position, [1, n].
    pub(super) permuted_importance: Tensor,
    /// u32 [n, 2] by position: natural column and group.
    pub(super) columns: Tensor,
    /// The same with natural groups, for the comparison with plain rounding.
    pub(super) rtn_columns: Tensor,
    /// Groups follow the order of columns; their scales are fitted when they begin.
    pub(super) follows_order: bool,
    /// Group of each natural column.
    pub(super) g_idx: Vec<u32>,
    pub(super) group_of: Tensor,
    /// The same for plain rounding, whose groups are natural.
    pub(super) rtn_group_of: Tensor,
    pub(super) correction: Option<Correction>,
    /// For refining.
    pub(super) hessian: Option<Rc<SymmetricPanels>>,
    pub(super) held: Option<Held>,
    /// What inputs are divided by, if they are.
    pub(super) scale: Option<Rc<Scale>>,
}

/// What the calibration text says about a stage's inputs.
pub struct Calibration {
    /// (2/tokens)·XᵀX.
    pub hessian: Rc<SymmetricPanels>,
    /// For a scheme with an [`Alpha`].
    pub drift: Option<Drift>,
    pub held: Option<Held>,
}

impl From<Rc<SymmetricPanels>> for Calibration {
    fn from(hessian: Rc<SymmetricPanels>) -> Self {
        Self { hessian, drift: None, held: None }
    }
}

impl Prepared {
    /// λ / mean(diag H) as used; `None` without a factor.
    pub fn damp_used(&self) -> Option<f64> {
        self.factor.as_ref().map(|factor| factor.damp_percent)
    }

    /// For weights W·diag(s) of inputs that were divided by s before anything was summed up of them.
    pub fn scaled(self, scale: Rc<Scale>) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// No damping helped: the layers are rounded to nearest instead.
    pub fn fell_back(&self) -> bool {
        self.scheme.needs_inputs() && self.factor.is_none()
    }

    /// All columns of `w` [rows, n], natural order, for a fit of scales.
    pub(super) fn whole<'a>(&'a self, w: &'a Tensor) -> Columns<'a> {
        let group = self.scheme.group_len(self.n);
        Columns { w, importance: &self.importance, c0: 0, cols: self.n, group, first: 0 }
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
    let order = |diagonal: &[f32]| match scheme.desc_act {
        true => Order::descending(diagonal),
        false => Order::natural(n),
    };
    prepare_in_order(scheme, scale_type, device, n, inputs, place, order).await
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
    inputs: Option<Calibration>,
    place: &str,
    order: impl FnOnce(&[f32]) -> Order,
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
    let order = order(&diagonal);
    let factor = match &h {
        Some(h) if scheme.needs_inputs() => factor(h, &order, &diagonal, scheme.damp_percent).await?,
        _ => None,
    };
    let kind = scheme.grid_kind(scale_type);
    let importance = match &factor {
        Some(factor) if scheme.refit && kind.fit == Fit::Weighted => {
            importance(&diagonal, &factor.pivots().await?, &order)
        }
        _ => diagonal.clone(),
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
        kind,
        natural: Tensor::from_u32(device, &[n], (0..n as u32).map(alive).collect())?,
        permuted: Tensor::from_u32(device, &[n], order.column.iter().map(|&c| alive(c)).collect())?,
        permuted_importance: Tensor::from_f32(
            device,
            &[1, n],
            order.column.iter().map(|&c| importance[c as usize]).collect(),
        )?,
        columns: table(&|c| g_idx[c as usize])?,
        rtn_columns: table(&|c| c / group as u32)?,
        group_of: Tensor::from_u32(device, &[n], g_idx.clone())?,
        rtn_group_of: Tensor::from_u32(device, &[n], (0..n as u32).map(|c| c / group as u32).collect())?,
        importance: Tensor::from_f32(device, &[n], importance)?,
        scheme: scheme.clone(),
        n,
        held: held.filter(|_| factor.is_some()),
        hessian: h.filter(|_| scheme.refit && factor.is_some()),
        correction,
        factor,
        follows_order,
        g_idx,
        scale: None,
    })
}

/// How much an error of a column counts in a search for scales that are fitted again behind the sweep, natural
/// order: between diag(H), as if no other column made up for it, and the pivot, as if all later ones could. Their
/// geometric mean serves such scales better than diag(H), and those that stay as they are worse (see
/// ARCHITECTURE.md).
fn importance(diagonal: &[f32], pivots: &[f32], order: &Order) -> Vec<f32> {
    let mut importance = diagonal.to_vec();
    for (&column, pivot) in order.column.iter().zip(pivots) {
        let own = &mut importance[column as usize];
        *own = (*own * pivot).sqrt();
    }
    importance
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

/// Quantizes `weight` [rows, n], rows `which` of a linear layer as stored (f32, f16 or bf16).
///
/// # Errors
/// Those of the device.
pub async fn quantize_rows(
    prepared: &Prepared,
    weight: &Tensor,
    which: Range<usize>,
) -> Result<QuantizedRows> {
    if weight.cols() != prepared.n {
        return Err(Error::Internal(format!("a weight {:?} for {} inputs", weight.shape(), prepared.n)));
    }
    let Some(factor) = &prepared.factor else {
        let target = gather(weight, &prepared.natural)?;
        return finished(swept(prepared, &target, None).await?, None).await;
    };
    let rtn = rounded(prepared, factor, weight, Fit::MinMax, None).await?;
    // What is compared with are weights that nothing was done to.
    let unscaled = match &prepared.scale {
        Some(scale) => Some(rounded(prepared, factor, weight, Fit::MinMax, Some(scale.undone())).await?),
        None => None,
    };
    let untouched = unscaled.as_ref().unwrap_or(&rtn);
    if !prepared.scheme.sweeps() {
        let rtn_loss = untouched.loss;
        let searched = rounded(prepared, factor, weight, prepared.kind.fit, None).await?;
        let kept = if searched.loss <= rtn.loss { searched } else { rtn };
        let losses = Losses { gptq: kept.loss, rtn: rtn_loss, held: None };
        return finished(kept, Some(losses)).await;
    }
    let judge = match &prepared.held {
        Some(held) => Some(Judge { held, wanted: held.wanted(weight, which.clone())? }),
        None => None,
    };
    let mut target = gather(weight, &prepared.natural)?;
    let alpha = match &prepared.correction {
        Some(correction) => {
            let z = correction.of(&target, which)?;
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
    let mut losses = Losses { gptq: kept.loss, rtn: untouched.loss, held: None };
    let refitted = match &prepared.hessian {
        Some(hessian) => Some(refined(prepared, factor, hessian, &target, &kept).await?),
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
    held.rtn = judge.loss(untouched).await?;
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
        let loss = if unscaled.is_some() { judge.loss(&rtn).await? } else { held.rtn };
        take(rtn, loss, Choice::Rtn, &mut kept, &mut held);
    }
    losses.gptq = kept.loss;
    losses.held = Some(held);
    finished(kept, Some(losses)).await
}

/// Codes, u8 [rows, n] in natural columns, of `weight` [rows, n] on a grid that is there already, by the
/// loop of [`quantize_rows`].
///
/// # Errors
/// [`Error::Internal`] without a factor; those of the device.
pub async fn codes_on_grid(prepared: &Prepared, weight: &Tensor, grid: Grid) -> Result<Tensor> {
    if prepared.factor.is_none() || prepared.follows_order {
        return Err(Error::Internal("a grid that is there needs a factor and static groups".into()));
    }
    Ok(swept(prepared, weight, Some(grid)).await?.codes)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::held::Goal;
    use crate::gptq::scheme::Preset;
    use crate::kernels::columns::copy;
    use crate::kernels::testing::{noise, test_gpu};

    const ROWS: usize = 40;
    const N: usize = 160;

    #[test]
    fn a_column_counts_between_its_diagonal_and_its_pivot() {
        let order = Order { column: vec![2, 0, 1] };
        assert_eq!(importance(&[4.0, 9.0, 16.0], &[9.0, 1.0, 4.0], &order), [2.0, 6.0, 12.0]);
    }

    /// Inputs with a few strong directions, [tokens, N].
    fn inputs(tokens: usize, seed: u64) -> Vec<f32> {
        let (strengths, mix) = (noise(tokens * 8, seed), noise(8 * N, 77));
        let mut x: Vec<f32> = noise(tokens * N, seed + 1).iter().map(|x| 0.3 * x).collect();
        for (x, strengths) in x.chunks_mut(N).zip(strengths.chunks(8)) {
            for (strength, direction) in strengths.iter().zip(mix.chunks(N)) {
                x.iter_mut().zip(direction).for_each(|(x, d)| *x += strength * d);
            }
        }
        x
    }

    /// What an earlier layer's rounding may have made of them: something of each column is now another's.
    fn drifted(x: &[f32], seed: u64) -> Vec<f32> {
        let other = noise(x.len(), seed);
        let shifted = |i: usize| x[i / N * N + (i % N + 1) % N];
        (0..x.len()).map(|i| 0.9 * x[i] + 0.15 * shifted(i) + 0.05 * other[i]).collect()
    }

    fn quantize(device: &Device, scheme: &Scheme, [sum, held]: [&[f32]; 2]) -> QuantizedRows {
        let tensor = |x: &[f32]| Tensor::from_f32(device, &[x.len() / N, N], x.to_vec()).unwrap();
        let (seen, original) = (tensor(&drifted(sum, 5)), tensor(sum));
        let scale = 2.0 / seen.rows() as f32;
        let mut hessian = SymmetricPanels::zeros(device, N).unwrap();
        hessian.accumulate(&seen, scale).unwrap();
        let mut drift = Drift::of_inputs(device, N).unwrap();
        let mut difference = copy(&original).unwrap();
        add_scaled(&mut difference, &seen, -1.0).unwrap();
        drift.accumulate(&difference, &seen, scale).unwrap();
        let calibration = Calibration {
            hessian: Rc::new(hessian),
            drift: scheme.needs_original().then_some(drift),
            held: Some(Held { seen: tensor(&drifted(held, 6)), goal: Goal::Inputs(tensor(held)) }),
        };
        pollster::block_on(async {
            let prepared =
                prepare(scheme, ScaleType::F16, device, N, Some(calibration), "test").await.unwrap();
            quantize_rows(&prepared, &tensor(&noise(ROWS * N, 3)), 0..ROWS).await.unwrap()
        })
    }

    fn scheme(alpha: Alpha, refit: bool) -> Scheme {
        Scheme { alpha, refit, ..Scheme::preset(Preset::Default, 3, Some(32)) }
    }

    #[test]
    fn a_correction_and_a_refit_lose_less_on_rows_they_never_saw() {
        let (sum, held) = (inputs(1200, 10), inputs(150, 20));
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let of = |alpha, refit| {
                let loss = quantize(device, &scheme(alpha, refit), [&sum, &held]).loss.unwrap();
                println!("{} {alpha:?} {refit}: {loss:?}", device.describe());
                loss.held.unwrap()
            };
            let plain = of(Alpha::Fixed(0.0), false);
            let corrected = of(Alpha::Measured, false);
            let both = of(Alpha::Measured, true);
            assert!(plain.kept < 0.8 * plain.rtn);
            assert_eq!((plain.kept, plain.choice), (plain.plain, Choice::Swept));
            assert!(corrected.alpha > 0.5 * ROWS as f64 && corrected.choice == Choice::Swept);
            assert!(corrected.kept < 0.5 * plain.kept);
            assert!((corrected.plain / plain.plain - 1.0).abs() < 1e-3);
            assert!(both.kept <= corrected.kept);
        }
    }

    /// A sweep for inputs that say nothing about those that come.
    #[test]
    fn what_rounding_does_better_is_left_to_it() {
        let (sum, held) = (inputs(6, 10), noise(150 * N, 30));
        let scheme = Scheme { damp_percent: 1e-4, mse: false, ..scheme(Alpha::Measured, true) };
        let kept = quantize(&Device::Cpu, &scheme, [&sum, &held]);
        let loss = kept.loss.unwrap().held.unwrap();
        assert_eq!(loss.choice, Choice::Rtn, "{loss:?}");
        assert!(loss.kept == loss.rtn && loss.rtn < loss.plain, "{loss:?}");
        let rtn = Scheme::preset(Preset::Rtn, 3, Some(32));
        let rtn = quantize(&Device::Cpu, &rtn, [&sum, &held]);
        assert!(kept.codes == rtn.codes && kept.scales == rtn.scales);
    }
}

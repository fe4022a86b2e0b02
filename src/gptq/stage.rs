//! One stage of a model: what its linear layers share.
//!
//! Linear layers that see the same inputs (q, k, v; gate, up) share one Hessian, one order of
//! columns and one factor: [`Prepared`]. What is done to each is [`quantize_rows`].
//!
//! [`quantize_rows`]: crate::gptq::rows::quantize_rows

use std::rc::Rc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::gptq::awq::Scale;
use crate::gptq::correction::Correction;
use crate::gptq::drift::Drift;
use crate::gptq::factor::{Factor, factor};
use crate::gptq::held::Held;
use crate::gptq::order::Order;
use crate::gptq::scheme::Scheme;
use crate::kernels::columns::ZERO_COLUMN;
use crate::kernels::scales::{Columns, Fit, GridKind, ScaleType};
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
    /// For a scheme with an [`Alpha`](crate::gptq::scheme::Alpha).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_counts_between_its_diagonal_and_its_pivot() {
        let order = Order { column: vec![2, 0, 1] };
        assert_eq!(importance(&[4.0, 9.0, 16.0], &[9.0, 1.0, 4.0], &order), [2.0, 6.0, 12.0]);
    }
}

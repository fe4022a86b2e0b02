//! What rounding a layer cost, and which of several ways to do it was kept.

use serde::{Deserialize, Serialize};

/// What rounding costs: tr(E·H·Eᵀ) with H = (2/tokens)·XᵀX, undamped.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Losses {
    /// E against what the sweep aimed at.
    pub gptq: f64,
    /// Rounded to nearest on min-max grids.
    pub rtn: f64,
    pub held: Option<HeldLosses>,
}

/// What is lost on held-out rows against what the layer should give: (2/tokens)·Σ‖y − Ŵ·x̃‖².
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeldLosses {
    pub rtn: f64,
    /// A sweep without a correction and without a refit; of a large layer told by some of its rows.
    pub plain: f64,
    /// Of what was kept.
    pub kept: f64,
    /// By which share of the correction the weights that were kept had been moved, times the number of rows.
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

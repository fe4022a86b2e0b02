//! What is asked of the quantizer: one struct, four named points in it.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::face;
use crate::kernels::scales::{Fit, GridKind, ScaleType};

/// A named point in [`Scheme`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// Aims at the original model's outputs and refines what the sweep leaves.
    Default,
    /// One sweep without the original beside: static scales searched with the inputs' importance, columns by
    /// falling importance.
    Fast,
    /// What the original GPTQ program does.
    Reference,
    /// Round to nearest: no calibration, min-max scales.
    Rtn,
    /// Inputs scaled by their size, then round to nearest on searched scales.
    Awq,
}

/// Whether weights are scaled column by column before they are rounded, and inputs divided in turn; see
/// [`crate::gptq::awq`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scaling {
    #[default]
    None,
    /// By a power of the inputs' mean magnitude.
    Awq,
}

impl Scaling {
    /// As a person writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Awq => "awq",
        }
    }
}

/// How far weights are moved before they are rounded, so that a layer makes of the quantized model's
/// activations what the original makes of its own; see [`crate::gptq::correction`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Alpha {
    /// By this share, 0 to 1.
    Fixed(f64),
    /// By the share that serves the held-out rows best.
    Measured,
}

impl Preset {
    /// As a person writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Fast => "fast",
            Self::Reference => "reference",
            Self::Rtn => "rtn",
            Self::Awq => "awq",
        }
    }
}

/// How one linear layer is quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scheme {
    pub preset: Preset,
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// Input columns that share a scale; `None` (written −1) is the whole row.
    pub group_size: Option<usize>,
    /// Zero point fixed in the middle, or fitted.
    pub sym: bool,
    /// Take columns by falling diag(H) instead of in natural order.
    pub desc_act: bool,
    /// Groups of neighbouring columns with scales from the original weights. Otherwise groups follow
    /// the order in which columns are taken and scales are fitted when a group begins.
    pub static_groups: bool,
    /// Search scales instead of taking min-max.
    pub mse: bool,
    /// λ as a share of mean(diag H).
    pub damp_percent: f64,
    /// Aim at the outputs of the original model.
    pub alpha: Alpha,
    /// After the sweep fit scales to the codes and move codes, group by group.
    pub refit: bool,
    #[serde(default)]
    pub scaling: Scaling,
}

/// What a person may choose of a [`Scheme`].
#[derive(Debug, Clone)]
pub struct Choice {
    pub preset: Preset,
    pub bits: u32,
    pub group_size: i64,
    pub sym: bool,
    pub desc_act: Option<bool>,
    pub static_groups: Option<bool>,
    pub mse: Option<bool>,
    pub damp_percent: Option<f64>,
    pub alpha: Option<Alpha>,
    pub refit: Option<bool>,
    pub scaling: Option<Scaling>,
}

/// The bit widths that the file formats know.
pub const BITS: [u32; 4] = [2, 3, 4, 8];

impl Scheme {
    pub fn preset(preset: Preset, bits: u32, group_size: Option<usize>) -> Self {
        let plain = Self {
            preset,
            bits,
            group_size,
            sym: true,
            desc_act: false,
            static_groups: false,
            mse: false,
            damp_percent: 0.01,
            alpha: Alpha::Fixed(0.0),
            refit: false,
            scaling: Scaling::None,
        };
        let fast = Self { desc_act: true, static_groups: true, mse: true, ..plain.clone() };
        match preset {
            // What is fitted closer to the calibration text needs to be held back more from it.
            Preset::Default => Self { alpha: Alpha::Measured, refit: true, damp_percent: 0.05, ..fast },
            Preset::Fast => fast,
            Preset::Reference => plain,
            Preset::Rtn => Self { static_groups: true, ..plain },
            Preset::Awq => Self { static_groups: true, mse: true, scaling: Scaling::Awq, ..plain },
        }
    }

    /// The scheme that a person's choices make: those left out are the preset's. `group_size` is −1 for
    /// one group per row.
    ///
    /// # Errors
    /// [`Error::Options`] for choices that make no sense, alone or together.
    pub fn chosen(choice: &Choice) -> Result<Self> {
        let group_size = Self::group_size_of(choice.group_size)?;
        let base = Self::preset(choice.preset, choice.bits, group_size);
        let mut scheme = Self {
            sym: choice.sym,
            desc_act: choice.desc_act.unwrap_or(base.desc_act),
            static_groups: choice.static_groups.unwrap_or(base.static_groups),
            mse: choice.mse.unwrap_or(base.mse),
            damp_percent: choice.damp_percent.unwrap_or(base.damp_percent),
            alpha: choice.alpha.unwrap_or(base.alpha),
            scaling: choice.scaling.unwrap_or(base.scaling),
            ..base
        };
        scheme.refit = choice.refit.unwrap_or(scheme.refit && scheme.can_refit());
        scheme.check()?;
        if choice.damp_percent.is_some() && !scheme.sweeps() {
            return Err(Error::options(
                format!(
                    "{} {} spreads no errors, for which {} is",
                    face::PRESET,
                    scheme.preset.name(),
                    face::DAMP_PERCENT
                ),
                format!("Leave out {}", face::DAMP_PERCENT),
            ));
        }
        Ok(scheme)
    }

    /// [`Scheme::group_size`] of the number that files and options have: −1 for one group per row.
    ///
    /// # Errors
    /// [`Error::Options`] for other negative numbers.
    pub fn group_size_of(number: i64) -> Result<Option<usize>> {
        match number {
            -1 => Ok(None),
            size => usize::try_from(size).map(Some).map_err(|_| {
                Error::options(
                    format!("{} {size} is not a size", face::GROUP_SIZE),
                    format!("Use {}, or a number of columns such as 128", face::WHOLE_ROW),
                )
            }),
        }
    }

    /// Refuses what no file can hold or no arithmetic can do.
    ///
    /// # Errors
    /// [`Error::Options`].
    pub fn check(&self) -> Result<()> {
        if !BITS.contains(&self.bits) {
            return Err(Error::options(
                format!("{} {} is not supported", face::BITS, self.bits),
                "Use 2, 3, 4 or 8, or for all layers together an average between 2 and 8 such as 3.5",
            ));
        }
        if self.group_size == Some(0) {
            return Err(Error::options(
                format!("{} 0 makes no groups", face::GROUP_SIZE),
                format!("Use {} for one group per row, or 32, 64, 128", face::WHOLE_ROW),
            ));
        }
        if !(self.damp_percent > 0.0 && self.damp_percent <= 1.0) {
            return Err(Error::options(
                format!("{} {} is out of range", face::DAMP_PERCENT, self.damp_percent),
                "Use a number above 0 and at most 1; 0.01 is usual",
            ));
        }
        if let Alpha::Fixed(alpha) = self.alpha
            && !(0.0..=1.0).contains(&alpha)
        {
            return Err(Error::options(
                format!("{} {alpha} is out of range", face::ALPHA),
                format!("Use a number from 0 (off) to 1, or {}", face::MEASURED_ALPHA),
            ));
        }
        if !self.needs_inputs() && self.scaling != Scaling::None {
            return Err(Error::options(
                format!("{} rtn looks at no activations, which {} needs", face::PRESET, face::SCALING),
                format!("Use {} awq", face::PRESET),
            ));
        }
        if !self.sweeps() && (self.needs_original() || self.refit) {
            return Err(Error::options(
                format!("{} {} rounds each weight for itself", face::PRESET, self.preset.name()),
                format!("Leave out {} and {}", face::ALPHA, face::REFIT),
            ));
        }
        if self.refit && !self.can_refit() {
            return Err(Error::options(
                format!("{} fits the scales of static groups", face::REFIT),
                format!("Leave it out, or add {}", face::STATIC_GROUPS),
            ));
        }
        if !self.sweeps() && (self.desc_act || !self.static_groups) {
            return Err(Error::options(
                format!(
                    "{} {} takes no order of columns and has static groups only",
                    face::PRESET,
                    self.preset.name()
                ),
                format!(
                    "Leave out {} and {}, or choose {} reference",
                    face::DESC_ACT,
                    face::STATIC_GROUPS,
                    face::PRESET
                ),
            ));
        }
        Ok(())
    }

    /// Whether calibration text is needed at all.
    pub fn needs_inputs(&self) -> bool {
        self.preset != Preset::Rtn
    }

    /// Whether each column's rounding error is spread over those still to come.
    pub fn sweeps(&self) -> bool {
        !matches!(self.preset, Preset::Rtn | Preset::Awq)
    }

    /// Whether the original model's activations are needed beside the quantized one's.
    pub fn needs_original(&self) -> bool {
        self.alpha != Alpha::Fixed(0.0)
    }

    /// Whether some calibration rows are kept out of the Hessian to judge by: what rounding or a plain sweep
    /// does better is left to them.
    pub fn needs_held(&self) -> bool {
        self.needs_original() || self.refit || self.sweeps() && self.scaling != Scaling::None
    }

    /// Whether scales are there before the sweep, so that they can be fitted again.
    pub fn can_refit(&self) -> bool {
        self.static_groups || self.group_size.is_none()
    }

    /// Groups of a row of `n` columns.
    pub fn groups(&self, n: usize) -> usize {
        self.group_size.map_or(1, |size| n.div_ceil(size))
    }

    pub fn group_len(&self, n: usize) -> usize {
        self.group_size.unwrap_or(n).min(n)
    }

    /// Scales that follow the permuted order need a g_idx; all others are k / group_size.
    pub fn needs_g_idx(&self) -> bool {
        self.desc_act && !self.static_groups && self.group_size.is_some()
    }

    pub fn grid_kind(&self, scale_type: ScaleType) -> GridKind {
        let fit = match (self.mse, self.preset) {
            (false, _) => Fit::MinMax,
            (true, Preset::Reference) => Fit::Mse,
            (true, _) => Fit::Weighted,
        };
        GridKind { bits: self.bits, sym: self.sym, fit, scale_type }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHOICE: Choice = Choice {
        preset: Preset::Default,
        bits: 4,
        group_size: 128,
        sym: true,
        desc_act: None,
        static_groups: None,
        mse: None,
        damp_percent: None,
        alpha: None,
        refit: None,
        scaling: None,
    };

    #[test]
    fn damping_is_the_presets_unless_it_is_chosen() {
        let damping = |preset, damp_percent| {
            Scheme::chosen(&Choice { preset, damp_percent, ..CHOICE }).unwrap().damp_percent
        };
        assert_eq!(damping(Preset::Default, None), 0.05);
        assert_eq!(damping(Preset::Fast, None), 0.01);
        assert_eq!(damping(Preset::Reference, None), 0.01);
        assert_eq!(damping(Preset::Default, Some(0.2)), 0.2);
    }

    #[test]
    fn scales_that_follow_the_order_are_not_refitted_unless_that_is_asked_for() {
        assert!(Scheme::chosen(&CHOICE).unwrap().refit);
        let following = Choice { static_groups: Some(false), ..CHOICE };
        let scheme = Scheme::chosen(&following).unwrap();
        assert!(!scheme.refit && scheme.alpha == Alpha::Measured);
        assert!(Scheme::chosen(&Choice { group_size: -1, ..following.clone() }).unwrap().refit);
        let error = Scheme::chosen(&Choice { refit: Some(true), ..following }).unwrap_err();
        assert!(error.to_string().contains("--refit"), "{error}");
    }
}

//! Bits per weight: one width for all layers, or an average that layers of several widths make together.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::allocation::Allocation;
use crate::error::{Error, Result};
use crate::face;
use crate::gptq::scheme::BITS;

/// What a person chooses; a number as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub enum Bits {
    /// Of every layer; [`Scheme::check`](crate::gptq::scheme::Scheme::check) says whether there is such.
    Width(u32),
    Average(Average),
}

/// Bits per weight on average, in hundredths: it is counted with, and must come back from JSON as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Average(u32);

/// Layers of several widths: how many bits are asked for, and which layer has how many once that is settled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mixed {
    pub average: Average,
    pub allocation: Option<Allocation>,
}

impl From<Average> for Mixed {
    fn from(average: Average) -> Self {
        Self { average, allocation: None }
    }
}

impl Bits {
    /// Whole numbers are widths, others averages.
    ///
    /// # Errors
    /// [`Error::Options`] for what is neither.
    pub fn new(number: f64) -> Result<Self> {
        let hundredths = (100.0 * number).round();
        let wrong = |problem: &str| {
            let written = if number.abs() < 1e9 { number.to_string() } else { format!("{number:e}") };
            let problem = format!("{} {written} {problem}", face::BITS);
            Err(Error::options(problem, "Use 2, 3, 4 or 8, or an average between 2 and 8 such as 3.5"))
        };
        if !(0.0..1e6).contains(&number) {
            return wrong("is not supported");
        }
        if (hundredths - 100.0 * number).abs() > 1e-6 {
            return wrong("has more than two decimals");
        }
        let hundredths = hundredths as u32;
        if hundredths.is_multiple_of(100) {
            return Ok(Self::Width(hundredths / 100));
        }
        if hundredths < 100 * BITS[0] || hundredths > 100 * BITS[BITS.len() - 1] {
            return wrong("is not supported");
        }
        Ok(Self::Average(Average(hundredths)))
    }

    /// For a scheme, before layers are known.
    pub fn width(self) -> u32 {
        match self {
            Self::Width(width) => width,
            Self::Average(average) => average.width_above(),
        }
    }

    pub fn average(self) -> Option<Average> {
        match self {
            Self::Width(_) => None,
            Self::Average(average) => Some(average),
        }
    }
}

impl Average {
    /// Bits that so many weights may have together.
    pub fn budget(self, weights: u64) -> u64 {
        (u128::from(weights) * u128::from(self.0) / 100) as u64
    }

    fn width_above(self) -> u32 {
        BITS.into_iter().find(|width| 100 * width >= self.0).unwrap_or(BITS[BITS.len() - 1])
    }
}

impl TryFrom<f64> for Bits {
    type Error = String;

    fn try_from(number: f64) -> Result<Self, String> {
        Self::new(number).map_err(|error| error.to_string())
    }
}

impl From<Bits> for f64 {
    fn from(bits: Bits) -> Self {
        match bits {
            Bits::Width(width) => width.into(),
            Bits::Average(average) => average.into(),
        }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f64::from(*self).fmt(f)
    }
}

impl TryFrom<f64> for Average {
    type Error = String;

    fn try_from(number: f64) -> Result<Self, String> {
        let bits = Bits::try_from(number)?;
        bits.average().ok_or_else(|| format!("{number} is a width, not an average"))
    }
}

impl From<Average> for f64 {
    fn from(average: Average) -> Self {
        f64::from(average.0) / 100.0
    }
}

impl fmt::Display for Average {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f64::from(*self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_widths_and_others_averages() {
        assert_eq!(Bits::new(4.0).unwrap(), Bits::Width(4));
        // There is no such width, and the scheme says so.
        assert_eq!(Bits::new(5.0).unwrap(), Bits::Width(5));
        for (number, width) in [(2.01, 3), (2.5, 3), (3.35, 4), (4.5, 8), (7.99, 8)] {
            let bits = Bits::new(number).unwrap();
            assert_eq!((bits.to_string(), bits.width()), (number.to_string(), width));
            let text = serde_json::to_string(&bits).unwrap();
            assert_eq!(serde_json::from_str::<Bits>(&text).unwrap(), bits);
            let mixed = Mixed::from(bits.average().unwrap());
            let text = serde_json::to_string(&mixed).unwrap();
            assert_eq!(serde_json::from_str::<Mixed>(&text).unwrap(), mixed);
        }
        for (number, word) in [
            (1.9, "--bits 1.9 is not supported"),
            (8.01, "8.01"),
            (-3.5, "-3.5"),
            (1e300, "--bits 1e300 is"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
            (3.333, "more than two decimals"),
        ] {
            let message = Bits::new(number).unwrap_err().to_string();
            assert!(message.contains(word) && message.contains("such as 3.5"), "{message}");
        }
        assert!(serde_json::from_str::<Average>("4").is_err());
    }

    #[test]
    fn a_budget_is_never_above_the_average() {
        let Bits::Average(average) = Bits::new(3.33).unwrap() else { panic!("a width") };
        assert_eq!((average.budget(100), average.budget(7)), (333, 23));
        assert_eq!(
            average.budget(u64::MAX / 8),
            (u64::MAX / 8 / 100 * 333) + (u64::MAX / 8 % 100) * 333 / 100
        );
    }
}

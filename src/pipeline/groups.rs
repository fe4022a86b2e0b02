//! How many columns share a scale: one number for all layers, or for each the largest that divides it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::face;

/// What a person chooses. As text and as JSON a number, −1 for one group per row, or `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "serde_json::Value")]
pub enum Groups {
    Size(i64),
    /// For each layer the first of [`SIZES`] that divides its inputs, or else the whole row.
    Auto,
}

/// The largest first. Marlin takes all but the last, which slower kernels have; none takes a larger one.
pub const SIZES: [usize; 4] = [128, 64, 32, 16];

impl Groups {
    /// For a scheme, before layers are known.
    pub fn size(self) -> i64 {
        match self {
            Self::Size(size) => size,
            Self::Auto => SIZES[0] as i64,
        }
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(size) => size.fmt(f),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for Groups {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Size).map_err(|_| "neither a number nor auto".to_owned()),
        }
    }
}

impl TryFrom<serde_json::Value> for Groups {
    type Error = String;

    fn try_from(value: serde_json::Value) -> Result<Self, String> {
        match value.as_i64() {
            Some(size) => Ok(Self::Size(size)),
            None => value.as_str().unwrap_or_default().parse(),
        }
        .map_err(|problem| format!("{} {value}: {problem}", face::GROUP_SIZE))
    }
}

impl From<Groups> for serde_json::Value {
    fn from(groups: Groups) -> Self {
        match groups {
            Groups::Size(size) => size.into(),
            Groups::Auto => "auto".into(),
        }
    }
}

/// The largest legal size for a layer of so many inputs; `None` is the whole row.
pub fn largest(in_features: usize) -> Option<usize> {
    SIZES.into_iter().find(|size| in_features.is_multiple_of(*size))
}

/// What most layers have, of equally many the largest: that which needs no mention.
pub fn most_common<T: Ord + Copy>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts.into_iter().max_by_key(|(value, count)| (*count, *value)).map(|(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_largest_that_divide() {
        for (inputs, size) in
            [(576, Some(64)), (1536, Some(128)), (80, Some(16)), (96, Some(32)), (100, None)]
        {
            assert_eq!(largest(inputs), size, "{inputs}");
        }
        assert_eq!(most_common([Some(64), Some(128), Some(64), None].into_iter()), Some(Some(64)));
        assert_eq!(most_common([Some(64), Some(128)].into_iter()), Some(Some(128)));
        assert_eq!(most_common([None, None, Some(128)].into_iter()), Some(None));
        assert_eq!(most_common(std::iter::empty::<u32>()), None);
    }

    #[test]
    fn a_choice_is_read_as_it_is_shown() {
        for groups in [Groups::Size(128), Groups::Size(-1), Groups::Auto] {
            assert_eq!(groups.to_string().parse(), Ok(groups));
            assert_eq!(
                serde_json::from_str::<Groups>(&serde_json::to_string(&groups).unwrap()).unwrap(),
                groups
            );
        }
        assert!("many".parse::<Groups>().is_err() && serde_json::from_str::<Groups>("1.5").is_err());
    }
}

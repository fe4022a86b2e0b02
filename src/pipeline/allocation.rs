//! Which layers get how many bits, so that the average is kept and as little as possible is lost.
//!
//! Layers that serving engines make one of are one [`Unit`]. Given what each unit loses at each width, the
//! least sum within a budget is a knapsack with a choice for each item, solved exactly: by dynamic programming
//! over the units and the bits spent, in units of the greatest common divisor of all steps. Only where that
//! gives too many steps are they rounded up to coarser ones, and what is left over spent one unit at a time.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bits::Average;
use crate::error::{Error, Result};
use crate::face;
use crate::model::arch::EXPERT_STAGES;

/// Layers that have the same width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Number of the block; of the output head the number after the last.
    pub block: usize,
    /// What they are in the block, as [`kind`] says.
    pub kind: String,
    pub modules: Vec<String>,
    pub weights: u64,
    /// That its shapes can be stored with, rising.
    pub widths: Vec<u32>,
}

/// What a stage's layers are called in an allocation: its name, but all experts of a block are one, since
/// serving engines make one layer of them.
pub fn kind(stage: &'static str) -> &'static str {
    if EXPERT_STAGES.contains(&stage) { "experts" } else { stage }
}

/// The width of every unit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    pub average: Average,
    pub shares: Vec<Share>,
}

/// What an allocation gives to layers of one kind.
#[derive(Debug, Clone, Serialize)]
pub struct OfKind {
    pub kind: String,
    /// Units by width.
    pub counts: BTreeMap<u32, usize>,
    /// Bits per weight.
    pub average: f64,
}

/// A [`Unit`]'s width.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Share {
    pub block: usize,
    pub kind: String,
    pub weights: u64,
    pub bits: u32,
    /// By width, what the unit was found to lose; see [`super::sensitivity`].
    pub errors: BTreeMap<u32, f64>,
}

impl Allocation {
    /// For units that lose `errors`, by unit and by its widths.
    ///
    /// # Errors
    /// [`Error::Options`] for an average that cannot be kept.
    pub fn new(average: Average, units: &[Unit], errors: &[Vec<f64>]) -> Result<Self> {
        let widths = allocate(average, units, errors)?;
        let share = |((unit, bits), errors): ((&Unit, u32), &Vec<f64>)| Share {
            block: unit.block,
            kind: unit.kind.clone(),
            weights: unit.weights,
            bits,
            errors: unit.widths.iter().copied().zip(errors.iter().copied()).collect(),
        };
        Ok(Self { average, shares: units.iter().zip(widths).zip(errors).map(share).collect() })
    }

    /// For units of which nothing is known yet but that an error falls by four with each bit: its average is
    /// that of the allocation to come.
    ///
    /// # Errors
    /// As [`Allocation::new`].
    pub fn assumed(average: Average, units: &[Unit]) -> Result<Self> {
        let error = |unit: &Unit, &width: &u32| unit.weights as f64 * 0.25f64.powi(width as i32);
        let errors: Vec<Vec<f64>> =
            units.iter().map(|unit| unit.widths.iter().map(|width| error(unit, width)).collect()).collect();
        let mut assumed = Self::new(average, units, &errors)?;
        assumed.shares.iter_mut().for_each(|share| share.errors.clear());
        Ok(assumed)
    }

    /// The width of layers of that [`kind`].
    pub fn bits(&self, block: usize, kind: &str) -> Option<u32> {
        self.shares.iter().find(|share| share.block == block && share.kind == kind).map(|share| share.bits)
    }

    /// Bits per weight on average.
    pub fn reached(&self) -> f64 {
        average(self.shares.iter())
    }

    /// In the order in which kinds come in a block.
    pub fn by_kind(&self) -> Vec<OfKind> {
        let mut kinds: Vec<&str> = Vec::new();
        for share in &self.shares {
            if !kinds.contains(&share.kind.as_str()) {
                kinds.push(&share.kind);
            }
        }
        let of_kind = |kind: &str| {
            let shares = || self.shares.iter().filter(|share| share.kind == kind);
            let mut counts = BTreeMap::new();
            shares().for_each(|share| *counts.entry(share.bits).or_default() += 1);
            OfKind { kind: kind.to_owned(), counts, average: average(shares()) }
        };
        kinds.into_iter().map(of_kind).collect()
    }
}

fn average<'a>(shares: impl Iterator<Item = &'a Share>) -> f64 {
    let (bits, weights) = shares.fold((0, 0), |(bits, weights), share| {
        (bits + u64::from(share.bits) * share.weights, weights + share.weights)
    });
    bits as f64 / weights.max(1) as f64
}

/// Steps of the budget at most: with some hundred units a few ten million sums.
const MOST_STEPS: u64 = 1 << 16;

/// The width of each unit: the least sum of `errors` of all that keep the average.
fn allocate(average: Average, units: &[Unit], errors: &[Vec<f64>]) -> Result<Vec<u32>> {
    if units.is_empty() {
        return Err(Error::options(
            format!("{} {average} is an average, and no layer is left to choose its bits", face::BITS),
            format!("Give {} a width, or say less by {} and {}", face::BITS, face::OVERRIDE, face::SKIP),
        ));
    }
    let budget = average.budget(units.iter().map(|unit| unit.weights).sum());
    let least: u64 = units.iter().map(|unit| cost(unit, 0)).sum();
    let Some(spare) = budget.checked_sub(least) else {
        return Err(Error::options(
            format!(
                "{} {average} cannot be kept: the shapes of some layers cannot be stored with so few bits",
                face::BITS
            ),
            format!("Use more bits, or {}", face::AS_COMPRESSED),
        ));
    };
    let errors: Vec<Vec<f64>> = errors.iter().map(|errors| falling(errors)).collect();
    let mut chosen = knapsack(units, &errors, spare);
    let spent: u64 = units.iter().zip(&chosen).map(|(unit, &at)| cost(unit, at)).sum();
    spend(units, &errors, &mut chosen, budget.saturating_sub(spent));
    Ok(units.iter().zip(chosen).map(|(unit, at)| unit.widths[at]).collect())
}

/// Bits of a unit with the `at`-th of its widths.
fn cost(unit: &Unit, at: usize) -> u64 {
    unit.weights * u64::from(unit.widths[at])
}

/// What more bits lose is less: a measurement that says otherwise is noise.
fn falling(errors: &[f64]) -> Vec<f64> {
    let mut falling: Vec<f64> = Vec::with_capacity(errors.len());
    for &error in errors {
        falling.push(falling.last().map_or(error, |last| error.min(0.99 * last)));
    }
    falling
}

/// For each unit the place of its width, with at most `spare` bits beyond what the smallest widths take.
fn knapsack(units: &[Unit], errors: &[Vec<f64>], spare: u64) -> Vec<usize> {
    let beyond = |unit: &Unit, at: usize| cost(unit, at) - cost(unit, 0);
    let mut step = 0;
    for unit in units {
        (1..unit.widths.len()).for_each(|at| step = gcd(step, beyond(unit, at)));
    }
    if step == 0 {
        return vec![0; units.len()];
    }
    let step = step.max((spare / MOST_STEPS / step + 1) * step);
    let steps = (spare / step) as usize;
    // sums[s] is the least error of the units so far that spend at most s steps.
    let mut sums = vec![0.0; steps + 1];
    let mut taken = Vec::with_capacity(units.len());
    for (unit, errors) in units.iter().zip(errors) {
        let costs: Vec<usize> =
            (0..unit.widths.len()).map(|at| beyond(unit, at).div_ceil(step) as usize).collect();
        let mut next = vec![f64::INFINITY; steps + 1];
        let mut from = vec![0u8; steps + 1];
        for (at, (&cost, &error)) in costs.iter().zip(errors).enumerate() {
            for (s, &before) in sums.iter().enumerate().take((steps + 1).saturating_sub(cost)) {
                if before + error < next[s + cost] {
                    (next[s + cost], from[s + cost]) = (before + error, at as u8);
                }
            }
        }
        taken.push((costs, from));
        sums = next;
    }
    let mut left = steps;
    let mut chosen: Vec<usize> = Vec::with_capacity(units.len());
    for (costs, from) in taken.iter().rev() {
        let at = usize::from(from[left]);
        left -= costs[at];
        chosen.push(at);
    }
    chosen.reverse();
    chosen
}

/// Gives `left` bits to the units that gain most by a bit, one after another.
fn spend(units: &[Unit], errors: &[Vec<f64>], chosen: &mut [usize], mut left: u64) {
    loop {
        let mut best: Option<(f64, usize, usize, u64)> = None;
        for (index, unit) in units.iter().enumerate() {
            let now = chosen[index];
            for at in now + 1..unit.widths.len() {
                let more = cost(unit, at) - cost(unit, now);
                let gain = (errors[index][now] - errors[index][at]) / more.max(1) as f64;
                if more <= left && best.is_none_or(|(most, ..)| gain > most) {
                    best = Some((gain, index, at, more));
                }
            }
        }
        let Some((_, index, at, more)) = best else { return };
        chosen[index] = at;
        left -= more;
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::bits::Bits;
    use super::*;
    use crate::kernels::testing::noise;

    fn average(number: f64) -> Average {
        Bits::new(number).unwrap().average().unwrap()
    }

    fn unit(block: usize, weights: u64, widths: &[u32]) -> Unit {
        Unit { block, kind: "o".into(), modules: vec![], weights, widths: widths.to_vec() }
    }

    /// Errors that fall by about four with each bit, from a size that differs from unit to unit.
    fn errors(units: &[Unit], seed: u64) -> Vec<Vec<f64>> {
        let noise = noise(5 * units.len(), seed);
        let of = |(unit, noise): (&Unit, &[f32])| -> Vec<f64> {
            let size = f64::from(2.0 * noise[4]).exp();
            let error = |(&width, noise): (&u32, &f32)| {
                size * f64::from(0.5 * noise).exp() * 0.25f64.powi(width as i32)
            };
            unit.widths.iter().zip(noise).map(error).collect()
        };
        units.iter().zip(noise.chunks(5)).map(of).collect()
    }

    fn sums(units: &[Unit], errors: &[Vec<f64>], widths: &[u32]) -> (u64, f64) {
        let at = |unit: &Unit, width| unit.widths.iter().position(|of| *of == width).unwrap();
        let bits = units.iter().zip(widths).map(|(unit, &width)| unit.weights * u64::from(width)).sum();
        let lost = units
            .iter()
            .zip(errors)
            .zip(widths)
            .map(|((unit, errors), &width)| falling(errors)[at(unit, width)])
            .sum();
        (bits, lost)
    }

    /// Every choice that there is.
    fn best_of_all(units: &[Unit], errors: &[Vec<f64>], budget: u64) -> f64 {
        let count: usize = units.iter().map(|unit| unit.widths.len()).product();
        let mut best = f64::INFINITY;
        for mut number in 0..count {
            let widths: Vec<u32> = units
                .iter()
                .map(|unit| {
                    let at = number % unit.widths.len();
                    number /= unit.widths.len();
                    unit.widths[at]
                })
                .collect();
            let (bits, lost) = sums(units, errors, &widths);
            if bits <= budget {
                best = best.min(lost);
            }
        }
        best
    }

    #[test]
    fn no_other_choice_loses_less() {
        for seed in 0..30 {
            let sizes = [48, 16, 32, 80, 16, 7 * seed + 1];
            let few: &[u32] = if seed % 3 == 0 { &[2, 4, 8] } else { &[2, 3, 4, 8] };
            let units: Vec<Unit> =
                sizes.iter().enumerate().map(|(block, &weights)| unit(block, weights, few)).collect();
            let errors = errors(&units, seed);
            for asked in [2.13, 2.5, 3.5, 5.25, 7.9] {
                let asked = average(asked);
                let budget = asked.budget(units.iter().map(|unit| unit.weights).sum());
                let widths = allocate(asked, &units, &errors).unwrap();
                let (bits, lost) = sums(&units, &errors, &widths);
                let best = best_of_all(&units, &errors, budget);
                assert!(bits <= budget, "{widths:?}");
                assert!(lost <= best * (1.0 + 1e-12), "{widths:?} lose {lost}, others {best}");
            }
        }
    }

    /// Weights without a common divisor make more steps than are counted.
    #[test]
    fn coarse_steps_keep_the_average_and_leave_no_more_than_a_unit() {
        let units: Vec<Unit> = (0..200)
            .map(|block| unit(block, 1_000_003 + 7919 * (block as u64 * 37 % 101), &[2, 3, 4, 8]))
            .collect();
        let errors = errors(&units, 5);
        let weights: u64 = units.iter().map(|unit| unit.weights).sum();
        let smallest = units.iter().map(|unit| unit.weights).min().unwrap();
        for asked in [2.01, 2.5, 3.5, 4.25] {
            let asked = average(asked);
            let allocation = Allocation::new(asked, &units, &errors).unwrap();
            let widths: Vec<u32> = allocation.shares.iter().map(|share| share.bits).collect();
            let (bits, lost) = sums(&units, &errors, &widths);
            let budget = asked.budget(weights);
            assert!(bits <= budget && budget - bits < smallest, "{asked}: {bits} of {budget}");
            assert!((allocation.reached() - bits as f64 / weights as f64).abs() < 1e-12);
            // What equal bits for all would lose.
            let equal: f64 = errors.iter().map(|errors| falling(errors)[0]).sum();
            assert!(lost < equal);
        }
    }

    #[test]
    fn more_bits_lose_less_whatever_was_measured() {
        assert_eq!(falling(&[4.0, 5.0, 1.0]), [4.0, 0.99 * 4.0, 1.0]);
        let units = [unit(0, 10, &[2, 3, 4, 8]), unit(1, 10, &[2, 3, 4, 8])];
        let widths = allocate(average(3.5), &units, &[vec![1.0; 4], vec![9.0, 3.0, 1.0, 0.1]]).unwrap();
        assert_eq!(widths, [3, 4]);
    }

    #[test]
    fn an_average_that_cannot_be_kept_is_refused() {
        let message =
            allocate(average(2.5), &[unit(0, 10, &[4, 8])], &[vec![2.0, 1.0]]).unwrap_err().to_string();
        assert!(message.contains("--bits 2.5 cannot be kept"), "{message}");
        let message = allocate(average(2.5), &[], &[]).unwrap_err().to_string();
        assert!(message.contains("no layer is left"), "{message}");
    }

    #[test]
    fn an_allocation_is_read_back_as_written() {
        let units: Vec<Unit> = (0..5).map(|block| unit(block, 64, &[2, 3, 4, 8])).collect();
        let measured = Allocation::new(average(3.4), &units, &errors(&units, 1)).unwrap();
        let assumed = Allocation::assumed(average(3.4), &units).unwrap();
        assert_eq!(assumed.shares.iter().map(|share| share.bits).sum::<u32>(), 17);
        for allocation in [assumed, measured] {
            let text = serde_json::to_string(&allocation).unwrap();
            let read: Allocation = serde_json::from_str(&text).unwrap();
            let bits = |of: &Allocation| of.shares.iter().map(|share| share.bits).collect::<Vec<_>>();
            assert_eq!(bits(&read), bits(&allocation));
            assert_eq!(read.by_kind().len(), 1);
            assert_eq!(read.bits(4, "o"), Some(allocation.shares[4].bits));
            assert_eq!(read.bits(4, "qkv"), None);
        }
    }
}

//! Which values a code may stand for: grids of several kinds on the same weights.

use serde::{Deserialize, Serialize};

use super::layer::{Layer, Place};
use crate::error::{Error, Result};
use crate::gptq::scheme::Scheme;
use crate::kernels::scales::{Fit, GridKind, ScaleType, fit_group};

/// What is asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Grids {
    pub place: Place,
    pub row: usize,
    pub group: usize,
    pub bits: u32,
    /// −1 for one group per row.
    pub group_size: i64,
    /// Errors count by diag(H), not all alike.
    pub weighted: bool,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Compared {
    /// The group's weights.
    pub weights: Vec<f32>,
    /// Rows and groups that there are to choose from.
    pub rows: usize,
    pub groups: usize,
    /// Rows that the errors below are over.
    pub measured: usize,
    pub kinds: Vec<Kind>,
    pub bits: Vec<u32>,
    pub group_sizes: Vec<i64>,
}

/// One kind of grid.
#[derive(Debug, Clone, Serialize)]
pub struct Kind {
    /// "symmetric", "asymmetric", "searched", "quantile", "kmeans".
    pub name: String,
    /// The values of this group's codes, rising.
    pub levels: Vec<f32>,
    /// Σ(w − ŵ)² / Σw² of this group (weighted if so asked).
    pub error: f64,
    /// The same over many rows.
    pub layer_error: f64,
    /// Codes, scales, zero points and tables.
    pub bits_per_weight: f64,
    /// Over many rows, by bits and by group size.
    pub by_bits: Vec<f64>,
    pub by_group: Vec<f64>,
    pub bits_by_group: Vec<f64>,
}

const NAMES: [&str; 5] = ["symmetric", "asymmetric", "searched", "quantile", "kmeans"];
const GROUP_SIZES: [i64; 6] = [16, 32, 64, 128, 256, -1];
/// Weights that errors are measured on, about.
const MEASURED: usize = 16_384;

impl Grids {
    /// Works it out.
    ///
    /// # Errors
    /// [`Error::Options`] for bits, a size or a group that cannot be.
    pub fn solve(&self, layer: &Layer) -> Result<Compared> {
        if !(2..=8).contains(&self.bits) {
            return Err(Error::options(format!("{} bits", self.bits), "Use 2 to 8"));
        }
        let n = layer.inputs.n;
        let width = |size: i64| -> Result<usize> {
            match Scheme::group_size_of(size)? {
                Some(0) => Err(Error::options("a group of 0 columns", "Use 1 or more")),
                size => Ok(size.unwrap_or(n).min(n)),
            }
        };
        let size = width(self.group_size)?;
        let groups = n.div_ceil(size);
        let rows = layer.weight.rows();
        if self.row >= rows || self.group >= groups {
            return Err(Error::options(
                format!("there is no group {} in row {}", self.group, self.row),
                format!("Choose one of {groups} groups and {rows} rows"),
            ));
        }
        let all = layer.weight.f32s()?;
        let importance: Vec<f32> = match self.weighted {
            true => layer.inputs.diagonal.clone(),
            false => vec![1.0; n],
        };
        let measured = (MEASURED / n).clamp(1, rows);
        let sum = |name: &str, bits: u32, size: usize| -> f64 {
            let (mut missed, mut whole) = (0.0, 0.0);
            for row in all.chunks(n).take(measured) {
                for (w, importance) in row.chunks(size).zip(importance.chunks(size)) {
                    let (error, power) = error(w, importance, &levels(name, bits, w, importance));
                    missed += error;
                    whole += power;
                }
            }
            if whole > 0.0 { missed / whole } else { 0.0 }
        };
        let (from, to) = (self.group * size, n.min((self.group + 1) * size));
        let weights = all[self.row * n + from..self.row * n + to].to_vec();
        let bits: Vec<u32> = (2..=8).collect();
        let mut kinds = Vec::new();
        for name in NAMES {
            let own = levels(name, self.bits, &weights, &importance[from..to]);
            let (missed, whole) = error(&weights, &importance[from..to], &own);
            let mut by_group = Vec::new();
            let mut bits_by_group = Vec::new();
            for group_size in GROUP_SIZES {
                let size = width(group_size)?;
                by_group.push(sum(name, self.bits, size));
                bits_by_group.push(bits_per_weight(name, self.bits, size));
            }
            kinds.push(Kind {
                name: name.to_owned(),
                levels: own,
                error: if whole > 0.0 { missed / whole } else { 0.0 },
                layer_error: sum(name, self.bits, size),
                bits_per_weight: bits_per_weight(name, self.bits, size),
                by_bits: bits.iter().map(|&bits| sum(name, bits, size)).collect(),
                by_group,
                bits_by_group,
            });
        }
        Ok(Compared { weights, rows, groups, measured, kinds, bits, group_sizes: GROUP_SIZES.to_vec() })
    }
}

/// What is stored for a weight: its code, and its share of a scale of 16 bits, a zero point, a table.
fn bits_per_weight(name: &str, bits: u32, size: usize) -> f64 {
    let bits = f64::from(bits);
    let shared = match name {
        "asymmetric" => 16.0 + bits,
        "kmeans" => 16.0 * bits.exp2(),
        _ => 16.0,
    };
    bits + shared / size as f64
}

/// The values of a group's codes, rising.
fn levels(name: &str, bits: u32, w: &[f32], importance: &[f32]) -> Vec<f32> {
    let uniform = |sym, fit| {
        let kind = GridKind { bits, sym, fit, scale_type: ScaleType::F16 };
        let (scale, zero) = fit_group(kind, w, importance);
        let mut levels: Vec<f32> = (0..1u32 << bits).map(|code| scale * (code as f32 - zero)).collect();
        levels.sort_by(f32::total_cmp);
        levels
    };
    match name {
        "symmetric" => uniform(true, Fit::MinMax),
        "asymmetric" => uniform(false, Fit::MinMax),
        "searched" => uniform(true, Fit::Weighted),
        "quantile" => {
            let largest = w.iter().fold(0f32, |most, w| most.max(w.abs()));
            let scale = half::f16::from_f32(largest).to_f32();
            quantiles(bits).iter().map(|&level| scale * level as f32).collect()
        }
        _ => kmeans(w, importance, 1 << bits),
    }
}

/// Σ importance·(w − ŵ)² for the nearest levels, and Σ importance·w².
fn error(w: &[f32], importance: &[f32], levels: &[f32]) -> (f64, f64) {
    let (mut missed, mut whole) = (0.0, 0.0);
    for (&w, &importance) in w.iter().zip(importance) {
        let above = levels.partition_point(|&level| level < w);
        let near = [above.saturating_sub(1), above.min(levels.len() - 1)];
        let least =
            near.map(|at| f64::from(w - levels[at]).powi(2)).into_iter().fold(f64::INFINITY, f64::min);
        missed += f64::from(importance) * least;
        whole += f64::from(importance) * f64::from(w).powi(2);
    }
    (missed, whole)
}

/// Levels from −1 to 1, 0 among them, with the normal distribution's quantiles between: with 4 bits NF4, as
/// QLoRA (arXiv 2305.14314) makes it.
pub fn quantiles(bits: u32) -> Vec<f64> {
    let codes = f64::from(1u32 << bits);
    // The mean of what would be left beyond the last of 2^b and of 2^b − 1 levels.
    let most = 1.0 - 0.25 * (1.0 / (codes - 1.0) + 1.0 / codes);
    let half = 1usize << (bits - 1);
    let side = |count: usize| {
        let at = move |step: usize| quantile(most + (0.5 - most) * step as f64 / count as f64);
        (0..count).map(at)
    };
    let largest = quantile(most);
    let mut levels: Vec<f64> = side(half - 1).map(|x| -x / largest).collect();
    levels.push(0.0);
    levels.extend(side(half).map(|x| x / largest));
    levels.sort_by(f64::total_cmp);
    levels
}

/// The point below which a share `p` of the standard normal distribution lies, by halving.
fn quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if normal(middle) < p { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// The share of the standard normal distribution below `x`: ½ + φ(x)·Σ x^(2k+1) / (1·3·…·(2k+1)).
fn normal(x: f64) -> f64 {
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    for _ in 0..200 {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt()
}

/// The `k` levels with the least Σ importance·(w − ŵ)² there are: sorted weights cut into `k` runs by dynamic
/// programming, where the best first element of the last run never moves back.
pub fn kmeans(w: &[f32], importance: &[f32], k: usize) -> Vec<f32> {
    let mut sorted: Vec<(f64, f64)> = w.iter().zip(importance).map(|(&w, &i)| (w.into(), i.into())).collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    // Weights without importance would leave a run without a mean.
    let least = sorted.iter().map(|pair| pair.1).fold(0.0, f64::max).max(1e-30) * 1e-9;
    let n = sorted.len();
    let mut sums = vec![[0f64; 3]; n + 1];
    for (at, &(w, importance)) in sorted.iter().enumerate() {
        let importance = importance.max(least);
        let [a, b, c] = sums[at];
        sums[at + 1] = [a + importance, b + importance * w, c + importance * w * w];
    }
    let run = |from: usize, to: usize| {
        let [a, b, c] = std::array::from_fn(|i| sums[to][i] - sums[from][i]);
        (c - b * b / a).max(0.0)
    };
    let k = k.min(n);
    // cost[j]: of the first j weights in as many runs as there are rounds so far; begins[round][j]: of the last.
    let mut cost: Vec<f64> = (0..=n).map(|to| if to == 0 { 0.0 } else { run(0, to) }).collect();
    let mut begins = vec![vec![0usize; n + 1]];
    for _ in 1..k {
        let mut next = vec![f64::INFINITY; n + 1];
        let mut begin = vec![0; n + 1];
        next[0] = 0.0;
        // (targets, candidates), both inclusive.
        let mut open = vec![(1, n, 0, n - 1)];
        while let Some((from, to, first, last)) = open.pop() {
            if from > to {
                continue;
            }
            let middle = (from + to) / 2;
            for (split, before) in cost.iter().enumerate().take(last.min(middle - 1) + 1).skip(first) {
                let sum = before + run(split, middle);
                if sum < next[middle] {
                    (next[middle], begin[middle]) = (sum, split);
                }
            }
            open.push((from, middle - 1, first, begin[middle]));
            open.push((middle + 1, to, begin[middle], last));
        }
        cost = next;
        begins.push(begin);
    }
    let mut levels = Vec::with_capacity(k);
    let mut to = n;
    for begin in begins.iter().rev() {
        let from = begin[to];
        if to > from {
            levels.push(((sums[to][1] - sums[from][1]) / (sums[to][0] - sums[from][0])) as f32);
        }
        to = from;
    }
    levels.reverse();
    levels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::noise;
    use crate::lesson::layer::tests::layer;

    #[test]
    fn four_bits_of_quantiles_are_nf4() {
        let nf4 = [
            -1.0,
            -0.696_192_8,
            -0.525_073_05,
            -0.394_917_5,
            -0.284_441_38,
            -0.184_773_43,
            -0.091_050_036,
            0.0,
            0.079_580_3,
            0.160_930_2,
            0.246_112_3,
            0.337_915_24,
            0.440_709_83,
            0.562_617,
            0.722_956_84,
            1.0,
        ];
        let made = quantiles(4);
        assert_eq!(made.len(), 16);
        for (made, want) in made.iter().zip(nf4) {
            assert!((made - want).abs() < 1e-5, "{made} {want}");
        }
    }

    #[test]
    fn kmeans_is_the_best_of_all_cuts() {
        for seed in 0..20 {
            let (w, importance) =
                (noise(9, seed), noise(9, seed + 100).iter().map(|x| x.abs() + 0.1).collect::<Vec<_>>());
            let found = error(&w, &importance, &kmeans(&w, &importance, 3)).0;
            let mut order: Vec<usize> = (0..9).collect();
            order.sort_by(|&a, &b| w[a].total_cmp(&w[b]));
            let mut best = f64::INFINITY;
            for (a, b) in (1..8).flat_map(|a| (a + 1..9).map(move |b| (a, b))) {
                let levels: Vec<f32> = [&order[..a], &order[a..b], &order[b..]]
                    .map(|run| {
                        let sum: f32 = run.iter().map(|&i| importance[i] * w[i]).sum();
                        sum / run.iter().map(|&i| importance[i]).sum::<f32>()
                    })
                    .to_vec();
                best = best.min(error(&w, &importance, &levels).0);
            }
            assert!((found - best).abs() < 1e-6, "{found} {best}");
        }
    }

    #[test]
    fn errors_fall_with_bits_and_the_best_grid_is_the_best() {
        let layer = layer("model.layers.0.self_attn.q_proj", 256);
        let place = Place { own: false, tokens: 256, module: String::new() };
        for weighted in [false, true] {
            let asked = Grids { place: place.clone(), row: 3, group: 2, bits: 3, group_size: 64, weighted };
            let found = asked.solve(&layer).unwrap();
            assert_eq!((found.weights.len(), found.groups, found.kinds.len()), (64, 4, 5));
            let kmeans = &found.kinds[4];
            for kind in &found.kinds {
                assert!(kmeans.error <= kind.error + 1e-9 && kmeans.layer_error <= kind.layer_error + 1e-9);
                assert!(
                    kind.by_bits.windows(2).all(|two| two[1] < two[0] || two[1] == 0.0),
                    "{} {:?}",
                    kind.name,
                    kind.by_bits
                );
                assert_eq!(kind.by_bits[1], kind.layer_error);
                assert_eq!(kind.by_group[2], kind.layer_error);
                assert!(kind.by_group.iter().all(|error| (0.0..1.0).contains(error)));
            }
            // The search has min-max among its candidates.
            assert!(found.kinds[2].layer_error <= found.kinds[0].layer_error);
            assert_eq!(found.kinds[0].bits_per_weight, 3.25);
            assert!(Grids { group: 4, ..asked }.solve(&layer).is_err());
        }
    }
}

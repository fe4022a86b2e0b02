//! The inner loop of GPTQ with everything that happens in it written down.
//!
//! The same loop as [`crate::kernels::sweep`], in f64, for problems that a person can look at. A test holds
//! its codes against [`crate::gptq::exact`]'s.

use serde::Serialize;

use crate::error::Result;
use crate::gptq::exact::{invert_upper, upper_factor};

/// How halves are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ties {
    /// As the product does.
    Even,
    Away,
}

impl Ties {
    pub fn round(self, x: f64) -> f64 {
        match self {
            Self::Even => x.round_ties_even(),
            Self::Away => x.round(),
        }
    }
}

/// The grid of one row in one column: `scale` times the whole numbers `low..=high`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Levels {
    pub scale: f64,
    pub low: f64,
    pub high: f64,
}

impl Levels {
    /// The code of `w`, less the zero point.
    pub fn code(&self, w: f64, ties: Ties) -> f64 {
        ties.round(w / self.scale).clamp(self.low, self.high)
    }
}

/// One column.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// Its natural number.
    pub column: usize,
    /// w′ \[rows\]: the column as earlier errors left it.
    pub current: Vec<f64>,
    pub scales: Vec<f64>,
    /// Less the zero point.
    pub codes: Vec<f64>,
    /// ŵ = scale · code.
    pub values: Vec<f64>,
    /// w′ − ŵ.
    pub errors: Vec<f64>,
    /// \[n\] by natural column: the share U_jk / U_jj of the error that column k takes over (0 for columns
    /// that are done).
    pub factors: Vec<f64>,
    /// Σ ((w′ − ŵ) / U_jj)² over the rows: what this column adds to tr(E(H+λI)Eᵀ).
    pub loss: f64,
    /// W′ \[rows, n\] afterwards: columns done hold ŵ.
    pub after: Vec<f64>,
}

/// U with (H+λI)⁻¹ = UᵀU in the order `taken`, [n, n]; `lambda` is λ.
///
/// # Errors
/// [`crate::error::Error::Numeric`] when H + λI is not positive definite.
pub fn factor(h: &[f64], lambda: f64, taken: &[usize]) -> Result<Vec<f64>> {
    let n = taken.len();
    let damped = |a: usize, b: usize| h[taken[a] * n + taken[b]] + if a == b { lambda } else { 0.0 };
    Ok(invert_upper(&upper_factor(n, damped)?, n, 0, n))
}

/// (H+λI)⁻¹ = UᵀU in the order of `u`.
pub fn inverse(u: &[f64], n: usize) -> Vec<f64> {
    let sum = |i: usize, j: usize| (0..=i.min(j)).map(|k| u[k * n + i] * u[k * n + j]).sum();
    (0..n * n).map(|at| sum(at / n, at % n)).collect()
}

/// Rounds the columns of `w` [rows, n] as `taken` says and spreads each error by the rows of `u` [n, n], whose
/// rows and columns stand in that order. `levels(column, w′)` gives the grid of each row when a column's turn
/// comes. `taken` may be a part of the columns; the others stay as they are.
pub fn sweep(
    w: &[f64],
    n: usize,
    taken: &[usize],
    u: &[f64],
    ties: Ties,
    mut levels: impl FnMut(usize, &[f64]) -> Vec<Levels>,
) -> Vec<Step> {
    let (rows, turns) = (w.len() / n, taken.len());
    let mut w = w.to_vec();
    let mut steps = Vec::with_capacity(turns);
    for (t, &column) in taken.iter().enumerate() {
        let current: Vec<f64> = (0..rows).map(|row| w[row * n + column]).collect();
        let levels = levels(column, &current);
        let codes: Vec<f64> = current.iter().zip(&levels).map(|(&x, levels)| levels.code(x, ties)).collect();
        let values: Vec<f64> = codes.iter().zip(&levels).map(|(code, levels)| code * levels.scale).collect();
        let errors: Vec<f64> = current.iter().zip(&values).map(|(x, value)| x - value).collect();
        let pivot = u[t * turns + t];
        let mut factors = vec![0.0; n];
        for (k, &later) in taken.iter().enumerate().skip(t + 1) {
            factors[later] = u[t * turns + k] / pivot;
        }
        for row in 0..rows {
            w[row * n + column] = values[row];
            for &later in &taken[t + 1..] {
                w[row * n + later] -= errors[row] * factors[later];
            }
        }
        steps.push(Step {
            column,
            scales: levels.iter().map(|levels| levels.scale).collect(),
            loss: errors.iter().map(|error| (error / pivot).powi(2)).sum(),
            current,
            codes,
            values,
            errors,
            factors,
            after: w.clone(),
        });
    }
    steps
}

/// ŵ of all columns.
pub fn dequantized(steps: &[Step], w: &[f64]) -> Vec<f64> {
    steps.last().map_or_else(|| w.to_vec(), |step| step.after.clone())
}

/// tr(E·H·Eᵀ) for E = w − ŵ, each [rows, n].
pub fn quadratic(w: &[f64], value: &[f64], h: &[f64], n: usize) -> f64 {
    let mut sum = 0.0;
    for (w, value) in w.chunks(n).zip(value.chunks(n)) {
        let e: Vec<f64> = w.iter().zip(value).map(|(w, value)| w - value).collect();
        for (i, error) in e.iter().enumerate() {
            sum += error * (0..n).map(|j| h[i * n + j] * e[j]).sum::<f64>();
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::exact;
    use crate::gptq::scheme::{Preset, Scheme};
    use crate::kernels::testing::noise;

    #[test]
    fn its_codes_are_those_of_the_exact_form() {
        let (rows, n) = (5, 96);
        let numbers = |count, seed| noise(count, seed).iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (w, x) = (numbers(rows * n, 1), numbers(3 * n * n, 2));
        let mut h = vec![0.0; n * n];
        for row in x.chunks(n) {
            for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))) {
                h[i * n + j] += row[i] * row[j] * (1.0 + i as f64);
            }
        }
        for i in 0..n {
            for j in 0..i {
                h[i * n + j] = h[j * n + i];
            }
            h[i * n + i] += 40.0;
        }
        // Neighbours share something, so that errors do spread.
        for i in 1..n {
            h[i * n + i - 1] += 20.0;
            h[(i - 1) * n + i] += 20.0;
        }
        for desc_act in [false, true] {
            let scheme =
                Scheme { desc_act, static_groups: true, ..Scheme::preset(Preset::Reference, 3, Some(32)) };
            let want = exact::quantize(&scheme, &w, &h, rows).unwrap();
            let mut taken: Vec<usize> = (0..n).collect();
            if desc_act {
                taken.sort_by(|&a, &b| h[b * n + b].total_cmp(&h[a * n + a]));
            }
            let mean = (0..n).map(|i| h[i * n + i]).sum::<f64>() / n as f64;
            let u = factor(&h, 0.01 * mean, &taken).unwrap();
            let levels = |column: usize, _: &[f64]| {
                let of = |row: usize| {
                    let at = row * 3 + column / 32;
                    let zero = want.zeros[at];
                    Levels { scale: want.scales[at], low: -zero, high: 7.0 - zero }
                };
                (0..rows).map(of).collect()
            };
            let steps = sweep(&w, n, &taken, &u, Ties::Even, levels);
            for step in &steps {
                for row in 0..rows {
                    let code = step.codes[row] + want.zeros[row * 3 + step.column / 32];
                    assert_eq!(code, f64::from(want.codes[row * n + step.column]), "{row} {}", step.column);
                }
            }
            let loss = quadratic(&w, &dequantized(&steps, &w), &h, n);
            assert!((loss / want.loss - 1.0).abs() < 1e-9);
            let damped: Vec<f64> =
                (0..n * n).map(|at| h[at] + if at / n == at % n { 0.01 * mean } else { 0.0 }).collect();
            let sum: f64 = steps.iter().map(|step| step.loss).sum();
            assert!((quadratic(&w, &dequantized(&steps, &w), &damped, n) / sum - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn the_inverse_is_that_of_the_damped_matrix_in_its_order() {
        let h = [4.0, 1.0, 0.5, 1.0, 3.0, 0.2, 0.5, 0.2, 2.0];
        let taken = [2, 0, 1];
        let inverse = inverse(&factor(&h, 0.1, &taken).unwrap(), 3);
        for (i, j) in (0..3).flat_map(|i| (0..3).map(move |j| (i, j))) {
            let damped = |k: usize| h[taken[k] * 3 + taken[j]] + if k == j { 0.1 } else { 0.0 };
            let product: f64 = (0..3).map(|k| inverse[i * 3 + k] * damped(k)).sum();
            assert!((product - if i == j { 1.0 } else { 0.0 }).abs() < 1e-12);
        }
    }
}

//! A weight of a few rows and columns, quantized before one's eyes.
//!
//! Its rules are those of worked examples on paper: each column has one scale for all of its rows,
//! max|w| / (2^(bits−1) − 1), fitted when its turn comes (on weights that earlier errors have moved); halves
//! are rounded away from zero; and the error is counted for one input vector a, ‖(W − Ŵ)·a‖². What GPTQ makes
//! small is tr((W − Ŵ)·H·(W − Ŵ)ᵀ), which stands beside it.

use serde::{Deserialize, Serialize};

use super::trace::{Levels, Step, Ties, dequantized, factor, inverse, quadratic, sweep};
use crate::error::{Error, Result};

/// What is asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Example {
    /// W, row by row.
    pub w: Vec<Vec<f64>>,
    /// H, row by row.
    pub h: Vec<Vec<f64>>,
    /// a, the inputs that the error is counted for.
    pub inputs: Vec<f64>,
    pub bits: u32,
    /// The column taken first, second, …
    pub order: Vec<usize>,
    /// λ as a share of mean(diag H).
    pub damp_percent: f64,
    /// How strongly the activation-aware scaling follows the inputs.
    pub alpha: f64,
    pub spread: Spread,
}

/// Which numbers tell a column's error how to spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// The rows of U, where H⁻¹ = UᵀU: what GPTQ does.
    Cholesky,
    /// The rows of H⁻¹ as they are, as traces by hand often do.
    InverseRows,
    /// The same rounded to two decimals.
    InverseRowsRounded,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Traced {
    pub steps: Vec<Step>,
    /// The table that `steps` spreads by, in the order of columns: U, H⁻¹ or H⁻¹ rounded.
    pub table: Vec<Vec<f64>>,
    pub methods: Vec<Method>,
}

/// One way to quantize the same weight.
#[derive(Debug, Clone, Serialize)]
pub struct Method {
    /// "rtn_tensor", "awq_tensor", "rtn_column", "cholesky", "inverse_rows", "inverse_rows_rounded".
    pub name: String,
    /// ‖(W − Ŵ)·a‖².
    pub output_error: f64,
    /// tr((W − Ŵ)·H·(W − Ŵ)ᵀ).
    pub hessian_error: f64,
    /// Ŵ, row by row.
    pub values: Vec<Vec<f64>>,
}

/// Rows and columns at most.
const LARGEST: usize = 8;

impl Example {
    /// Works it out.
    ///
    /// # Errors
    /// [`Error::Options`] for numbers that make no problem; [`Error::Numeric`] when H is not positive definite.
    pub fn solve(&self) -> Result<Traced> {
        let n = self.check()?;
        let (w, h) = (self.w.concat(), self.h.concat());
        let mean = (0..n).map(|j| h[j * n + j]).sum::<f64>() / n as f64;
        let u = factor(&h, self.damp_percent * mean, &self.order)?;
        let method = |name: &str, values: Vec<f64>| Method {
            name: name.to_owned(),
            output_error: self.output_error(&values),
            hessian_error: quadratic(&w, &values, &h, n),
            values: values.chunks(n).map(<[f64]>::to_vec).collect(),
        };
        let scaling: Vec<f64> = self.inputs.iter().map(|a| a.abs().powf(self.alpha)).collect();
        let mut methods = vec![
            method("rtn_tensor", self.scaled_rounding(&w, &vec![1.0; n])),
            method("awq_tensor", self.scaled_rounding(&w, &scaling)),
            method("rtn_column", self.spread(&w, &vec![0.0; n * n])?.1),
        ];
        let mut shown = None;
        for spread in [Spread::Cholesky, Spread::InverseRows, Spread::InverseRowsRounded] {
            let (name, table) = match spread {
                Spread::Cholesky => ("cholesky", u.clone()),
                Spread::InverseRows => ("inverse_rows", inverse(&u, n)),
                Spread::InverseRowsRounded => (
                    "inverse_rows_rounded",
                    inverse(&u, n).iter().map(|x| (x * 100.0).round() / 100.0).collect(),
                ),
            };
            let (steps, values) = self.spread(&w, &table)?;
            methods.push(method(name, values));
            if spread == self.spread {
                shown = Some((steps, table.chunks(n).map(<[f64]>::to_vec).collect()));
            }
        }
        let (steps, table) =
            shown.ok_or_else(|| Error::Internal("no way of spreading was asked for".into()))?;
        Ok(Traced { steps, table, methods })
    }

    /// Columns of a problem that makes sense.
    fn check(&self) -> Result<usize> {
        let bad = |what: String, advice: &str| Err(Error::options(what, advice));
        let n = self.order.len();
        let rows = self.w.len();
        if n == 0 || rows == 0 || n > LARGEST || rows > LARGEST {
            return bad(format!("a weight of {rows} × {n}"), "Use 1 to 8 rows and columns");
        }
        if self.w.iter().any(|row| row.len() != n)
            || self.h.len() != n
            || self.inputs.len() != n
            || self.h.iter().any(|row| row.len() != n)
        {
            return bad(
                "W, H, a and the order have different numbers of columns".into(),
                "Give each as many",
            );
        }
        let all = self.w.iter().chain(&self.h).flatten().chain(&self.inputs);
        if all.chain([&self.damp_percent, &self.alpha]).any(|x| !x.is_finite() || x.abs() > 1e6) {
            return bad("a number is missing or too large".into(), "Use numbers up to a million");
        }
        let mut sorted = self.order.clone();
        sorted.sort_unstable();
        if sorted.iter().enumerate().any(|(j, &column)| j != column) {
            return bad(
                format!("the order {:?} does not have each column once", self.order),
                "Have each once",
            );
        }
        for (i, j) in (0..n).flat_map(|i| (0..i).map(move |j| (i, j))) {
            if (self.h[i][j] - self.h[j][i]).abs() > 1e-9 {
                let what = format!("H is not symmetric: {} and {}", self.h[i][j], self.h[j][i]);
                return bad(what, "Make both numbers equal");
            }
        }
        if !(2..=8).contains(&self.bits) {
            return bad(format!("{} bits", self.bits), "Use 2 to 8");
        }
        if self.damp_percent < 0.0 {
            return bad(format!("damping {}", self.damp_percent), "Use 0 or more");
        }
        Ok(n)
    }

    fn output_error(&self, values: &[f64]) -> f64 {
        let rows = self.w.iter().zip(values.chunks(self.inputs.len()));
        let missed = |(w, value): (&Vec<f64>, &[f64])| -> f64 {
            w.iter().zip(value).zip(&self.inputs).map(|((w, value), a)| (w - value) * a).sum()
        };
        rows.map(|row| missed(row).powi(2)).sum()
    }

    /// The grid that holds `largest`.
    fn levels(&self, largest: f64) -> Levels {
        let half = f64::from(1u32 << (self.bits - 1));
        let scale = if largest > 0.0 { largest / (half - 1.0) } else { 1.0 };
        Levels { scale, low: -half, high: half - 1.0 }
    }

    /// The loop, and Ŵ. A table of zeros spreads nothing.
    fn spread(&self, w: &[f64], table: &[f64]) -> Result<(Vec<Step>, Vec<f64>)> {
        let n = self.order.len();
        let mut table = table.to_vec();
        if table.iter().all(|&x| x == 0.0) {
            (0..n).for_each(|j| table[j * n + j] = 1.0);
        }
        if let Some(j) = (0..n).find(|&j| table[j * n + j] <= 0.0) {
            return Err(Error::numeric(
                format!("column {}", self.order[j] + 1),
                "its rounded diagonal element of H⁻¹ is 0",
                "Use smaller numbers in H, or do not round",
            ));
        }
        let steps = sweep(w, n, &self.order, &table, Ties::Away, |_, current| {
            let largest = current.iter().fold(0f64, |most, w| most.max(w.abs()));
            vec![self.levels(largest); current.len()]
        });
        let values = dequantized(&steps, w);
        Ok((steps, values))
    }

    /// One scale for the whole of W·diag(`scaling`), whose columns are then divided again.
    fn scaled_rounding(&self, w: &[f64], scaling: &[f64]) -> Vec<f64> {
        let scaling = |at: usize| match scaling[at % scaling.len()] {
            0.0 => 1.0,
            scaling => scaling,
        };
        let scaled: Vec<f64> = w.iter().enumerate().map(|(at, w)| w * scaling(at)).collect();
        let levels = self.levels(scaled.iter().fold(0f64, |most, w| most.max(w.abs())));
        let value = |(at, &w): (usize, &f64)| levels.code(w, Ties::Away) * levels.scale / scaling(at);
        scaled.iter().enumerate().map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(spread: Spread) -> Example {
        Example {
            w: vec![
                vec![0.10, 2.50, -0.30, 0.05],
                vec![-0.20, 3.20, 0.15, -0.08],
                vec![0.40, -2.80, 0.25, 0.12],
                vec![-0.15, 2.10, -0.40, 0.06],
            ],
            h: vec![
                vec![2.0, 0.5, 0.1, 0.2],
                vec![0.5, 8.0, 0.3, 0.4],
                vec![0.1, 0.3, 1.5, 0.2],
                vec![0.2, 0.4, 0.2, 1.0],
            ],
            inputs: vec![0.5, 4.0, 0.3, 0.2],
            bits: 4,
            order: vec![0, 1, 2, 3],
            damp_percent: 0.0,
            alpha: 0.5,
            spread,
        }
    }

    #[test]
    fn the_worked_example_has_the_figures_of_the_literature() {
        let traced = example(Spread::Cholesky).solve().unwrap();
        let figures: Vec<(&str, String)> =
            traced.methods.iter().map(|m| (m.name.as_str(), format!("{:.3}", m.output_error))).collect();
        assert_eq!(
            figures,
            [
                ("rtn_tensor", "1.644".to_owned()),
                ("awq_tensor", "1.551".to_owned()),
                ("rtn_column", "1.298".to_owned()),
                ("cholesky", "1.225".to_owned()),
                ("inverse_rows", "1.227".to_owned()),
                ("inverse_rows_rounded", "1.229".to_owned()),
            ]
        );
    }

    #[test]
    fn the_steps_shown_end_in_the_values_of_the_table() {
        for (spread, at) in [(Spread::Cholesky, 3), (Spread::InverseRows, 4), (Spread::InverseRowsRounded, 5)]
        {
            let traced = example(spread).solve().unwrap();
            assert_eq!(traced.steps.len(), 4);
            assert_eq!(traced.steps[3].after, traced.methods[at].values.concat());
            // The first column's codes are those of its own scale, 0.4 / 7.
            assert_eq!(traced.steps[0].codes, [2.0, -4.0, 7.0, -3.0]);
            // All know the same about the first column, but for the digits: U_1k / U_11 = H⁻¹_1k / H⁻¹_11.
            let tolerance = if spread == Spread::InverseRowsRounded { 0.01 } else { 1e-9 };
            assert!((traced.steps[0].factors[1] - -0.052_640_814_178).abs() < tolerance);
        }
    }

    #[test]
    fn what_makes_no_problem_is_refused() {
        let wrong = |change: &dyn Fn(&mut Example)| {
            let mut example = example(Spread::Cholesky);
            change(&mut example);
            example.solve().unwrap_err().to_string()
        };
        assert!(wrong(&|e| e.order = vec![0, 1, 1, 3]).contains("each column once"));
        assert!(wrong(&|e| e.h[0][1] = 0.7).contains("not symmetric"));
        assert!(wrong(&|e| (e.h[0][1], e.h[1][0]) = (9.0, 9.0)).contains("positive definite"));
        assert!(wrong(&|e| e.bits = 1).contains("2 to 8"));
        assert!(wrong(&|e| e.w[2][2] = f64::NAN).contains("missing or too large"));
        assert!(wrong(&|e| e.h.truncate(2)).contains("different numbers"));
    }
}

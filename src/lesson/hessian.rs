//! The Hessian, its factor, and what damping does to both.

use serde::{Deserialize, Serialize};

use super::layer::{Layer, Place};
use super::methods::{Setting, Taken, loss, quantize};
use super::order::no_factor;
use crate::error::{Error, Result};
use crate::gptq::factor::{Factor, factor};
use crate::gptq::scheme::Preset;

/// Which square of a matrix is asked for.
#[derive(Debug, Clone, Deserialize)]
pub struct View {
    pub place: Place,
    pub matrix: Matrix,
    /// Rows and columns stand in this order.
    pub taken: Taken,
    pub damp_percent: f64,
    pub row: usize,
    pub column: usize,
    pub size: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Matrix {
    /// |H_ij| / √(H_ii·H_jj).
    Correlation,
    /// |R_ij| / √(H_ii + λ), where H + λI = R·Rᵀ: each row's squares sum to 1.
    Factor,
}

/// The square, as at most [`SIDE`] × [`SIDE`] cells; a cell has the largest value in it.
#[derive(Debug, Clone, Serialize)]
pub struct Cells {
    pub n: usize,
    pub row: usize,
    pub column: usize,
    /// Rows and columns shown.
    pub size: usize,
    /// Rows and columns of cells.
    pub side: usize,
    /// [side, side]
    pub values: Vec<f32>,
    pub tokens: usize,
}

/// Cells in a row at most.
pub const SIDE: usize = 128;

/// What damping does.
#[derive(Debug, Clone, Deserialize)]
pub struct Damping {
    pub place: Place,
    pub setting: Setting,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Damped {
    pub points: Vec<Point>,
    pub rtn_loss: f64,
    pub rtn_held_loss: f64,
    pub tokens: usize,
    pub held_tokens: usize,
    pub rows: usize,
    pub n: usize,
}

/// One damping.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// λ / mean(diag H), as asked and as it had to be.
    pub damp_percent: f64,
    pub used: f64,
    /// R_jj² / (H_jj + λ), rising: the share of each column's inputs that those taken after it do not tell.
    pub pivots: Vec<f32>,
    pub loss: f64,
    pub held_loss: f64,
}

/// The dampings tried.
pub const DAMPINGS: [f64; 11] = [1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0];

impl View {
    /// Works it out.
    ///
    /// # Errors
    /// [`Error::Options`] for a damping that makes no sense; [`Error::Numeric`] when none helps.
    pub async fn solve(&self, layer: &Layer) -> Result<Cells> {
        let inputs = &layer.inputs;
        let n = inputs.n;
        let size = self.size.clamp(1, n);
        let (row, column) = (self.row.min(n - size), self.column.min(n - size));
        let alive: Vec<f32> = inputs.diagonal.iter().map(|&d| if d > 0.0 { d } else { 1.0 }).collect();
        let order = self.taken.order(&alive);
        // By turn, while an order has its columns from last to first.
        let columns: Vec<usize> = order.column.iter().rev().map(|&column| column as usize).collect();
        let side = size.min(SIDE);
        let mut values = vec![0f32; side * side];
        let mut put = |i: usize, j: usize, value: f32| {
            if (row..row + size).contains(&i) && (column..column + size).contains(&j) {
                let cell = &mut values[(i - row) * side / size * side + (j - column) * side / size];
                *cell = cell.max(value);
            }
        };
        match self.matrix {
            Matrix::Correlation => {
                let h = inputs.dense.f32s()?;
                for i in row..row + size {
                    for j in column..column + size {
                        let (a, b) = (columns[i], columns[j]);
                        put(i, j, h[a * n + b].abs() / (alive[a] * alive[b]).sqrt());
                    }
                }
            }
            Matrix::Factor => {
                check_damping(self.damp_percent)?;
                let found = factor(&inputs.hessian, &order, &alive, self.damp_percent).await?;
                let found = found.ok_or_else(no_factor)?;
                each(&found, |position, other, value| {
                    let i = n - 1 - position;
                    put(i, n - 1 - other, value.abs() / (alive[columns[i]] + found.lambda).sqrt());
                })?;
            }
        }
        Ok(Cells { n, row, column, size, side, values, tokens: inputs.tokens })
    }
}

/// The elements of L at and below the diagonal, by positions.
fn each(factor: &Factor, mut with: impl FnMut(usize, usize, f32)) -> Result<()> {
    for block in &factor.blocks {
        let width = block.end - block.start;
        for (i, row) in block.square.f32s()?.chunks(width).enumerate() {
            (0..=i).for_each(|j| with(block.start + i, block.start + j, row[j]));
        }
        if block.below.is_empty() {
            continue;
        }
        for (i, row) in block.below.f32s()?.chunks(width).enumerate() {
            (0..width).for_each(|j| with(block.end + i, block.start + j, row[j]));
        }
    }
    Ok(())
}

fn check_damping(damp_percent: f64) -> Result<()> {
    match damp_percent > 0.0 && damp_percent <= 1.0 {
        true => Ok(()),
        false => Err(Error::options(
            format!("damping {damp_percent} is out of range"),
            "Use a number above 0 and at most 1; 0.01 is usual",
        )),
    }
}

impl Damping {
    /// Works it out.
    ///
    /// # Errors
    /// As [`View::solve`].
    pub async fn solve(
        &self,
        layer: &Layer,
        mut tell: impl AsyncFnMut(usize, usize) -> bool,
    ) -> Result<Damped> {
        let inputs = &layer.inputs;
        let mut points = Vec::new();
        for (index, damp_percent) in DAMPINGS.into_iter().enumerate() {
            let scheme = Setting { damp_percent, ..self.setting.clone() }.scheme(Preset::Fast)?;
            let done = quantize(&scheme, Taken::Natural, &layer.weight, &inputs.hessian).await?;
            let factor = done.factor().ok_or_else(no_factor)?;
            let mut pivots = Vec::with_capacity(inputs.n);
            each(factor, |i, j, value| {
                if i == j {
                    let diagonal = factor.diagonal[done.order.column[i] as usize];
                    pivots.push(value * value / (diagonal + factor.lambda));
                }
            })?;
            pivots.sort_by(f32::total_cmp);
            points.push(Point {
                damp_percent,
                used: factor.damp_percent,
                pivots,
                loss: loss(&done.error, &inputs.dense)?,
                held_loss: loss(&done.error, &inputs.held)?,
            });
            tell(index + 1, DAMPINGS.len()).await;
        }
        let rtn = self.setting.scheme(Preset::Rtn)?;
        let rtn = quantize(&rtn, Taken::Natural, &layer.weight, &inputs.hessian).await?.error;
        Ok(Damped {
            points,
            rtn_loss: loss(&rtn, &inputs.dense)?,
            rtn_held_loss: loss(&rtn, &inputs.held)?,
            tokens: inputs.tokens,
            held_tokens: inputs.held_tokens,
            rows: layer.weight.rows(),
            n: inputs.n,
        })
    }
}

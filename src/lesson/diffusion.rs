//! Errors on their way across a layer: what each column's rounding does to the weights still to come, and to
//! the layer's output.

use serde::{Deserialize, Serialize};

use super::layer::{Layer, Place};
use super::methods::{Setting, Taken, curve, loss, quantize, rounding_curve};
use super::order::no_factor;
use super::trace::{Levels, Step, Ties, sweep};
use crate::error::Result;
use crate::gptq::scheme::Preset;

/// What is asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Diffusion {
    pub place: Place,
    pub setting: Setting,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Diffused {
    /// Of the picture: the first rows and columns.
    pub rows: usize,
    pub columns: usize,
    /// [rows, columns] row by row.
    pub weights: Vec<f32>,
    /// After each column, [rows, columns]: for columns done ŵ − w, for those to come what earlier errors have
    /// added to them; in 127ths of `largest`.
    pub frames: Vec<Vec<i8>>,
    /// ŵ − w of rounding to nearest, [rows, columns], likewise.
    pub rounded: Vec<i8>,
    pub largest: f32,
    /// Of all rows looked at and all columns: what is lost after each column.
    pub gptq: Vec<f64>,
    pub rtn: Vec<f64>,
    pub gptq_loss: f64,
    pub rtn_loss: f64,
    pub all_rows: usize,
    pub tokens: usize,
}

const ROWS: usize = 16;
const COLUMNS: usize = 96;

impl Diffusion {
    /// Works it out.
    ///
    /// # Errors
    /// As [`super::order::Ordering::solve`].
    pub async fn solve(&self, layer: &Layer) -> Result<Diffused> {
        let inputs = &layer.inputs;
        let (weight, h) = (&layer.weight, &inputs.hessian);
        let done = quantize(&self.setting.scheme(Preset::Fast)?, Taken::Natural, weight, h).await?;
        let factor = done.factor().ok_or_else(no_factor)?;
        let rounded = quantize(&self.setting.scheme(Preset::Rtn)?, Taken::Natural, weight, h).await?;
        let (steps, rows, columns) = steps(layer, &done)?;

        let n = inputs.n;
        let all = weight.f32s()?;
        let weights: Vec<f32> =
            (0..rows).flat_map(|row| all[row * n..row * n + columns].iter().copied()).collect();
        let corner = |all: &[f32]| -> Vec<f32> {
            (0..rows).flat_map(|row| all[row * n..row * n + columns].iter().map(|e| -e)).collect()
        };
        let rounded_corner = corner(rounded.error.f32s()?);
        let width = steps.first().map_or(0, |step| step.after.len() / rows);
        let moved = |step: &Step, at: usize| {
            (step.after[at / columns * width + at % columns] - f64::from(weights[at])) as f32
        };
        let largest =
            steps.iter().take(columns).flat_map(|step| (0..weights.len()).map(|at| moved(step, at)));
        let largest = largest.chain(rounded_corner.iter().copied()).fold(0f32, |most, x| most.max(x.abs()));
        let share = |x: f32| if largest > 0.0 { (x / largest * 127.0).round() as i8 } else { 0 };
        let frames = steps.iter().take(columns);
        Ok(Diffused {
            rows,
            columns,
            frames: frames
                .map(|step| (0..weights.len()).map(|at| share(moved(step, at))).collect())
                .collect(),
            rounded: rounded_corner.into_iter().map(share).collect(),
            largest,
            weights,
            gptq: curve(&done.error, factor, &done.order)?,
            rtn: rounding_curve(&rounded.error, &inputs.dense, &done.order)?,
            gptq_loss: loss(&done.error, &inputs.dense)?,
            rtn_loss: loss(&rounded.error, &inputs.dense)?,
            all_rows: weight.rows(),
            tokens: inputs.tokens,
        })
    }
}

/// The first block's columns of the first rows, traced with the factor and the grid that the layer was quantized
/// with; how many rows, and how many columns of them are for showing.
fn steps(layer: &Layer, done: &super::methods::Outcome) -> Result<(Vec<Step>, usize, usize)> {
    let n = layer.inputs.n;
    let factor = done.factor().ok_or_else(no_factor)?;
    let Some(block) = factor.blocks.last() else { return Ok((Vec::new(), 0, 0)) };
    let (rows, width) = (ROWS.min(layer.weight.rows()), block.end - block.start);
    let inverse = block.inverse.f32s()?;
    // Turns run against positions.
    let u: Vec<f64> = (0..width * width).map(|at| f64::from(inverse[width * width - 1 - at])).collect();
    let all = layer.weight.f32s()?;
    let dead = |column: usize| layer.inputs.diagonal[column] <= 0.0;
    let corner = (0..rows).flat_map(|row| (0..width).map(move |column| (row, column)));
    let w: Vec<f64> = corner
        .map(|(row, column)| if dead(column) { 0.0 } else { f64::from(all[row * n + column]) })
        .collect();
    let (scales, zeros) = (&done.quantized.scales, &done.quantized.zeros);
    let groups = scales.len() / layer.weight.rows();
    let g_idx = done.prepared.g_idx();
    let maxq = f64::from(done.prepared.maxq());
    let taken: Vec<usize> = (0..width).collect();
    let steps = sweep(&w, width, &taken, &u, Ties::Even, |column, _| {
        let levels = |row: usize| {
            let at = row * groups + g_idx[column] as usize;
            let zero = f64::from(zeros[at]);
            Levels { scale: f64::from(scales[at]), low: -zero, high: maxq - zero }
        };
        (0..rows).map(levels).collect()
    });
    Ok((steps, rows, COLUMNS.min(width)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lesson::layer::tests::layer;

    #[test]
    fn the_picture_shows_the_codes_of_the_real_loop() {
        for module in ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"] {
            let layer = layer(module, 512);
            let setting = Setting { bits: 3, group_size: 64, sym: true, search: true, damp_percent: 0.01 };
            let scheme = setting.scheme(Preset::Fast).unwrap();
            let done = quantize(&scheme, Taken::Natural, &layer.weight, &layer.inputs.hessian);
            let done = pollster::block_on(done).unwrap();
            let (steps, rows, columns) = steps(&layer, &done).unwrap();
            assert_eq!((rows, columns, steps.len()), (16, 96, 128));
            let (n, groups) = (layer.inputs.n, layer.inputs.n / 64);
            let mut differing = 0;
            for step in &steps {
                for row in 0..rows {
                    let zero = done.quantized.zeros[row * groups + step.column / 64];
                    let code = done.quantized.codes[row * n + step.column];
                    differing += usize::from(step.codes[row] != f64::from(code) - f64::from(zero));
                }
            }
            // The real loop computes in f32: a weight in the middle of two levels may go either way.
            assert!(differing <= 4, "{module}: {differing} of {}", rows * steps.len());

            let place = Place { own: false, tokens: 512, module: module.to_owned() };
            let shown = pollster::block_on(Diffusion { place, setting }.solve(&layer)).unwrap();
            assert_eq!((shown.frames.len(), shown.frames[95].len()), (96, 16 * 96));
            assert!(shown.gptq_loss < shown.rtn_loss && shown.largest > 0.0);
            // Before a column's turn it is nudged; nothing behind the first column's frame has been rounded.
            assert!(shown.frames[0].iter().enumerate().any(|(at, &x)| at % 96 > 0 && x != 0));
        }
    }
}

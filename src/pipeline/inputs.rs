//! What a stage's inputs leave behind: the sums that its layers are quantized by, and the rows that are
//! held out of them.

use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::gptq::drift::Drift;
use crate::gptq::held::{Goal, Held};
use crate::gptq::stage::Calibration;
use crate::kernels::embedding::gather;
use crate::kernels::norm::add_squares;
use crate::kernels::scatter::add_rows;
use crate::kernels::symmetric::SymmetricPanels;
use crate::tensor::{Elem, Tensor};

/// What is summed up beside the Hessian.
pub(super) enum Beside {
    Nothing,
    /// Inputs of the original model.
    Inputs,
    /// Outputs of so many features that are wanted of the stage's one layer.
    Outputs(usize),
}

pub(super) struct StageInputs {
    hessian: SymmetricPanels,
    drift: Option<Drift>,
    held: Option<Held>,
    /// Of the tokens held out one in so many judges.
    every: usize,
    /// 2 / the tokens that are summed up.
    scale: f32,
}

impl StageInputs {
    /// For inputs of `n` features, of which `tokens` are summed up and one `every` so many of the others judges.
    pub fn new(device: &Device, beside: &Beside, n: usize, tokens: usize, every: usize) -> Result<Self> {
        Ok(Self {
            hessian: SymmetricPanels::zeros(device, n)?,
            drift: match beside {
                Beside::Nothing => None,
                Beside::Inputs => Some(Drift::of_inputs(device, n)?),
                Beside::Outputs(rows) => Some(Drift::of_outputs(device, *rows, n)?),
            },
            held: None,
            every,
            scale: 2.0 / tokens.max(1) as f32,
        })
    }

    /// Takes a micro-batch [tokens, n] that the quantized model has `seen`, and what the layers should make
    /// of it.
    pub fn take(&mut self, seen: &Tensor, goal: &Goal, held: bool) -> Result<()> {
        if held {
            return self.hold(seen, goal);
        }
        self.hessian.accumulate(seen, self.scale)?;
        match (&mut self.drift, goal) {
            (Some(drift), Goal::Inputs(left) | Goal::Outputs(left)) => {
                drift.accumulate(left, seen, self.scale)
            }
            (_, Goal::Own) | (None, _) => Ok(()),
        }
    }

    fn hold(&mut self, seen: &Tensor, goal: &Goal) -> Result<()> {
        let rows: Vec<u32> = (0..seen.rows() as u32).step_by(self.every).collect();
        let some = |x: &Tensor| gather(&[x], &rows);
        let (seen, goal) = (some(seen)?, goal.map(some)?);
        self.held = Some(match self.held.take() {
            Some(held) => Held { seen: held.seen.joined(&seen)?, goal: held.goal.joined(goal)? },
            None => Held { seen, goal },
        });
        Ok(())
    }

    pub async fn done(mut self) -> Result<Calibration> {
        if let Some(drift) = &mut self.drift {
            drift.complete(&self.hessian).await?;
        }
        Ok(Calibration { hessian: Rc::new(self.hessian), drift: self.drift, held: self.held })
    }
}

/// Rows times how much their token counts: what a layer adds to the stream is normalized there, so that an
/// error counts in relation to the token's length in `stream`, [tokens, hidden]. The squares of the factors
/// have the mean 1 within a micro-batch.
pub(super) struct Weighing {
    rows: Vec<u32>,
    factors: Vec<f32>,
}

impl Weighing {
    pub async fn by(stream: &Tensor) -> Result<Self> {
        let tokens = stream.rows();
        let mut squares = Tensor::zeros(stream.device(), Elem::F32, &[tokens])?;
        add_squares(stream, &mut squares)?;
        let squares = squares.to_f32().await?;
        // A token without a length would count without end.
        let least = 1e-6 * squares.iter().sum::<f32>() / tokens.max(1) as f32;
        let counts: Vec<f64> =
            squares.iter().map(|&square| 1.0 / f64::from(square.max(least).max(f32::MIN_POSITIVE))).collect();
        let mean = counts.iter().sum::<f64>() / tokens.max(1) as f64;
        let factors = counts.iter().map(|count| (count / mean).sqrt() as f32).collect();
        Ok(Self { rows: (0..tokens as u32).collect(), factors })
    }

    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        let mut out = Tensor::zeros(x.device(), Elem::F32, x.shape())?;
        add_rows(&mut out, x, &self.rows, &self.factors)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    /// Factors whose squares go as 1/length², with the mean 1.
    #[test]
    fn long_tokens_count_less() {
        let (tokens, hidden, n) = (6, 32, 8);
        let lengths = [1.0, 2.0, 1.0, 1000.0, 4.0, 0.5];
        let mut stream = noise(tokens * hidden, 1);
        for (token, length) in stream.chunks_mut(hidden).zip(lengths) {
            let norm = token.iter().map(|x| x * x).sum::<f32>().sqrt();
            token.iter_mut().for_each(|x| *x *= length / norm);
        }
        let x = noise(tokens * n, 2);
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let tensor = |values: &[f32]| {
                Tensor::from_f32(device, &[tokens, values.len() / tokens], values.to_vec()).unwrap()
            };
            let (weighing, got) = pollster::block_on(async {
                let weighing = Weighing::by(&tensor(&stream)).await.unwrap();
                let got = weighing.of(&tensor(&x)).unwrap().to_f32().await.unwrap();
                (weighing, got)
            });
            let mean = weighing.factors.iter().map(|f| f * f).sum::<f32>() / tokens as f32;
            assert!((mean - 1.0).abs() < 1e-5);
            for (factor, length) in weighing.factors.iter().zip(lengths) {
                // The longest of all counts for nothing, but is a number.
                assert!((factor * length / (weighing.factors[0] * lengths[0]) - 1.0).abs() < 1e-3);
            }
            for ((got, x), factor) in got.chunks(n).zip(x.chunks(n)).zip(&weighing.factors) {
                assert!(got.iter().zip(x).all(|(got, x)| (got - factor * x).abs() < 1e-5));
            }
        }
    }

    #[test]
    fn one_held_token_in_so_many_judges_and_none_is_summed_up() {
        let (tokens, n, rows) = (7, 4, 3);
        let tensor =
            |values: Vec<f32>, cols| Tensor::from_f32(&Device::Cpu, &[tokens, cols], values).unwrap();
        let seen = noise(tokens * n, 1);
        let wanted = noise(tokens * rows, 2);
        let mut inputs = StageInputs::new(&Device::Cpu, &Beside::Outputs(rows), n, tokens, 3).unwrap();
        for _ in 0..2 {
            let goal = Goal::Outputs(tensor(wanted.clone(), rows));
            inputs.take(&tensor(seen.clone(), n), &goal, true).unwrap();
        }
        let calibration = pollster::block_on(inputs.done()).unwrap();
        assert_eq!(pollster::block_on(calibration.hessian.diagonal()).unwrap(), [0.0; 4]);
        let held = calibration.held.unwrap();
        let Goal::Outputs(y) = &held.goal else { panic!("another goal") };
        let every_third = |values: &[f32], cols: usize| -> Vec<f32> {
            values.chunks(cols).step_by(3).flatten().copied().collect::<Vec<f32>>().repeat(2)
        };
        assert_eq!(held.seen.f32s().unwrap(), every_third(&seen, n));
        assert_eq!(y.f32s().unwrap(), every_third(&wanted, rows));
    }
}

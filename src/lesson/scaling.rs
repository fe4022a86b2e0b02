//! Activation-aware scaling (AWQ, arXiv 2306.00978) beside GPTQ: same layer, same bits, same grid, same text.
//!
//! AWQ rounds W·diag(s) to nearest and divides by s again, where s_j = (mean |x_j|)^α: the weights of large
//! inputs get a finer grid, at the cost of their neighbours in the group. α is searched for the least loss on the
//! calibration text. Both together: GPTQ on W·diag(s), with the Hessian of X·diag(1/s).

use serde::{Deserialize, Serialize};

use super::layer::{Layer, Place};
use super::methods::{Setting, Taken, losses, quantize, scaled};
use crate::error::Result;
use crate::gptq::awq::{STEPS, factors};
use crate::gptq::scheme::{BITS, Preset};

/// What is asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Beside {
    pub place: Place,
    /// Its bits do not matter: all are tried.
    pub setting: Setting,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Contest {
    pub rows: usize,
    pub tokens: usize,
    pub held_tokens: usize,
    pub alphas: Vec<f64>,
    pub rounds: Vec<Round>,
}

/// All methods with so many bits.
#[derive(Debug, Clone, Serialize)]
pub struct Round {
    pub bits: u32,
    /// Loss of AWQ by α, on the calibration text and on the other.
    pub by_alpha: Vec<f64>,
    pub held_by_alpha: Vec<f64>,
    /// The α found, by the calibration text.
    pub alpha: f64,
    /// "rtn", "awq", "gptq", "gptq_order", "awq_gptq".
    pub methods: Vec<Entry>,
    /// Rows, of all, where AWQ loses less than GPTQ (in natural order), on either text.
    pub awq_wins: usize,
    pub held_awq_wins: usize,
}

/// One method.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    pub name: String,
    pub loss: f64,
    pub held_loss: f64,
}

impl Beside {
    /// Works it out.
    ///
    /// # Errors
    /// As [`quantize`].
    pub async fn solve(
        &self,
        layer: &Layer,
        mut tell: impl AsyncFnMut(usize, usize) -> bool,
    ) -> Result<Contest> {
        let inputs = &layer.inputs;
        let alphas: Vec<f64> = (0..=STEPS).map(|step| f64::from(step) / f64::from(STEPS)).collect();
        let mut rounds = Vec::new();
        for (index, bits) in BITS.into_iter().enumerate() {
            let setting = Setting { bits, ..self.setting.clone() };
            let sum = |losses: &[f64]| losses.iter().sum::<f64>();
            let (mut by_alpha, mut held_by_alpha, mut best) = (Vec::new(), Vec::new(), None);
            for &alpha in &alphas {
                let s = factors(&inputs.magnitude, alpha);
                let error = scaled(&setting, layer, &s, Preset::Rtn, Taken::Natural).await?;
                let (own, held) = (losses(&error, &inputs.dense)?, losses(&error, &inputs.held)?);
                by_alpha.push(sum(&own));
                held_by_alpha.push(sum(&held));
                if best
                    .as_ref()
                    .is_none_or(|(_, least, _): &(f64, Vec<f64>, Vec<f64>)| sum(&own) < sum(least))
                {
                    best = Some((alpha, own, held));
                }
                tell(index * alphas.len() + by_alpha.len(), BITS.len() * alphas.len()).await;
            }
            let Some((alpha, awq, held_awq)) = best else { continue };
            let s = factors(&inputs.magnitude, alpha);
            let scheme = setting.scheme(Preset::Fast)?;
            let own = |taken| quantize(&scheme, taken, &layer.weight, &inputs.hessian);
            let rtn_scheme = setting.scheme(Preset::Rtn)?;
            let rtn = quantize(&rtn_scheme, Taken::Natural, &layer.weight, &inputs.hessian);
            let errors = [
                ("rtn", rtn.await?.error),
                ("gptq", own(Taken::Natural).await?.error),
                ("gptq_order", own(Taken::Descending).await?.error),
                ("awq_gptq", scaled(&setting, layer, &s, Preset::Fast, Taken::Natural).await?),
            ];
            let mut methods =
                vec![Entry { name: "awq".to_owned(), loss: sum(&awq), held_loss: sum(&held_awq) }];
            let (mut awq_wins, mut held_awq_wins) = (0, 0);
            let wins =
                |awq: &[f64], gptq: &[f64]| awq.iter().zip(gptq).filter(|(awq, gptq)| awq < gptq).count();
            for (name, error) in &errors {
                let (own, held) = (losses(error, &inputs.dense)?, losses(error, &inputs.held)?);
                if *name == "gptq" {
                    (awq_wins, held_awq_wins) = (wins(&awq, &own), wins(&held_awq, &held));
                }
                methods.push(Entry { name: (*name).to_owned(), loss: sum(&own), held_loss: sum(&held) });
            }
            methods.swap(0, 1);
            rounds.push(Round { bits, by_alpha, held_by_alpha, alpha, methods, awq_wins, held_awq_wins });
        }
        Ok(Contest {
            rows: layer.weight.rows(),
            tokens: inputs.tokens,
            held_tokens: inputs.held_tokens,
            alphas,
            rounds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lesson::layer::tests::layer;

    #[test]
    fn scaling_is_between_rounding_and_gptq_on_this_layer() {
        let layer = layer("model.layers.0.self_attn.q_proj", 512);
        let setting = Setting { bits: 4, group_size: 64, sym: true, search: false, damp_percent: 0.01 };
        let place = Place { own: false, tokens: 512, module: layer.module.clone() };
        let asked = Beside { place, setting };
        let contest = pollster::block_on(asked.solve(&layer, async |_, _| true)).unwrap();
        assert_eq!(contest.rounds.iter().map(|round| round.bits).collect::<Vec<_>>(), BITS);
        for round in &contest.rounds {
            let names: Vec<&str> = round.methods.iter().map(|entry| entry.name.as_str()).collect();
            assert_eq!(names, ["rtn", "awq", "gptq", "gptq_order", "awq_gptq"]);
            let loss = |at: usize| round.methods[at].loss;
            // α = 0 is rounding, and the search has it among its candidates.
            assert_eq!(round.by_alpha[0], loss(0));
            assert!(loss(1) <= loss(0) && loss(2) < loss(0), "{round:?}");
            let least = round.by_alpha.iter().copied().fold(f64::INFINITY, f64::min);
            assert_eq!(least, loss(1));
            assert!(round.awq_wins <= contest.rows);
        }
    }

    #[test]
    fn inputs_that_are_never_active_are_left_alone() {
        assert_eq!(factors(&[0.0, 1.0, 4.0], 0.5), [1.0, 0.5f32.sqrt(), 2f32.sqrt()]);
        assert_eq!(factors(&[0.0, 1.0, 4.0], 0.0), [1.0; 3]);
    }
}

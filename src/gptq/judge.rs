//! Several ways to round the same rows, of which held-out rows choose one.

use std::ops::Range;

use crate::error::Result;
use crate::gptq::held::{Held, distance};
use crate::gptq::losses::{Choice, HeldLosses};
use crate::gptq::rounding::{Rounded, swept};
use crate::gptq::stage::Prepared;
use crate::kernels::columns;
use crate::kernels::embedding;
use crate::tensor::Tensor;

/// Rows of a weight that tell how a sweep without a correction would do: one of so many.
const SAMPLED: usize = 4;
/// Rows of a weight at least that are enough to tell.
const ENOUGH: usize = 32;

/// Held-out rows, and what the original weight makes of them.
pub struct Judge<'a> {
    held: &'a Held,
    /// y, f32 [tokens, rows].
    wanted: Tensor,
}

/// The weight that is to be rounded.
pub struct Aim {
    /// f32 [rows, n], natural columns.
    pub target: Tensor,
    /// By which share of the correction it was moved.
    pub alpha: f64,
}

/// What was made of a weight so far.
pub struct Done {
    pub swept: Rounded,
    /// The sweep's result refined.
    pub refitted: Option<Rounded>,
    pub rtn: Rtn,
}

/// A weight rounded to nearest.
pub struct Rtn {
    pub scaled: Rounded,
    /// With inputs that nothing was done to, where they are divided.
    pub unscaled: Option<Rounded>,
}

impl Rtn {
    /// What others are compared with.
    pub fn untouched(&self) -> &Rounded {
        self.unscaled.as_ref().unwrap_or(&self.scaled)
    }
}

impl<'a> Judge<'a> {
    /// For rows `which` of a layer; `weight` [rows, n] has those.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(held: &'a Held, weight: &Tensor, which: Range<usize>) -> Result<Self> {
        Ok(Self { held, wanted: held.wanted(weight, which)? })
    }

    /// See [`Held::best_share`].
    ///
    /// # Errors
    /// Those of the device.
    pub async fn best_share(&self, weight: &Tensor, z: &Tensor) -> Result<f64> {
        self.held.best_share(&self.wanted, weight, z).await
    }

    /// What is kept of all that was done for `weight` [rows, n]: the better rounding of what was aimed at, unless
    /// a sweep without the correction or plain rounding comes nearer to y.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn choose(
        &self,
        prepared: &Prepared,
        weight: &Tensor,
        aim: &Aim,
        done: Done,
    ) -> Result<(Rounded, HeldLosses)> {
        let mut held = HeldLosses { alpha: aim.alpha * weight.rows() as f64, ..HeldLosses::default() };
        let mut kept = done.swept;
        let mut outputs = self.held.outputs(&kept.dequantized)?;
        held.choice = Choice::Swept;
        if aim.alpha == 0.0 {
            held.plain = distance(&outputs, &self.wanted).await?;
        }
        if let Some(refitted) = done.refitted {
            let [aimed, better] = [&aim.target, &refitted.dequantized].map(|w| self.held.outputs(w));
            let (aimed, better) = (aimed?, better?);
            if distance(&better, &aimed).await? < distance(&outputs, &aimed).await? {
                (kept, outputs, held.choice) = (refitted, better, Choice::Full);
            }
        }
        held.kept = distance(&outputs, &self.wanted).await?;
        held.rtn = self.loss(done.rtn.untouched()).await?;
        let mut others = Vec::new();
        if aim.alpha > 0.0 {
            let (loss, plain) = self.plain(prepared, weight, &outputs, held.kept).await?;
            held.plain = loss;
            others.extend(plain.map(|plain| (plain, loss, Choice::Plain)));
        }
        // Rounding has its groups in natural order.
        if !prepared.scheme.needs_g_idx() {
            let Rtn { scaled, unscaled } = done.rtn;
            let loss = if unscaled.is_some() { self.loss(&scaled).await? } else { held.rtn };
            others.push((scaled, loss, Choice::Rtn));
        }
        for (other, loss, choice) in others {
            if loss < held.kept {
                // Neither was moved.
                (kept, held.kept, held.choice, held.alpha) = (other, loss, choice, 0.0);
            }
        }
        Ok((kept, held))
    }

    /// The loss of a sweep of `weight` as it is, and its outcome where that may be better than what has these
    /// `outputs` and this `loss`. Some rows usually tell that it is not, and by how much: a quarter of the time.
    async fn plain(
        &self,
        prepared: &Prepared,
        weight: &Tensor,
        outputs: &Tensor,
        loss: f64,
    ) -> Result<(f64, Option<Rounded>)> {
        let sweep =
            async |rows: &Tensor| swept(prepared, &columns::gather(rows, &prepared.natural)?, None).await;
        if weight.rows() >= SAMPLED * ENOUGH {
            let rows: Vec<u32> = (0..weight.rows() as u32).step_by(SAMPLED).collect();
            let which = Tensor::from_u32(weight.device(), &[rows.len()], rows.clone())?;
            let [wanted, outputs] = [&self.wanted, outputs].map(|of| columns::gather(of, &which));
            let wanted = wanted?;
            let plain = sweep(&embedding::gather(&[weight], &rows)?).await?;
            let plain = distance(&self.held.outputs(&plain.dequantized)?, &wanted).await?;
            let ours = distance(&outputs?, &wanted).await?;
            if plain > ours {
                return Ok((loss * plain / ours, None));
            }
        }
        let plain = sweep(weight).await?;
        Ok((self.loss(&plain).await?, Some(plain)))
    }

    /// (2/tokens)·Σ‖y − Ŵ·x̃‖².
    async fn loss(&self, rounded: &Rounded) -> Result<f64> {
        distance(&self.held.outputs(&rounded.dequantized)?, &self.wanted).await
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::device::Device;
    use crate::gptq::held::Goal;
    use crate::gptq::scheme::{Preset, Scheme};
    use crate::gptq::stage::prepare;
    use crate::kernels::scales::{Grid, ScaleType};
    use crate::kernels::symmetric::SymmetricPanels;
    use crate::kernels::testing::noise;
    use crate::tensor::Elem;

    const N: usize = 32;

    fn tensor(rows: usize, values: Vec<f32>) -> Tensor {
        Tensor::from_f32(&Device::Cpu, &[rows, N], values).unwrap()
    }

    /// `weight` moved by so much of `step`.
    fn moved(weight: &[f32], step: &[f32], share: f32) -> Rounded {
        let values = weight.iter().zip(step).map(|(w, s)| w + share * s).collect();
        Rounded {
            codes: Tensor::zeros(&Device::Cpu, Elem::U8, &[weight.len() / N, N]).unwrap(),
            grid: Grid::new(&Device::Cpu, weight.len() / N, 1).unwrap(),
            dequantized: tensor(weight.len() / N, values),
            loss: 0.0,
        }
    }

    /// What no weight that is allowed here reaches is a hundred times what rounding loses, and by chance points
    /// the way in which the worse one errs.
    #[test]
    fn of_two_roundings_the_nearer_to_their_aim_is_kept_whatever_else_is_missing() {
        let (rows, tokens) = (4, 50);
        let (weight, step) = (noise(rows * N, 1), noise(rows * N, 2));
        let seen = || tensor(tokens, noise(tokens * N, 3));
        let y =
            crate::kernels::gemm::linear(&seen(), &moved(&weight, &step, 10.0).dequantized, None).unwrap();
        let held = Held { seen: seen(), goal: Goal::Outputs(y) };
        let mut hessian = SymmetricPanels::zeros(&Device::Cpu, N).unwrap();
        hessian.accumulate(&seen(), 1.0).unwrap();
        let scheme = Scheme::preset(Preset::Default, 4, Some(N));
        let inputs = Some(Rc::new(hessian).into());
        let of = prepare(&scheme, ScaleType::F16, &Device::Cpu, N, inputs, "test");
        let (prepared, original) = (pollster::block_on(of).unwrap(), tensor(rows, weight.clone()));
        let judge = Judge::new(&held, &original, 0..rows).unwrap();
        let aim = Aim { target: tensor(rows, weight.clone()), alpha: 0.0 };
        let rtn = Rtn { scaled: moved(&weight, &step, -1.0), unscaled: None };
        let (swept, refitted) = (moved(&weight, &step, 0.1), moved(&weight, &step, -0.05));
        let want = refitted.dequantized.f32s().unwrap().to_vec();
        let done = Done { swept, refitted: Some(refitted), rtn };
        let (kept, losses) = pollster::block_on(judge.choose(&prepared, &original, &aim, done)).unwrap();
        assert_eq!(losses.choice, Choice::Full);
        assert_eq!(kept.dequantized.f32s().unwrap(), want);
        assert!(losses.kept > losses.plain && losses.kept < losses.rtn, "{losses:?}");
    }
}

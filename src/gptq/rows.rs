//! Some rows of a linear layer: rounded in the ways that its scheme asks for, the best of them kept. Rows do not
//! influence each other, so a weight of any size goes through here in pieces.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::gptq::factor::Factor;
use crate::gptq::judge::{Aim, Done, Judge, Rtn};
use crate::gptq::losses::Losses;
use crate::gptq::refit::refined;
use crate::gptq::rounding::{Rounded, rounded, swept};
use crate::gptq::scheme::Alpha;
use crate::gptq::stage::Prepared;
use crate::kernels::add::add_scaled;
use crate::kernels::columns::gather;
use crate::kernels::scales::{Fit, Grid};
use crate::tensor::Tensor;

/// Some rows of a quantized weight.
pub struct QuantizedRows {
    /// u8 [rows, n], natural columns.
    pub codes: Vec<u8>,
    /// [rows, groups]
    pub scales: Vec<f32>,
    /// [rows, groups]
    pub zeros: Vec<u8>,
    /// ŵ, f32 [rows, n], on the device.
    pub dequantized: Tensor,
    /// `None` without a factor.
    pub loss: Option<Losses>,
}

/// Quantizes `weight` [rows, n], rows `which` of a linear layer as stored (f32, f16 or bf16).
///
/// # Errors
/// Those of the device.
pub async fn quantize_rows(
    prepared: &Prepared,
    weight: &Tensor,
    which: Range<usize>,
) -> Result<QuantizedRows> {
    if weight.cols() != prepared.n {
        return Err(Error::Internal(format!("a weight {:?} for {} inputs", weight.shape(), prepared.n)));
    }
    let Some(factor) = &prepared.factor else {
        let target = gather(weight, &prepared.natural)?;
        return finished(swept(prepared, &target, None).await?, None).await;
    };
    let rtn = rounded_to_nearest(prepared, factor, weight).await?;
    let mut losses = Losses { rtn: rtn.untouched().loss, ..Losses::default() };
    let kept = if prepared.scheme.sweeps() {
        let judge = match &prepared.held {
            Some(held) => Some(Judge::new(held, weight, which.clone())?),
            None => None,
        };
        let aim = aimed_at(prepared, weight, which, judge.as_ref()).await?;
        let swept = swept(prepared, &aim.target, None).await?;
        let refitted = match &prepared.hessian {
            Some(hessian) => Some(refined(prepared, factor, hessian, &aim.target, &swept).await?),
            None => None,
        };
        match judge {
            Some(judge) => {
                let done = Done { swept, refitted, rtn };
                let (kept, held) = judge.choose(prepared, weight, &aim, done).await?;
                losses.held = Some(held);
                kept
            }
            // The sums that a sweep minimizes have to do.
            None => refitted.filter(|refitted| refitted.loss < swept.loss).unwrap_or(swept),
        }
    } else {
        let searched = rounded(prepared, factor, weight, prepared.kind.fit, None).await?;
        if searched.loss <= rtn.scaled.loss { searched } else { rtn.scaled }
    };
    losses.gptq = kept.loss;
    finished(kept, Some(losses)).await
}

async fn rounded_to_nearest(prepared: &Prepared, factor: &Factor, weight: &Tensor) -> Result<Rtn> {
    let unscaled = match &prepared.scale {
        Some(scale) => Some(rounded(prepared, factor, weight, Fit::MinMax, Some(scale.undone())).await?),
        None => None,
    };
    Ok(Rtn { scaled: rounded(prepared, factor, weight, Fit::MinMax, None).await?, unscaled })
}

async fn aimed_at(
    prepared: &Prepared,
    weight: &Tensor,
    which: Range<usize>,
    judge: Option<&Judge<'_>>,
) -> Result<Aim> {
    let mut target = gather(weight, &prepared.natural)?;
    let Some(correction) = &prepared.correction else { return Ok(Aim { target, alpha: 0.0 }) };
    let z = correction.of(&target, which)?;
    let alpha = match (prepared.scheme.alpha, judge) {
        (Alpha::Fixed(alpha), _) => alpha,
        (Alpha::Measured, Some(judge)) => judge.best_share(&target, &z).await?,
        (Alpha::Measured, None) => 0.0,
    };
    add_scaled(&mut target, &z, alpha as f32)?;
    Ok(Aim { target, alpha })
}

/// Codes, u8 [rows, n] in natural columns, of `weight` [rows, n] on a grid that is there already, by the
/// loop of [`quantize_rows`].
///
/// # Errors
/// [`Error::Internal`] without a factor; those of the device.
pub async fn codes_on_grid(prepared: &Prepared, weight: &Tensor, grid: Grid) -> Result<Tensor> {
    if prepared.factor.is_none() || prepared.follows_order {
        return Err(Error::Internal("a grid that is there needs a factor and static groups".into()));
    }
    Ok(swept(prepared, weight, Some(grid)).await?.codes)
}

async fn finished(rounded: Rounded, loss: Option<Losses>) -> Result<QuantizedRows> {
    Ok(QuantizedRows {
        codes: rounded.codes.to_bytes().await?,
        scales: rounded.grid.scales.to_f32().await?,
        zeros: rounded.grid.zeros.to_f32().await?.iter().map(|&z| z as u8).collect(),
        dequantized: rounded.dequantized,
        loss,
    })
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::device::Device;
    use crate::gptq::drift::Drift;
    use crate::gptq::held::{Goal, Held};
    use crate::gptq::losses::Choice;
    use crate::gptq::scheme::{Preset, Scheme};
    use crate::gptq::stage::{Calibration, prepare};
    use crate::kernels::scales::ScaleType;
    use crate::kernels::symmetric::SymmetricPanels;
    use crate::kernels::testing::{noise, test_gpu};

    const ROWS: usize = 40;
    const N: usize = 160;

    /// Inputs with a few strong directions, [tokens, N].
    fn inputs(tokens: usize, seed: u64) -> Vec<f32> {
        let (strengths, mix) = (noise(tokens * 8, seed), noise(8 * N, 77));
        let mut x: Vec<f32> = noise(tokens * N, seed + 1).iter().map(|x| 0.3 * x).collect();
        for (x, strengths) in x.chunks_mut(N).zip(strengths.chunks(8)) {
            for (strength, direction) in strengths.iter().zip(mix.chunks(N)) {
                x.iter_mut().zip(direction).for_each(|(x, d)| *x += strength * d);
            }
        }
        x
    }

    /// What an earlier layer's rounding may have made of them: something of each column is now another's.
    fn drifted(x: &[f32], seed: u64) -> Vec<f32> {
        let other = noise(x.len(), seed);
        let shifted = |i: usize| x[i / N * N + (i % N + 1) % N];
        (0..x.len()).map(|i| 0.9 * x[i] + 0.15 * shifted(i) + 0.05 * other[i]).collect()
    }

    /// Inputs of the quantized model, and of the original one.
    fn both(x: &[f32], seed: u64) -> [Vec<f32>; 2] {
        [drifted(x, seed), x.to_vec()]
    }

    fn quantize(
        device: &Device,
        scheme: &Scheme,
        rows: usize,
        [sum, held]: [&[Vec<f32>; 2]; 2],
    ) -> QuantizedRows {
        let tensor = |x: &[f32]| Tensor::from_f32(device, &[x.len() / N, N], x.to_vec()).unwrap();
        let [seen, original] = sum.each_ref().map(|x| tensor(x));
        let scale = 2.0 / seen.rows() as f32;
        let mut hessian = SymmetricPanels::zeros(device, N).unwrap();
        hessian.accumulate(&seen, scale).unwrap();
        let mut drift = Drift::of_inputs(device, N).unwrap();
        drift.accumulate(&original, &seen, scale).unwrap();
        pollster::block_on(drift.complete(&hessian)).unwrap();
        let [seen, original] = held.each_ref().map(|x| tensor(x));
        let calibration = Calibration {
            hessian: Rc::new(hessian),
            drift: scheme.needs_original().then_some(drift),
            held: Some(Held { seen, goal: Goal::Inputs(original) }),
        };
        pollster::block_on(async {
            let prepared =
                prepare(scheme, ScaleType::F16, device, N, Some(calibration), "test").await.unwrap();
            quantize_rows(&prepared, &tensor(&noise(rows * N, 3)), 0..rows).await.unwrap()
        })
    }

    fn scheme(alpha: Alpha, refit: bool) -> Scheme {
        Scheme { alpha, refit, ..Scheme::preset(Preset::Default, 3, Some(32)) }
    }

    #[test]
    fn a_correction_and_a_refit_lose_less_on_rows_they_never_saw() {
        let (sum, held) = (both(&inputs(1200, 10), 5), both(&inputs(150, 20), 6));
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let of = |alpha, refit| {
                let loss = quantize(device, &scheme(alpha, refit), ROWS, [&sum, &held]).loss.unwrap();
                println!("{} {alpha:?} {refit}: {loss:?}", device.describe());
                loss.held.unwrap()
            };
            let plain = of(Alpha::Fixed(0.0), false);
            let corrected = of(Alpha::Measured, false);
            let both = of(Alpha::Measured, true);
            assert!(plain.kept < 0.8 * plain.rtn);
            assert_eq!((plain.kept, plain.choice), (plain.plain, Choice::Swept));
            assert!(corrected.alpha > 0.5 * ROWS as f64 && corrected.choice == Choice::Swept);
            assert!(corrected.kept < 0.5 * plain.kept);
            assert!((corrected.plain / plain.plain - 1.0).abs() < 1e-3);
            assert!(both.kept <= corrected.kept);
        }
    }

    /// A sweep for inputs that say nothing about those that come.
    #[test]
    fn what_rounding_does_better_is_left_to_it() {
        let (sum, held) = (both(&inputs(6, 10), 5), both(&noise(150 * N, 30), 6));
        let scheme = Scheme { damp_percent: 1e-4, mse: false, ..scheme(Alpha::Measured, true) };
        let kept = quantize(&Device::Cpu, &scheme, ROWS, [&sum, &held]);
        let loss = kept.loss.unwrap().held.unwrap();
        assert_eq!(loss.choice, Choice::Rtn, "{loss:?}");
        assert!(loss.kept == loss.rtn && loss.rtn < loss.plain, "{loss:?}");
        let rtn = Scheme::preset(Preset::Rtn, 3, Some(32));
        let rtn = quantize(&Device::Cpu, &rtn, ROWS, [&sum, &held]);
        assert!(kept.codes == rtn.codes && kept.scales == rtn.scales);
    }

    /// Too many rows to sweep all of them once more.
    #[test]
    fn some_rows_tell_what_a_correction_is_worth() {
        let rows = 160;
        let (sum, held) = (both(&inputs(1200, 10), 5), both(&inputs(150, 20), 6));
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let of = |alpha, held| {
                quantize(device, &scheme(alpha, false), rows, [&sum, held]).loss.unwrap().held.unwrap()
            };
            let (plain, corrected) = (of(Alpha::Fixed(0.0), &held), of(Alpha::Fixed(1.0), &held));
            assert_eq!(corrected.choice, Choice::Swept);
            let ratio = corrected.plain / plain.plain;
            assert!(ratio != 1.0 && (ratio - 1.0).abs() < 0.1, "{}: {ratio}", device.describe());
            // Where the quantized model sees what the original does, the correction is wrong.
            let same = [held[1].clone(), held[1].clone()];
            let (plain, kept) = (of(Alpha::Fixed(0.0), &same), of(Alpha::Fixed(1.0), &same));
            assert_eq!((kept.choice, kept.kept), (Choice::Plain, plain.plain), "{}", device.describe());
            assert_eq!(kept.alpha, 0.0);
        }
    }
}

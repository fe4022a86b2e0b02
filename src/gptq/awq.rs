//! Scaling of inputs by their size, as AWQ does (arXiv 2306.00978).
//!
//! W·diag(s) is rounded instead of W, for inputs divided by s: with s_j = (mean |x_j|)^α the weights of large inputs
//! get a finer grid, at the cost of their neighbours in the group. α is the one of 0, 1/20, … 1 for which rounding to
//! nearest on min-max grids loses least, ‖(W − Q(W·diag(s))·diag(1/s))·X‖².

use std::rc::Rc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::gptq::held::{Goal, Held};
use crate::gptq::rounding::{Stretched, rounded};
use crate::gptq::stage::{Calibration, Prepared};
use crate::kernels::columns::copy;
use crate::kernels::scales::Fit;
use crate::kernels::scatter::add_rows;
use crate::kernels::stretch::stretch;
use crate::kernels::symmetric::{PANEL, SymmetricPanels};
use crate::tensor::{Elem, Tensor};

/// Steps of α from 0 to 1.
pub const STEPS: u32 = 20;

/// s and 1/s on a device, f32 [n] both.
pub struct Scale {
    pub factors: Vec<f32>,
    times: Tensor,
    by: Tensor,
}

impl Scale {
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Device, factors: Vec<f32>) -> Result<Self> {
        let inverse = factors.iter().map(|s| 1.0 / s).collect();
        Ok(Self {
            times: Tensor::from_f32(device, &[factors.len()], factors.clone())?,
            by: Tensor::from_f32(device, &[factors.len()], inverse)?,
            factors,
        })
    }

    /// W·diag(s) of `weight` f32 [rows, n].
    ///
    /// # Errors
    /// Those of the device.
    pub fn times(&self, weight: &mut Tensor) -> Result<()> {
        stretch(weight, &self.times)
    }

    /// X·diag(1/s) of `x` f32 [rows, n].
    ///
    /// # Errors
    /// Those of the device.
    pub fn divide(&self, x: &mut Tensor) -> Result<()> {
        stretch(x, &self.by)
    }

    /// The rounding of W·diag(s) as one of W.
    fn done(&self) -> Stretched<'_> {
        Stretched { to: &self.times, back: &self.by }
    }

    /// The rounding of W as one of W·diag(s).
    pub(super) fn undone(&self) -> Stretched<'_> {
        Stretched { to: &self.by, back: &self.times }
    }

    /// What the inputs say when they are divided.
    ///
    /// # Errors
    /// [`Error::Internal`] where the original's activations go along; those of the device.
    pub fn divided(&self, inputs: &Calibration) -> Result<Calibration> {
        let h = &inputs.hessian;
        let mut panels = vec![];
        for (p, panel) in h.panels.iter().enumerate() {
            let first = p * PANEL;
            let columns = first..first + panel.cols();
            let inverse: Vec<f32> = self.factors[first..].iter().map(|s| 1.0 / s).collect();
            let own = Tensor::from_f32(h.device(), &[columns.len()], inverse[..columns.len()].to_vec())?;
            let mut across = copy(panel)?;
            stretch(&mut across, &own)?;
            let mut out = Tensor::zeros(h.device(), Elem::F32, panel.shape())?;
            add_rows(&mut out, &across, &(0..panel.rows() as u32).collect::<Vec<_>>(), &inverse)?;
            panels.push(out);
        }
        let held = match &inputs.held {
            Some(Held { seen, goal: Goal::Own }) => {
                let mut seen = copy(seen)?;
                self.divide(&mut seen)?;
                Some(Held { seen, goal: Goal::Own })
            }
            Some(_) => return Err(Error::Internal("inputs with a goal are not divided".into())),
            None => None,
        };
        let hessian = Rc::new(SymmetricPanels { n: h.n, panels });
        Ok(Calibration { hessian, drift: None, held })
    }
}

/// (mean |x_j|)^α from the means or multiples of them, normalized so that the product of the smallest and the largest is
/// 1; inputs that are never active keep 1.
pub fn factors(magnitudes: &[f32], alpha: f64) -> Vec<f32> {
    let s: Vec<f64> = magnitudes.iter().map(|&m| f64::from(m).powf(alpha)).collect();
    let alive = || magnitudes.iter().zip(&s).filter(|(m, _)| **m > 0.0).map(|(_, &s)| s);
    let (low, high) = alive().fold((f64::INFINITY, 0f64), |(low, high), s| (low.min(s), high.max(s)));
    let middle = (low * high).sqrt();
    // Very small ones would be lost in the Hessian's 32 bits.
    let of = |(&m, s): (&f32, f64)| if m > 0.0 { (s / middle).clamp(1e-4, 1e4) as f32 } else { 1.0 };
    magnitudes.iter().zip(s).map(of).collect()
}

/// What rounding W·diag(s) to nearest loses for each of `scales`: tr(E·H·Eᵀ) of some rows of a weight, f32, f16 or bf16
/// [rows, n]; `prepared` is that of the inputs as they are.
///
/// # Errors
/// [`Error::Internal`] without a factor; those of the device.
pub async fn losses(prepared: &Prepared, weight: &Tensor, scales: &[Scale]) -> Result<Vec<f64>> {
    let Some(factor) = &prepared.factor else {
        return Err(Error::Internal("a loss needs a factor".into()));
    };
    let mut losses = Vec::with_capacity(scales.len());
    for scale in scales {
        let rounded = rounded(prepared, factor, weight, Fit::MinMax, Some(scale.done())).await?;
        losses.push(rounded.loss);
    }
    Ok(losses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::rows::quantize_rows;
    use crate::gptq::scheme::{Preset, Scheme};
    use crate::gptq::stage::prepare;
    use crate::kernels::scales::ScaleType;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    const ROWS: usize = 24;
    const TOKENS: usize = 90;

    /// Inputs some of which are much larger than others, [TOKENS, n].
    fn inputs(n: usize) -> Vec<f32> {
        let size = |at: usize| if at % n % 9 == 4 { 8.0 } else { 0.5 };
        noise(TOKENS * n, 1).iter().enumerate().map(|(at, x)| x * size(at)).collect()
    }

    fn tensor(device: &Device, values: &[f32], n: usize) -> Tensor {
        Tensor::from_f32(device, &[values.len() / n, n], values.to_vec()).unwrap()
    }

    fn hessian(device: &Device, x: &[f32], n: usize) -> Rc<SymmetricPanels> {
        let mut panels = SymmetricPanels::zeros(device, n).unwrap();
        panels.accumulate(&tensor(device, x, n), 2.0 / TOKENS as f32).unwrap();
        Rc::new(panels)
    }

    fn magnitudes(x: &[f32], n: usize) -> Vec<f32> {
        (0..n).map(|j| x.iter().skip(j).step_by(n).map(|x| x.abs()).sum()).collect()
    }

    /// (2/tokens)·Σ‖(W − Ŵ)·x‖²
    fn lost(weight: &[f32], rounded: &[f32], x: &[f32], n: usize) -> f64 {
        let errors: Vec<f64> = weight.iter().zip(rounded).map(|(a, b)| f64::from(a - b)).collect();
        let of = |e: &[f64], x: &[f32]| e.iter().zip(x).map(|(e, x)| e * f64::from(*x)).sum::<f64>().powi(2);
        let sum: f64 = x.chunks(n).flat_map(|x| errors.chunks(n).map(move |e| of(e, x))).sum();
        2.0 * sum / TOKENS as f64
    }

    #[test]
    fn factors_have_their_middle_at_one_and_leave_the_dead_alone() {
        let s = factors(&[4.0, 0.0, 1.0, 9.0], 0.5);
        assert!(s[1] == 1.0 && (s[2] * s[3] - 1.0).abs() < 1e-6);
        assert!((s[0] / s[2] - 2.0).abs() < 1e-6 && (s[3] / s[2] - 3.0).abs() < 1e-6);
        assert_eq!(factors(&[4.0, 0.0, 1.0], 0.0), [1.0; 3]);
    }

    /// Over more than one panel, too.
    #[test]
    fn what_divided_inputs_say_is_what_inputs_say_divided() {
        for n in [36, 560] {
            let x = inputs(n);
            let s = factors(&magnitudes(&x, n), 0.6);
            let divided: Vec<f32> = x.iter().enumerate().map(|(at, x)| x / s[at % n]).collect();
            for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
                let held = Held { seen: tensor(device, &x, n), goal: Goal::Own };
                let own = Calibration { hessian: hessian(device, &x, n), drift: None, held: Some(held) };
                let got = Scale::new(device, s.clone()).unwrap().divided(&own).unwrap();
                let seen = pollster::block_on(got.held.unwrap().seen.to_f32()).unwrap();
                assert!(relative_error(&seen, &divided) < 1e-6);
                let want = hessian(device, &divided, n);
                for (got, want) in got.hessian.panels.iter().zip(&want.panels) {
                    let width = want.cols();
                    // What lies above the diagonal does not count.
                    let [got, want] = [got, want].map(|panel| {
                        let values = pollster::block_on(panel.to_f32()).unwrap();
                        let at = values.into_iter().enumerate();
                        at.filter(|(at, _)| at % width <= at / width).map(|(_, x)| x).collect::<Vec<_>>()
                    });
                    assert!(relative_error(&got, &want) < 1e-5, "{n}");
                }
            }
        }
    }

    #[test]
    fn losses_are_those_of_weights_rounded_and_divided_again() {
        let n = 64;
        let x = inputs(n);
        // The weights of large inputs are smaller, so that a finer grid for them costs their neighbours little.
        let size = |at: usize| if at % n % 9 == 4 { 0.3 } else { 1.0 };
        let weight: Vec<f32> = noise(ROWS * n, 5).iter().enumerate().map(|(at, w)| w * size(at)).collect();
        let scheme = Scheme::preset(Preset::Awq, 3, Some(32));
        let rtn = Scheme::preset(Preset::Rtn, 3, Some(32));
        let all: Vec<Vec<f32>> = [0.0, 0.5, 1.0].map(|alpha| factors(&magnitudes(&x, n), alpha)).into();
        let times = |values: &[f32], s: &[f32]| -> Vec<f32> {
            values.iter().enumerate().map(|(at, w)| w * s[at % n]).collect()
        };
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            pollster::block_on(async {
                let plain = prepare(&rtn, ScaleType::F16, device, n, None, "test").await.unwrap();
                let mut want = vec![];
                for s in &all {
                    let scaled = tensor(device, &times(&weight, s), n);
                    let rounded = quantize_rows(&plain, &scaled, 0..ROWS).await.unwrap().dequantized;
                    let inverse: Vec<f32> = s.iter().map(|s| 1.0 / s).collect();
                    let back = times(&rounded.to_f32().await.unwrap(), &inverse);
                    want.push(lost(&weight, &back, &x, n));
                }
                let own = Calibration::from(hessian(device, &x, n));
                let scales: Vec<Scale> = all.iter().map(|s| Scale::new(device, s.clone()).unwrap()).collect();
                let divided = scales[1].divided(&own).unwrap();
                let prepared = prepare(&scheme, ScaleType::F16, device, n, Some(own), "test").await.unwrap();
                let got = losses(&prepared, &tensor(device, &weight, n), &scales).await.unwrap();
                for (got, want) in got.iter().zip(&want) {
                    assert!((got / want - 1.0).abs() < 1e-3, "{got}, not {want}");
                }
                assert!(got[1] < 0.8 * got[0], "{got:?}");

                // Quantized with the scale folded in, the loss of plain rounding is still that.
                let prepared = prepare(&scheme, ScaleType::F16, device, n, Some(divided), "test");
                let prepared = prepared.await.unwrap().scaled(Rc::new(scales.into_iter().nth(1).unwrap()));
                let weight = tensor(device, &times(&weight, &all[1]), n);
                let kept = quantize_rows(&prepared, &weight, 0..ROWS).await.unwrap().loss.unwrap();
                assert!((kept.rtn / want[0] - 1.0).abs() < 1e-3, "{kept:?}, not {want:?}");
                assert!(kept.gptq <= 1.001 * want[1], "{kept:?}, {want:?}");
            });
        }
    }
}

//! The picture behind the name: a grey picture printed in few tones, by rounding each dot, by the error
//! diffusion of printers (Floyd and Steinberg), and by GPTQ itself.
//!
//! For GPTQ the picture's pixels are weights and the eye makes the Hessian: it sees dots through a blur, and
//! ‖blur(e)‖² = e·H·eᵀ where H_ij, the blur's overlap of two pixels, falls with their distance as
//! exp(−d²/4σ²). Pixels are cut into strips of a few lines, each a row of W, so that all share one H; within
//! a strip columns run from top to bottom, then to the right.

use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::layer::panels;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::gptq::rows::codes_on_grid;
use crate::gptq::scheme::{Preset, Scheme};
use crate::gptq::stage::prepare;
use crate::kernels::scales::{Grid, ScaleType};
use crate::tensor::Tensor;

/// What is asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Screen {
    pub width: usize,
    pub height: usize,
    /// Grey, 0 black to 255 white, [height, width].
    pub pixels: Vec<u8>,
    /// Tones are 2^bits.
    pub bits: u32,
    /// σ of the eye's blur, in pixels.
    pub sigma: f64,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Printed {
    pub prints: Vec<Print>,
}

/// One print.
#[derive(Debug, Clone, Serialize)]
pub struct Print {
    /// "rounded", "diffused", "gptq".
    pub name: String,
    /// Grey, as in [`Screen`].
    pub pixels: Vec<u8>,
    /// Root mean square of the difference to the picture, of 255: dot by dot, and through the blur.
    pub difference: f64,
    pub seen: f64,
}

/// Lines of a strip.
const STRIP: usize = 8;
const MOST_WIDTH: usize = 160;

impl Screen {
    /// Works it out.
    ///
    /// # Errors
    /// [`Error::Options`] for a picture or tones that cannot be.
    pub async fn solve(&self) -> Result<Printed> {
        let (width, height) = (self.width, self.height);
        if self.pixels.len() != width * height
            || !(1..=MOST_WIDTH).contains(&width)
            || !(STRIP..=1024).contains(&height)
            || !height.is_multiple_of(STRIP)
        {
            return Err(Error::options(
                format!("a picture of {width} × {height} with {} pixels", self.pixels.len()),
                format!("Use up to {MOST_WIDTH} columns and a multiple of {STRIP} lines"),
            ));
        }
        if !(1..=3).contains(&self.bits) || !(0.3..=3.0).contains(&self.sigma) {
            return Err(Error::options(
                format!("{} bits and a blur of {}", self.bits, self.sigma),
                "Use 1 to 3 bits and a blur of 0.3 to 3 pixels",
            ));
        }
        let most = f64::from((1u32 << self.bits) - 1);
        let grey: Vec<f64> = self.pixels.iter().map(|&x| f64::from(x) / 255.0).collect();
        let round = |x: f64| (x * most).round().clamp(0.0, most) / most;
        let rounded = grey.iter().map(|&x| round(x)).collect();
        let prints = [
            ("rounded", rounded),
            ("diffused", self.diffused(&grey, round)),
            ("gptq", self.gptq(&grey).await?),
        ];
        let print = |(name, print): (&str, Vec<f64>)| {
            let error: Vec<f64> = grey.iter().zip(&print).map(|(x, y)| x - y).collect();
            Print {
                name: name.to_owned(),
                pixels: print.iter().map(|x| (x * 255.0).round() as u8).collect(),
                difference: 255.0 * root_mean_square(&error),
                seen: 255.0 * root_mean_square(&blurred(&error, width, self.sigma)),
            }
        };
        Ok(Printed { prints: prints.map(print).into() })
    }

    /// Floyd and Steinberg: 7, 3, 5 and 1 sixteenths of each error to the right and to the line below.
    fn diffused(&self, grey: &[f64], round: impl Fn(f64) -> f64) -> Vec<f64> {
        let (width, height) = (self.width as isize, self.height as isize);
        let mut print = grey.to_vec();
        for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
            let at = (y * width + x) as usize;
            let value = round(print[at]);
            let error = print[at] - value;
            print[at] = value;
            for (dx, dy, share) in [(1, 0, 7.0), (-1, 1, 3.0), (0, 1, 5.0), (1, 1, 1.0)] {
                if (0..width).contains(&(x + dx)) && y + dy < height {
                    print[((y + dy) * width + x + dx) as usize] += error * share / 16.0;
                }
            }
        }
        print
    }

    async fn gptq(&self, grey: &[f64]) -> Result<Vec<f64>> {
        let (n, strips, most) = (self.width * STRIP, self.height / STRIP, (1u32 << self.bits) - 1);
        let place = |column: usize| ((column % STRIP) as f64, (column / STRIP) as f64);
        let overlap = |at: usize| {
            let ((y0, x0), (y1, x1)) = (place(at / n), place(at % n));
            (-((y0 - y1).powi(2) + (x0 - x1).powi(2)) / (4.0 * self.sigma.powi(2))).exp() as f32
        };
        let h: Vec<f32> = (0..n * n).map(overlap).collect();
        let scheme = Scheme { desc_act: false, ..Scheme::preset(Preset::Fast, self.bits, None) };
        let h = panels(&h, n)?;
        let prepared =
            prepare(&scheme, ScaleType::F32, &Device::Cpu, n, Some(Rc::new(h).into()), "this picture")
                .await?;
        let pixel =
            |strip: usize, column: usize| (strip * STRIP + column % STRIP) * self.width + column / STRIP;
        let w = (0..strips * n).map(|at| grey[pixel(at / n, at % n)] as f32).collect();
        let grid = Grid {
            scales: Tensor::from_f32(&Device::Cpu, &[strips, 1], vec![1.0 / most as f32; strips])?,
            zeros: Tensor::from_f32(&Device::Cpu, &[strips, 1], vec![0.0; strips])?,
        };
        let codes = codes_on_grid(&prepared, &Tensor::from_f32(&Device::Cpu, &[strips, n], w)?, grid).await?;
        let mut print = vec![0.0; grey.len()];
        for (at, &code) in codes.u8s()?.iter().enumerate() {
            print[pixel(at / n, at % n)] = f64::from(code) / f64::from(most);
        }
        Ok(print)
    }
}

fn root_mean_square(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// A picture seen through a Gaussian blur; beyond its borders it goes on as at them.
fn blurred(x: &[f64], width: usize, sigma: f64) -> Vec<f64> {
    let reach = (4.0 * sigma).ceil() as isize;
    let weights: Vec<f64> =
        (-reach..=reach).map(|d| (-(d * d) as f64 / (2.0 * sigma * sigma)).exp()).collect();
    let whole: f64 = weights.iter().sum();
    let height = x.len() / width;
    let pass = |x: &[f64], across: bool| -> Vec<f64> {
        let value = |at: usize| -> f64 {
            let (row, column) = ((at / width) as isize, (at % width) as isize);
            let shifted = |d: isize| {
                let (dy, dx) = if across { (0, d) } else { (d, 0) };
                let row = (row + dy).clamp(0, height as isize - 1) as usize;
                let column = (column + dx).clamp(0, width as isize - 1) as usize;
                x[row * width + column]
            };
            (-reach..=reach).zip(&weights).map(|(d, weight)| weight * shifted(d)).sum::<f64>() / whole
        };
        (0..x.len()).map(value).collect()
    };
    pass(&pass(x, true), false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreading_errors_keeps_the_tone() {
        // A ramp from black to white.
        let (width, height) = (64, 32);
        let pixels = (0..width * height).map(|at| (at % width * 255 / (width - 1)) as u8).collect();
        let screen = Screen { width, height, pixels, bits: 1, sigma: 1.0 };
        let printed = pollster::block_on(screen.solve()).unwrap();
        let [rounded, diffused, gptq] = &printed.prints[..] else { panic!("three prints") };
        for print in [rounded, diffused, gptq] {
            assert!(print.pixels.iter().all(|&x| x == 0 || x == 255), "{}", print.name);
        }
        // Dot by dot rounding is closest; to the eye it is far worst, and GPTQ is best, for whose eye it is made.
        assert!(rounded.difference < diffused.difference && rounded.difference < gptq.difference);
        assert!(diffused.seen < rounded.seen / 3.0, "{} {}", diffused.seen, rounded.seen);
        assert!(gptq.seen < diffused.seen, "{} {}", gptq.seen, diffused.seen);
        let mean =
            |print: &Print| print.pixels.iter().map(|&x| f64::from(x)).sum::<f64>() / (width * height) as f64;
        assert!((mean(gptq) - 127.5).abs() < 4.0, "{}", mean(gptq));
    }

    #[test]
    fn a_picture_that_cannot_be_is_refused() {
        let screen = Screen { width: 10, height: 9, pixels: vec![0; 90], bits: 1, sigma: 1.0 };
        assert!(pollster::block_on(screen.solve()).is_err());
    }
}

//! GPTQ in f64, as plainly as it can be written: the single-factorization form of `gptq/mod.rs`
//! without blocks of devices, kernels or speed. Read this first.
//!
//! It is the oracle of the tests: with the preset `reference` its codes equal those of the original
//! program to the last one. It is not used by the product's runs.

use crate::error::{Error, Result};
use crate::face;
use crate::gptq::scheme::{Preset, Scheme};

/// What comes out, all in the natural order of columns.
pub struct Quantized {
    /// [rows, n]
    pub codes: Vec<u8>,
    /// [rows, groups]
    pub scales: Vec<f64>,
    pub zeros: Vec<f64>,
    /// Group of each column.
    pub g_idx: Vec<usize>,
    /// [rows, n]
    pub dequantized: Vec<f64>,
    /// tr(E·H·Eᵀ) with H undamped.
    pub loss: f64,
}

const BLOCK: usize = 128;

/// Quantizes `weight` [rows, n] for inputs with Hessian `hessian` [n, n] (undamped).
///
/// # Errors
/// [`Error::Numeric`] when H + λI is not positive definite; [`Error::Options`] for a scheme whose
/// scale search is not that of the original program.
pub fn quantize(scheme: &Scheme, weight: &[f64], hessian: &[f64], rows: usize) -> Result<Quantized> {
    if scheme.preset != Preset::Reference {
        return Err(Error::options(
            "the exact form knows the preset reference only",
            format!("Use {} reference", face::PRESET),
        ));
    }
    let n = weight.len() / rows;
    let (group, groups) = (scheme.group_len(n), scheme.groups(n));
    let mut w = weight.to_vec();
    let mut h = hessian.to_vec();
    let mut grid = vec![(1.0, 0.0); rows * groups];
    let fit = |w: &[f64], grid: &mut [(f64, f64)], g: usize, columns: &[usize]| {
        for row in 0..rows {
            let values: Vec<f64> = columns.iter().map(|&c| w[row * n + c]).collect();
            grid[row * groups + g] = find_params(scheme, &values);
        }
    };
    // A single group is fitted before dead columns are zeroed, as in the original program.
    if scheme.group_size.is_none() {
        fit(&w, &mut grid, 0, &(0..n).collect::<Vec<_>>());
    }
    for j in (0..n).filter(|&j| hessian[j * n + j] == 0.0) {
        h[j * n + j] = 1.0;
        for row in 0..rows {
            w[row * n + j] = 0.0;
        }
    }
    if scheme.static_groups && scheme.group_size.is_some() {
        for g in 0..groups {
            fit(&w, &mut grid, g, &(g * group..n.min((g + 1) * group)).collect::<Vec<_>>());
        }
    }

    // taken[t] is the column taken at turn t.
    let mut taken: Vec<usize> = (0..n).collect();
    if scheme.desc_act {
        taken.sort_by(|&a, &b| h[b * n + b].total_cmp(&h[a * n + a]));
    }
    let turn_of = |group_turns: bool, t: usize| if group_turns { t / group } else { taken[t] / group };
    let dynamic = !scheme.static_groups && scheme.group_size.is_some();
    let lambda = scheme.damp_percent * (0..n).map(|j| h[j * n + j]).sum::<f64>() / n as f64;
    let damped = |a: usize, b: usize| h[taken[a] * n + taken[b]] + if a == b { lambda } else { 0.0 };
    let r = upper_factor(n, damped)?;

    let mut codes = vec![0u8; rows * n];
    let mut value = vec![0f64; rows * n];
    for start in (0..n).step_by(BLOCK) {
        let end = n.min(start + BLOCK);
        // Groups that begin in this block may reach beyond it; their scales are fitted on weights
        // that the blocks before have compensated, so those are needed up to `reach`.
        let reach = if dynamic { n.min(end.next_multiple_of(group)) } else { end };
        // current[row][t − start]: W_t + ((E_done · R_{done,·}) · R_{·,·}⁻¹)_t
        let width = reach - start;
        let mut current = vec![0f64; rows * width];
        for row in 0..rows {
            let mut added = vec![0f64; width];
            for t in start..reach {
                let mut sum: f64 = (0..start)
                    .map(|d| (w[row * n + taken[d]] - value[row * n + taken[d]]) * r[d * n + t])
                    .sum();
                sum -= (start..t).map(|d| added[d - start] * r[d * n + t]).sum::<f64>();
                added[t - start] = sum / r[t * n + t];
                current[row * width + t - start] = w[row * n + taken[t]] + added[t - start];
            }
        }
        if dynamic {
            for t in (start..end).filter(|t| t % group == 0) {
                let to = n.min(t + group);
                for row in 0..rows {
                    let values = &current[row * width + t - start..row * width + to - start];
                    grid[row * groups + t / group] = find_params(scheme, values);
                }
            }
        }
        // Inside the block errors spread by U_bb = R_bb⁻¹, which err·U turns into w'_k −= err·U_jk.
        let u = invert_upper(&r, n, start, end);
        let size = end - start;
        for row in 0..rows {
            for t in start..end {
                let x = current[row * width + t - start];
                let (scale, zero) = grid[row * groups + turn_of(dynamic, t)];
                let code = ((x / scale).round_ties_even() + zero).clamp(0.0, scheme_maxq(scheme));
                let at = row * n + taken[t];
                codes[at] = code as u8;
                value[at] = scale * (code - zero);
                let error = (x - value[at]) / u[(t - start) * size + t - start];
                for k in t + 1..end {
                    current[row * width + k - start] -= error * u[(t - start) * size + k - start];
                }
            }
        }
    }

    let mut g_idx = vec![0; n];
    for t in 0..n {
        g_idx[taken[t]] = turn_of(dynamic, t);
    }
    let mut loss = 0.0;
    for row in 0..rows {
        let e: Vec<f64> = (0..n).map(|j| weight[row * n + j] - value[row * n + j]).collect();
        for a in 0..n {
            loss += e[a] * (0..n).map(|b| hessian[a * n + b] * e[b]).sum::<f64>();
        }
    }
    let (scales, zeros) = grid.into_iter().unzip();
    Ok(Quantized { codes, scales, zeros, g_idx, dequantized: value, loss })
}

fn scheme_maxq(scheme: &Scheme) -> f64 {
    f64::from((1u32 << scheme.bits) - 1)
}

/// Scale and zero point as the original program finds them.
fn find_params(scheme: &Scheme, w: &[f64]) -> (f64, f64) {
    let maxq = scheme_maxq(scheme);
    let mut low = w.iter().fold(0f64, |a, &b| a.min(b));
    let mut high = w.iter().fold(0f64, |a, &b| a.max(b));
    if scheme.sym {
        high = high.max(-low);
        low = -high;
    }
    if low == 0.0 && high == 0.0 {
        (low, high) = (-1.0, 1.0);
    }
    let at = |shrink: f64| {
        let scale = shrink * (high - low) / maxq;
        let zero = if scheme.sym { (maxq + 1.0) / 2.0 } else { (-shrink * low / scale).round_ties_even() };
        (scale, zero)
    };
    let mut best = at(1.0);
    if scheme.mse {
        let mut least = f64::INFINITY;
        for step in 0..80 {
            let (scale, zero) = at(1.0 - f64::from(step) / 100.0);
            let loss: f64 = w
                .iter()
                .map(|&x| {
                    let code = ((x / scale).round_ties_even() + zero).clamp(0.0, maxq);
                    (scale * (code - zero) - x).abs().powf(2.4)
                })
                .sum();
            if loss < least {
                (least, best) = (loss, (scale, zero));
            }
        }
    }
    best
}

/// R upper triangular with R·Rᵀ = A: the lower factor of the matrix read from its last corner.
pub(crate) fn upper_factor(n: usize, a: impl Fn(usize, usize) -> f64) -> Result<Vec<f64>> {
    let mut r = vec![0f64; n * n];
    for j in (0..n).rev() {
        for i in (0..=j).rev() {
            let sum: f64 = (j + 1..n).map(|k| r[i * n + k] * r[j * n + k]).sum();
            let rest = a(i, j) - sum;
            if i < j {
                r[i * n + j] = rest / r[j * n + j];
            } else if rest > 0.0 {
                r[j * n + j] = rest.sqrt();
            } else {
                return Err(Error::numeric(
                    format!("column {j}"),
                    "the damped Hessian is not positive definite",
                    format!("Raise {}", face::DAMP_PERCENT),
                ));
            }
        }
    }
    Ok(r)
}

/// The inverse of the diagonal square start..end of an upper triangular matrix.
pub(crate) fn invert_upper(r: &[f64], n: usize, start: usize, end: usize) -> Vec<f64> {
    let size = end - start;
    let at = |i: usize, j: usize| r[(start + i) * n + start + j];
    let mut u = vec![0f64; size * size];
    for j in 0..size {
        u[j * size + j] = 1.0 / at(j, j);
        for i in (0..j).rev() {
            let sum: f64 = (i + 1..=j).map(|k| at(i, k) * u[k * size + j]).sum();
            u[i * size + j] = -sum / at(i, i);
        }
    }
    u
}

//! L·Lᵀ = the damped Hessian with its columns in an [`Order`], in blocks of 128 columns.
//!
//! Blocked and right-looking: factor and invert the diagonal square, multiply what is below it by
//! the inverse, subtract that part's outer product from the block columns behind. All but the
//! squares is matrix products. Block columns are separate tensors, so no kernel reads and writes
//! one buffer and none exceeds a binding limit.

use crate::error::Result;
use crate::gptq::order::Order;
use crate::kernels::cholesky::factor_diagonal;
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::symmetric::{SymmetricPanels, diagonal, reordered};
use crate::tensor::{Elem, Tensor};

/// One block column of L.
pub struct FactorBlock {
    pub start: usize,
    pub end: usize,
    /// L_bb, [width, width], zeros above the diagonal.
    pub square: Tensor,
    /// L_bb⁻¹, [width, width].
    pub inverse: Tensor,
    /// L_{>b,b}, [n − end, width].
    pub below: Tensor,
}

/// The factor, and the damping that made it possible.
pub struct Factor {
    pub blocks: Vec<FactorBlock>,
    /// λ / mean(diag H).
    pub damp_percent: f64,
    /// λ.
    pub lambda: f32,
    /// diag(H) with dead columns set to 1, natural order, undamped.
    pub diagonal: Vec<f32>,
}

impl Factor {
    /// L_jj² by position: what an error of a column costs when those that are taken later make up for it as
    /// well as they can.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn pivots(&self) -> Result<Vec<f32>> {
        let mut all: Option<Tensor> = None;
        for block in &self.blocks {
            let own = diagonal(&block.square)?;
            all = Some(match all {
                Some(before) => before.joined(&own)?,
                None => own,
            });
        }
        let all = match all {
            Some(all) => all.to_f32().await?,
            None => Vec::new(),
        };
        Ok(all.into_iter().map(|pivot| pivot * pivot).collect())
    }
}

/// Damping grows by this factor after a failure, from [`MIN_RETRY`] at least to 1 at most.
const GROWTH: f64 = 4.0;
const MIN_RETRY: f64 = 1e-4;

/// Factors H + λI in `order`. Damping grows ×4 while a pivot fails; `None` when even λ = mean(diag H)
/// does not help.
///
/// `diagonal` is diag(H) in natural order with dead columns already set to 1.
///
/// # Errors
/// Those of the device.
pub async fn factor(
    h: &SymmetricPanels,
    order: &Order,
    diagonal: &[f32],
    damp_percent: f64,
) -> Result<Option<Factor>> {
    let mean = diagonal.iter().map(|&d| f64::from(d)).sum::<f64>() / diagonal.len() as f64;
    let mut damp = damp_percent;
    loop {
        let lambda = (damp * mean) as f32;
        if let Some(blocks) = attempt(h, order, diagonal, lambda).await? {
            return Ok(Some(Factor { blocks, damp_percent: damp, lambda, diagonal: diagonal.to_vec() }));
        }
        if damp >= 1.0 {
            return Ok(None);
        }
        damp = (damp.max(MIN_RETRY) * GROWTH).min(1.0);
    }
}

async fn attempt(
    h: &SymmetricPanels,
    order: &Order,
    diagonal: &[f32],
    lambda: f32,
) -> Result<Option<Vec<FactorBlock>>> {
    let (n, device) = (h.n, h.device().clone());
    let damped = order.column.iter().map(|&c| diagonal[c as usize] + lambda).collect();
    let damped = Tensor::from_f32(&device, &[n], damped)?;
    let columns = Tensor::from_u32(&device, &[n], order.column.clone())?;
    let mut status = Tensor::zeros(&device, Elem::U32, &[1])?;

    let ranges = Order::blocks(n);
    let mut waiting = ranges
        .iter()
        .map(|&(start, end)| reordered(h, &columns, &damped, start, end))
        .collect::<Result<std::collections::VecDeque<_>>>()?;
    let mut blocks = Vec::with_capacity(ranges.len());
    for (index, &(start, end)) in ranges.iter().enumerate() {
        let Some(column) = waiting.pop_front() else { break };
        let width = end - start;
        let (square, inverse) = factor_diagonal(&column, &mut status)?;
        let mut below = Tensor::uninit(&device, Elem::F32, &[n - end, width])?;
        if end < n {
            let lower = Mat::of(&column).part(width, 0, n - end, width);
            gemm(Target::of(&mut below), lower, Mat::of(&inverse).t(), Scaling::SET, None)?;
        }
        for (later, &(from, to)) in waiting.iter_mut().zip(&ranges[index + 1..]) {
            let rows = Mat::of(&below).part(from - end, 0, n - from, width);
            let cols = Mat::of(&below).part(from - end, 0, to - from, width);
            gemm(Target::of(later), rows, cols.t(), Scaling::SUB, None)?;
        }
        blocks.push(FactorBlock { start, end, square, inverse, below });
    }
    Ok((status.to_u32().await?[0] == 0).then_some(blocks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::gptq::exact::upper_factor;
    use crate::kernels::testing::{noise, test_gpu};

    /// Over two blocks, in an order that is not the natural one, beside the factor in f64.
    #[test]
    fn pivots_are_the_squares_on_the_diagonal() {
        let (n, tokens, damp) = (150, 400, 0.05);
        let x = noise(tokens * n, 1);
        let scale = 2.0 / tokens as f32;
        let entry = |i: usize, j: usize| -> f64 {
            let products = x.chunks(n).map(|x| f64::from(x[i]) * f64::from(x[j]));
            f64::from(scale) * products.sum::<f64>()
        };
        let order = Order { column: (0..n as u32).map(|turn| (turn * 7) % n as u32).collect() };
        let at = |position: usize| order.column[n - 1 - position] as usize;
        let lambda = damp * (0..n).map(|i| entry(i, i)).sum::<f64>() / n as f64;
        let damped = |a: usize, b: usize| entry(at(a), at(b)) + if a == b { lambda } else { 0.0 };
        let exact = upper_factor(n, damped).unwrap();
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let mut h = SymmetricPanels::zeros(device, n).unwrap();
            h.accumulate(&Tensor::from_f32(device, &[tokens, n], x.clone()).unwrap(), scale).unwrap();
            let pivots = pollster::block_on(async {
                let diagonal = h.diagonal().await.unwrap();
                factor(&h, &order, &diagonal, damp).await.unwrap().unwrap().pivots().await.unwrap()
            });
            for (position, pivot) in pivots.iter().enumerate() {
                let at = n - 1 - position;
                let want = exact[at * n + at].powi(2);
                assert!((f64::from(*pivot) / want - 1.0).abs() < 1e-4, "{position}: {pivot}, not {want}");
            }
        }
    }
}

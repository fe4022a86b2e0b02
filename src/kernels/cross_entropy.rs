//! Negative log-likelihood of given tokens, without the logits of the whole vocabulary in memory.
//!
//! Logits are made for a tile of rows and a range of the vocabulary at a time; each row carries the
//! largest logit so far, the sum of exp(logit − largest), and the target's logit (online
//! log-sum-exp).

use super::gemm::{Mat, Scaling, Target, gemm};
use super::parallel::for_chunks;
use super::simd::{exp, max, multiversion, sum};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Rows and vocabulary entries of one tile of logits: 1024 × 4096 × 4 bytes = 16 MiB. Many rows, because
/// 16-bit weights are widened once per tile.
const TILE_ROWS: usize = 1024;
const TILE_VOCAB: usize = 4096;

/// −ln p(target) in nats for each row of `hidden` [tokens, d] (f32, after the final norm), where
/// p = softmax(hidden · headᵀ). The head [vocab, d] is f32, f16 or bf16 and comes as consecutive
/// row chunks.
///
/// # Errors
/// [`Error::Text`] when a target is not below vocab; [`Error::Internal`] when shapes do not fit.
pub async fn nll(hidden: &Tensor, head: &[Tensor], targets: &[u32]) -> Result<Vec<f32>> {
    let (tokens, device) = (hidden.rows(), hidden.device());
    let vocab: usize = head.iter().map(Tensor::rows).sum();
    if targets.len() != tokens || head.iter().any(|chunk| chunk.cols() != hidden.cols()) {
        return Err(Error::Internal(format!(
            "cross_entropy: {:?}, {} targets",
            hidden.shape(),
            targets.len()
        )));
    }
    if let Some(position) = targets.iter().position(|&id| id as usize >= vocab) {
        return Err(Error::text(
            format!("target {position}"),
            format!("id {} is not below the vocabulary size {vocab}", targets[position]),
            "Use the tokenizer that belongs to the model",
        ));
    }
    let mut result = Vec::with_capacity(tokens);
    for start in (0..tokens).step_by(TILE_ROWS) {
        let rows = TILE_ROWS.min(tokens - start);
        let targets = &targets[start..start + rows];
        let mut state = Running::new(device, targets)?;
        let mut first = 0;
        for chunk in head {
            for row in (0..chunk.rows()).step_by(TILE_VOCAB) {
                let count = TILE_VOCAB.min(chunk.rows() - row);
                let mut logits = Tensor::uninit(device, Elem::F32, &[rows, count])?;
                gemm(
                    Target::of(&mut logits),
                    Mat::of(hidden).part(start, 0, rows, hidden.cols()),
                    Mat::of(chunk).part(row, 0, count, chunk.cols()).t(),
                    Scaling::SET,
                    None,
                )?;
                state.update(&mut logits, first + row)?;
            }
            first += chunk.rows();
        }
        result.extend(state.finish().await?);
    }
    Ok(result)
}

/// What each row of a tile knows of the vocabulary seen so far.
struct Running {
    /// [rows, 4]: largest logit, sum of exp(logit − largest), the target's logit, unused.
    state: Tensor,
    /// [rows] of u32.
    targets: Tensor,
}

impl Running {
    fn new(device: &Device, targets: &[u32]) -> Result<Self> {
        // The lowest finite number rather than −∞, whose difference with itself is NaN.
        let state = targets.iter().flat_map(|_| [f32::MIN, 0.0, 0.0, 0.0]).collect();
        Ok(Self {
            state: Tensor::from_f32(device, &[targets.len(), 4], state)?,
            targets: Tensor::from_u32(device, &[targets.len()], targets.to_vec())?,
        })
    }

    /// Takes in logits [rows, count] of the vocabulary entries `first..first + count`.
    fn update(&mut self, logits: &mut Tensor, first: usize) -> Result<()> {
        let count = logits.cols();
        match logits.device() {
            Device::Cpu => {
                let (targets, logits) = (self.targets.u32s()?, logits.f32s()?);
                for_chunks(self.state.f32s_mut()?, 4, |row, state| {
                    let logits = &logits[row * count..][..count];
                    if let Some(&logit) =
                        (targets[row] as usize).checked_sub(first).and_then(|i| logits.get(i))
                    {
                        state[2] = logit;
                    }
                    take_in(state, logits);
                });
                Ok(())
            }
            Device::Gpu(_) => Err(Error::Internal("cross_entropy has no GPU kernel yet".into())),
        }
    }

    async fn finish(self) -> Result<Vec<f32>> {
        let state = self.state.to_f32().await?;
        Ok(state
            .chunks_exact(4)
            .map(|row| (f64::from(row[0]) + f64::from(row[1]).ln() - f64::from(row[2])) as f32)
            .collect())
    }
}

multiversion! {
    fn take_in(state: &mut [f32], logits: &[f32]) {
        let largest = max(logits);
        let largest = if largest > state[0] { largest } else { state[0] };
        state[1] = state[1] * exp(state[0] - largest) + sum(logits, |x| exp(x - largest));
        state[0] = largest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error};

    fn check(device: &Device, tokens: usize, vocab: usize) {
        let d = 32;
        // Logits of about ±20, as models have.
        let hidden: Vec<f32> = noise(tokens * d, 1).iter().map(|x| x * 10.0).collect();
        let head: Vec<half::bf16> = noise(vocab * d, 2).iter().map(|&x| half::bf16::from_f32(x)).collect();
        let targets: Vec<u32> = (0..tokens).map(|i| (i * 977 % vocab) as u32).collect();
        let want: Vec<f32> = (0..tokens)
            .map(|t| {
                let logits: Vec<f64> = head
                    .chunks(d)
                    .map(|w| (0..d).map(|j| f64::from(hidden[t * d + j]) * w[j].to_f64()).sum())
                    .collect();
                let total: f64 = logits.iter().map(|x| x.exp()).sum();
                (total.ln() - logits[targets[t] as usize]) as f32
            })
            .collect();
        let hidden = Tensor::from_f32(device, &[tokens, d], hidden).unwrap();
        let split = vocab / 3 / 4 * 4 * d;
        let chunks: Vec<Tensor> = [&head[..split], &head[split..]]
            .map(|part| {
                Tensor::from_bytes(device, Elem::BF16, &[part.len() / d, d], bytemuck::cast_slice(part))
                    .unwrap()
            })
            .into();
        let got = pollster::block_on(nll(&hidden, &chunks, &targets)).unwrap();
        let error = relative_error(&got, &want);
        assert!(error < 1e-6, "{error:e}");
    }

    #[test]
    fn the_cpu_twin_agrees_with_the_definition_across_tiles() {
        check(&Device::Cpu, 3, 9001);
        check(&Device::Cpu, 1030, 50);
    }
}

//! Negative log-likelihood of given tokens, without the logits of the whole vocabulary in memory.
//!
//! Logits are made for a tile of rows and a range of the vocabulary at a time; each row carries the
//! largest logit so far, the sum of exp(logit − largest), and the target's logit (online
//! log-sum-exp).

use super::cut::lanes;
use super::gemm::{Mat, Scaling, Target, gemm};
use super::parallel::for_chunks;
use super::simd::{exp, largest, multiversion, sum};
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
pub async fn nll(hidden: &Tensor, head: &[&Tensor], targets: &[u32]) -> Result<Vec<f32>> {
    let (tokens, device) = (hidden.rows(), hidden.device());
    let vocab: usize = head.iter().map(|chunk| chunk.rows()).sum();
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
                // Rows start at multiples of four elements, as the fast products want them.
                let mut logits = Tensor::uninit(device, Elem::F32, &[rows, count.next_multiple_of(4)])?;
                gemm(
                    Target::of(&mut logits),
                    Mat::of(hidden).part(start, 0, rows, hidden.cols()),
                    Mat::of(chunk).part(row, 0, count, chunk.cols()).t(),
                    Scaling::SET,
                    None,
                )?;
                state.update(&logits, first + row, count)?;
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

    /// Takes in the logits of the vocabulary entries `first..first + count`, the first columns of
    /// each row.
    fn update(&mut self, logits: &Tensor, first: usize, count: usize) -> Result<()> {
        match logits.device() {
            Device::Cpu => {
                let (stride, targets, logits) = (logits.cols(), self.targets.u32s()?, logits.f32s()?);
                for_chunks(self.state.f32s_mut()?, 4, |row, state| {
                    let logits = &logits[row * stride..][..count];
                    if let Some(&logit) =
                        (targets[row] as usize).checked_sub(first).and_then(|i| logits.get(i))
                    {
                        state[2] = logit;
                    }
                    take_in(state, logits);
                });
                Ok(())
            }
            Device::Gpu(gpu) => gpu::take_in(gpu, lanes(gpu, count), self, logits, first, count),
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
        let top = largest(logits, |x| x);
        let top = if top > state[0] { top } else { state[0] };
        state[1] = state[1] * exp(state[0] - top) + sum(logits, |x| exp(x - top));
        state[0] = top;
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::GROUP;
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        rows: u32,
        first: u32,
        count: u32,
        stride: u32,
    }

    const CROSS_ENTROPY: Kernel = Kernel {
        name: "cross_entropy",
        source: include_str!("../../shaders/cross_entropy.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&CROSS_ENTROPY, size_of::<Params>())];

    pub fn take_in(
        gpu: &Gpu,
        lanes: usize,
        running: &Running,
        logits: &Tensor,
        first: usize,
        count: usize,
    ) -> Result<()> {
        let rows = logits.rows();
        let params = Params {
            rows: rows as u32,
            first: first as u32,
            count: count as u32,
            stride: logits.cols() as u32,
        };
        gpu.dispatch(
            &CROSS_ENTROPY,
            &[("LANES", lanes as f64)],
            &[logits.gpu()?, running.targets.gpu()?, running.state.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((rows * lanes).div_ceil(GROUP)),
            10.0 * (rows * count) as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

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
        let got = pollster::block_on(nll(&hidden, &[&chunks[0], &chunks[1]], &targets)).unwrap();
        let error = relative_error(&got, &want);
        assert!(error < 1e-6, "{error:e}");
    }

    #[test]
    fn the_cpu_twin_agrees_with_the_definition_across_tiles() {
        check(&Device::Cpu, 3, 9001);
        check(&Device::Cpu, 1030, 50);
    }

    #[test]
    fn the_gpu_agrees_with_the_definition_across_tiles() {
        let Some(device) = test_gpu() else { return };
        check(&device, 3, 9001);
        check(&device, 1030, 50);
    }

    #[test]
    fn threads_that_share_a_row_agree_with_one_that_has_it_alone() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        let logits = Tensor::from_f32(&device, &[5, 300], noise(1500, 1)).unwrap();
        let results = [1, 8, 64].map(|lanes| {
            let running = Running::new(&device, &[0, 7, 99, 150, 298]).unwrap();
            super::gpu::take_in(gpu, lanes, &running, &logits, 0, 150).unwrap();
            super::gpu::take_in(gpu, lanes, &running, &logits, 150, 149).unwrap();
            pollster::block_on(running.finish()).unwrap()
        });
        assert!(relative_error(&results[1], &results[0]) < 1e-6);
        assert!(relative_error(&results[2], &results[0]) < 1e-6);
    }
}

//! A linear layer: y = x·Wᵀ + b.

use std::ops::Range;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::tensor::{Elem, Tensor};

/// A weight [out, in] (f32, f16 or bf16) in consecutive row chunks, with an optional bias.
pub struct Linear {
    chunks: Vec<Tensor>,
    /// One piece of the bias for each chunk, on the device.
    chunk_biases: Vec<Tensor>,
    out_features: usize,
}

impl Linear {
    /// From row chunks on one device, one normally, and the whole bias.
    ///
    /// # Errors
    /// [`Error::Internal`] when they do not fit together.
    pub fn new(chunks: Vec<Tensor>, bias: Option<Vec<f32>>) -> Result<Self> {
        let in_features = chunks.first().map_or(0, Tensor::cols);
        let out_features = chunks.iter().map(Tensor::rows).sum();
        if chunks.is_empty()
            || chunks.iter().any(|chunk| chunk.cols() != in_features)
            || bias.as_ref().is_some_and(|bias| bias.len() != out_features)
        {
            return Err(Error::Internal(format!("linear: chunks that make {out_features}×{in_features}")));
        }
        let mut chunk_biases = vec![];
        if let Some(bias) = &bias {
            let mut rest = bias.as_slice();
            for chunk in &chunks {
                let (part, after) = rest.split_at(chunk.rows());
                chunk_biases.push(Tensor::from_f32(chunk.device(), &[part.len()], part.to_vec())?);
                rest = after;
            }
        }
        Ok(Self { chunks, chunk_biases, out_features })
    }

    /// How the rows of a matrix are cut so that no chunk is larger than one tensor may be.
    pub fn chunk_rows(device: &Device, rows: usize, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
        cut_rows(device.max_tensor_bytes(), rows, row_bytes)
    }

    /// The weight's row chunks.
    pub fn chunks(&self) -> &[Tensor] {
        &self.chunks
    }

    /// y [tokens, out] of x [tokens, in], both f32.
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes do not fit; [`Error::Device`] when y is larger than a tensor
    /// may be.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = Tensor::uninit(x.device(), Elem::F32, &[x.rows(), self.out_features])?;
        let mut first = 0;
        for (index, chunk) in self.chunks.iter().enumerate() {
            let bias = self.chunk_biases.get(index);
            gemm(Target::at(&mut y, 0, first), Mat::of(x), Mat::of(chunk).t(), Scaling::SET, bias)?;
            first += chunk.rows();
        }
        Ok(y)
    }
}

fn cut_rows(largest: u64, rows: usize, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    // Whole multiples of 64 rows keep every chunk's results aligned in the output.
    let fitting = largest / row_bytes.max(1) as u64 / 64 * 64;
    let step = usize::try_from(fitting).unwrap_or(usize::MAX).clamp(64, rows.max(64));
    (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::noise;

    fn tensor(rows: usize, values: &[f32]) -> Tensor {
        Tensor::from_f32(&Device::Cpu, &[rows, values.len() / rows], values.to_vec()).unwrap()
    }

    #[test]
    fn chunks_and_bias_give_what_the_whole_gives() {
        let (w, b) = (noise(12 * 8, 1), noise(12, 2));
        let x = tensor(5, &noise(5 * 8, 3));
        let whole = Linear::new(vec![tensor(12, &w)], Some(b.clone())).unwrap();
        let cut = Linear::new(vec![tensor(8, &w[..64]), tensor(4, &w[64..])], Some(b)).unwrap();
        let want = whole.forward(&x).unwrap();
        assert_eq!(cut.forward(&x).unwrap().f32s().unwrap(), want.f32s().unwrap());
        assert!(Linear::new(vec![tensor(12, &w)], Some(vec![0.0; 11])).is_err());
    }

    #[test]
    fn rows_are_cut_only_where_they_must_be() {
        let cut = |largest| cut_rows(largest, 300, 1000).map(|range| range.len()).collect::<Vec<_>>();
        assert_eq!(cut(u64::MAX), [300]);
        assert_eq!(cut(300_000), [256, 44]);
        assert_eq!(cut(191_999), [128, 128, 44]);
    }
}

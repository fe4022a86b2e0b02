//! A linear layer: y = x·Wᵀ + b.

use std::ops::Range;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::gemm::{Mat, Scaling, Target, gemm};
use crate::kernels::input::Input;
use crate::tensor::{Elem, Tensor};

/// A weight [out, in] (f32, f16 or bf16) in consecutive row chunks, with an optional bias.
pub struct Linear {
    chunks: Vec<Tensor>,
    /// The piece of the bias that belongs to each chunk, on the device.
    biases: Vec<Option<Tensor>>,
    in_features: usize,
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
        let mut rest = bias.as_deref();
        let mut biases = vec![];
        for chunk in &chunks {
            let part = rest.map(|rest| rest.split_at(chunk.rows()));
            biases.push(match part {
                Some((part, _)) => Some(Tensor::from_f32(chunk.device(), &[part.len()], part.to_vec())?),
                None => None,
            });
            rest = part.map(|(_, after)| after);
        }
        Ok(Self { chunks, biases, in_features, out_features })
    }

    /// Layers of one input as one, with their outputs side by side in the order given: q, k and v, or
    /// gate and up.
    ///
    /// # Errors
    /// [`Error::Internal`] for layers of different inputs or devices, or none.
    pub fn stacked(parts: Vec<Self>) -> Result<Self> {
        let mut parts = parts.into_iter();
        let Some(mut all) = parts.next() else {
            return Err(Error::Internal("linear: nothing to stack".into()));
        };
        for part in parts {
            if part.in_features != all.in_features || !part.chunks[0].device().same(all.chunks[0].device()) {
                return Err(Error::Internal(format!(
                    "linear: layers of {} and {} inputs do not stack",
                    all.in_features, part.in_features
                )));
            }
            all.chunks.extend(part.chunks);
            all.biases.extend(part.biases);
            all.out_features += part.out_features;
        }
        Ok(all)
    }

    /// How the rows of a matrix are cut so that no chunk is larger than one tensor may be.
    pub fn chunk_rows(device: &Device, rows: usize, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
        cut_rows(device.max_tensor_bytes(), rows, row_bytes)
    }

    /// The weight's row chunks.
    pub fn chunks(&self) -> &[Tensor] {
        &self.chunks
    }

    /// Bytes of the weight and the bias, all of which a product reads.
    pub fn bytes(&self) -> u64 {
        let tensors = self.chunks.iter().chain(self.biases.iter().flatten());
        tensors.map(|tensor| tensor.bytes() as u64).sum()
    }

    pub fn in_features(&self) -> usize {
        self.in_features
    }

    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// y [tokens, out] of x [tokens, in], both f32.
    ///
    /// # Errors
    /// As [`Linear::project`]; [`Error::Device`] when y is larger than a tensor may be.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = Tensor::uninit(x.device(), Elem::F32, &[x.rows(), self.out_features])?;
        self.project(&mut y, Input::Plain(x), false)?;
        Ok(y)
    }

    /// y = input·Wᵀ + b, or y += input·Wᵀ + b if `add`; y is f32 [tokens, out].
    ///
    /// # Errors
    /// [`Error::Internal`] when shapes or devices do not fit.
    pub fn project(&self, y: &mut Tensor, input: Input, add: bool) -> Result<()> {
        if y.rows() != input.tokens() || y.cols() != self.out_features || input.features() != self.in_features
        {
            return Err(Error::Internal(format!(
                "linear: {}×{} from {:?} to {:?}",
                self.out_features,
                self.in_features,
                input.source().shape(),
                y.shape()
            )));
        }
        let scaling = if add { Scaling::ADD } else { Scaling::SET };
        input.computed(|x| {
            let mut first = 0;
            for (chunk, bias) in self.chunks.iter().zip(&self.biases) {
                let target = Target::at(y, 0, first);
                gemm(target, Mat::of(x), Mat::of(chunk).t(), scaling, bias.as_ref())?;
                first += chunk.rows();
            }
            Ok(())
        })
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
    use crate::kernels::rmsnorm::rmsnorm;
    use crate::kernels::swiglu::swiglu_halves;
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
    fn a_stack_computes_its_parts_side_by_side_after_the_step_before_them() {
        let (q, k) = (noise(12 * 8, 1), noise(4 * 8, 2));
        let part = |rows, values: &[f32], bias| Linear::new(vec![tensor(rows, values)], bias).unwrap();
        let (first, second) = (part(12, &q, Some(noise(12, 3))), part(4, &k, None));
        let (x, pairs) = (tensor(5, &noise(5 * 8, 4)), tensor(5, &noise(5 * 16, 5)));
        let norm = Tensor::from_f32(&Device::Cpu, &[8], noise(8, 6)).unwrap();
        let inputs = [
            (Input::Plain(&x), x.f32s().unwrap().to_vec()),
            (
                Input::RmsNorm { x: &x, weight: &norm, eps: 1e-5 },
                rmsnorm(&x, &norm, 1e-5).unwrap().f32s().unwrap().to_vec(),
            ),
            (Input::SwiGlu(&pairs), swiglu_halves(&pairs).unwrap().f32s().unwrap().to_vec()),
        ];
        let apart = inputs.each_ref().map(|(_, computed)| {
            let x = tensor(5, computed);
            (first.forward(&x).unwrap(), second.forward(&x).unwrap())
        });
        let stack = Linear::stacked(vec![first, second]).unwrap();
        assert_eq!((stack.in_features(), stack.out_features()), (8, 16));
        for ((input, _), (a, b)) in inputs.into_iter().zip(&apart) {
            for add in [false, true] {
                let before = if add { 0.5 } else { f32::NAN };
                let mut y = tensor(5, &[before; 5 * 16]);
                stack.project(&mut y, input, add).unwrap();
                for (row, y) in y.f32s().unwrap().chunks(16).enumerate() {
                    let want = [&a.f32s().unwrap()[row * 12..][..12], &b.f32s().unwrap()[row * 4..][..4]];
                    for (got, want) in y.iter().zip(want.concat()) {
                        assert!((got - want - if add { 0.5 } else { 0.0 }).abs() < 1e-5);
                    }
                }
            }
        }
        let narrow = part(4, &k[..16], None);
        assert!(Linear::stacked(vec![stack, narrow]).is_err());
        assert!(Linear::stacked(vec![]).is_err());
    }

    #[test]
    fn rows_are_cut_only_where_they_must_be() {
        let cut = |largest| cut_rows(largest, 300, 1000).map(|range| range.len()).collect::<Vec<_>>();
        assert_eq!(cut(u64::MAX), [300]);
        assert_eq!(cut(300_000), [256, 44]);
        assert_eq!(cut(191_999), [128, 128, 44]);
    }
}

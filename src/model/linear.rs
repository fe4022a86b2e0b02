//! A linear layer: y = x·Wᵀ + b.

use std::ops::Range;

use crate::checkpoint::GptqLinear;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::gemm::{Mat, Scaling, Target, gemm_rounded};
use crate::kernels::gemv::{self, FEW};
use crate::kernels::input::Input;
use crate::kernels::qmatmul::{self, Packed};
use crate::tensor::{Elem, Tensor};

/// A weight [out, in] in consecutive parts along its outputs, one normally, with an optional bias.
pub struct Linear {
    parts: Vec<Part>,
    in_features: usize,
    out_features: usize,
    /// See [`Linear::rounded`].
    rounded: bool,
}

/// Some outputs: the weight and the bias [out].
struct Part {
    weight: Weight,
    bias: Option<Tensor>,
}

enum Weight {
    /// f32, f16 or bf16 [out, in]
    Dense(Tensor),
    /// Codes of 2, 3, 4 or 8 bits.
    Packed(Box<Packed>),
}

impl Linear {
    /// From row chunks on one device, one normally, and the whole bias.
    ///
    /// # Errors
    /// [`Error::Internal`] when they do not fit together.
    pub fn new(chunks: Vec<Tensor>, bias: Option<Vec<f32>>) -> Result<Self> {
        let in_features = chunks.first().map_or(0, Tensor::cols);
        if chunks.iter().any(|chunk| chunk.cols() != in_features) {
            return Err(Error::Internal(format!("linear: chunks of other than {in_features} inputs")));
        }
        Self::of(chunks.into_iter().map(Weight::Dense).collect(), bias, in_features)
    }

    /// From a quantized layer, whose codes stay packed on `device`.
    ///
    /// # Errors
    /// As [`Packed::new`].
    pub fn packed(layer: &GptqLinear, device: &Device) -> Result<Self> {
        let step = Packed::most_rows(device, layer.k, layer.bits);
        let mut parts = vec![];
        for start in (0..layer.n).step_by(step) {
            let rows = start..layer.n.min(start + step);
            parts.push(Weight::Packed(Box::new(Packed::new(layer, rows, device)?)));
        }
        Self::of(parts, layer.bias.clone(), layer.k)
    }

    fn of(weights: Vec<Weight>, bias: Option<Vec<f32>>, in_features: usize) -> Result<Self> {
        let out_features = weights.iter().map(Weight::rows).sum();
        if weights.is_empty() || bias.as_ref().is_some_and(|bias| bias.len() != out_features) {
            return Err(Error::Internal(format!("linear: parts that make {out_features}×{in_features}")));
        }
        let mut first = 0;
        let mut parts = vec![];
        for weight in weights {
            let rows = first..first + weight.rows();
            first = rows.end;
            let bias = match &bias {
                Some(bias) => Some(Tensor::from_f32(weight.device(), &[rows.len()], bias[rows].to_vec())?),
                None => None,
            };
            parts.push(Part { weight, bias });
        }
        Ok(Self { parts, in_features, out_features, rounded: false })
    }

    /// Layers of one input as one, with their outputs side by side in the order given: q, k and v, or
    /// gate and up. Weights of one kind become one, so that a product is one dispatch.
    ///
    /// # Errors
    /// [`Error::Internal`] for layers of different inputs or devices, or none; [`Error::Device`] where
    /// there is no memory.
    pub fn stacked(layers: Vec<Self>) -> Result<Self> {
        let (in_features, out_features) = (
            layers.first().map_or(0, |first| first.in_features),
            layers.iter().map(|l| l.out_features).sum(),
        );
        let mut parts: Vec<Part> = vec![];
        for layer in layers {
            if layer.in_features != in_features {
                return Err(Error::Internal(format!(
                    "linear: layers of {in_features} and {} inputs do not stack",
                    layer.in_features
                )));
            }
            for part in layer.parts {
                match parts.pop() {
                    None => parts.push(part),
                    Some(last) => parts.extend(last.then(part)?),
                }
            }
        }
        if parts.is_empty() {
            return Err(Error::Internal("linear: nothing to stack".into()));
        }
        Ok(Self { parts, in_features, out_features, rounded: false })
    }

    /// The same layer, whose inputs are rounded to bf16 where its weight is bf16, too, and that makes products of many
    /// rows faster (see [`gemm_rounded`]).
    pub fn rounded(self) -> Self {
        Self { rounded: true, ..self }
    }

    /// How the rows of a matrix are cut so that no chunk is larger than one tensor may be.
    pub fn chunk_rows(device: &Device, rows: usize, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
        cut_rows(device.max_tensor_bytes(), rows, row_bytes)
    }

    /// The row chunks of a weight that is not packed.
    ///
    /// # Errors
    /// [`Error::Internal`] for one that is.
    pub fn chunks<'a>(&'a self) -> Result<Vec<&'a Tensor>> {
        let chunk = |part: &'a Part| match &part.weight {
            Weight::Dense(chunk) => Ok(chunk),
            Weight::Packed(_) => Err(Error::Internal("linear: a packed weight has no rows of floats".into())),
        };
        self.parts.iter().map(chunk).collect()
    }

    /// Whether any part of the weight is packed codes.
    pub fn is_packed(&self) -> bool {
        self.parts.iter().any(|part| matches!(part.weight, Weight::Packed(_)))
    }

    /// Bytes of the weight and the bias, all of which a product reads.
    pub fn bytes(&self) -> u64 {
        let bytes = |part: &Part| part.weight.bytes() + part.bias.as_ref().map_or(0, Tensor::bytes);
        self.parts.iter().map(|part| bytes(part) as u64).sum()
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

    /// y = input·Wᵀ + b, or y += input·Wᵀ + b if `add`; y is f32 [tokens, out]. Up to four tokens are one
    /// dispatch for each part of the weight, the step before the product included.
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
        // A kernel for few rows takes the step with it; otherwise it is taken once for all parts.
        if input.tokens() > FEW || (input.device().is_cpu() && self.parts.len() > 1) {
            return input.computed(|x| self.by_parts(y, Input::Plain(x), add));
        }
        self.by_parts(y, input, add)
    }

    fn by_parts(&self, y: &mut Tensor, input: Input, add: bool) -> Result<()> {
        let mut first = 0;
        for Part { weight, bias } in &self.parts {
            let target = Target::at(y, 0, first);
            match weight {
                Weight::Dense(w) if self.rounded && w.elem() == Elem::BF16 && input.tokens() > FEW => {
                    let scaling = if add { Scaling::ADD } else { Scaling::SET };
                    input.computed(|x| {
                        gemm_rounded(target, Mat::of(x), Mat::of(w).t(), scaling, bias.as_ref())
                    })?;
                }
                Weight::Dense(w) => gemv::multiply(target, input, w, bias.as_ref(), add)?,
                Weight::Packed(w) => qmatmul::multiply(target, input, w, bias.as_ref(), add)?,
            }
            first += weight.rows();
        }
        Ok(())
    }
}

impl Weight {
    fn rows(&self) -> usize {
        match self {
            Self::Dense(w) => w.rows(),
            Self::Packed(w) => w.n,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Dense(w) => w.bytes(),
            Self::Packed(w) => w.bytes(),
        }
    }

    fn device(&self) -> &Device {
        match self {
            Self::Dense(w) => w.device(),
            Self::Packed(w) => w.device(),
        }
    }
}

impl Part {
    /// This part and the next, as one where they can be.
    fn then(self, next: Self) -> Result<Vec<Self>> {
        let (device, rows) = (self.weight.device().clone(), [self.weight.rows(), next.weight.rows()]);
        if !device.same(next.weight.device()) {
            return Err(Error::Internal("linear: layers of different devices do not stack".into()));
        }
        let weight = match (self.weight, next.weight) {
            (Weight::Dense(a), Weight::Dense(b)) if joins(&a, &b) => Weight::Dense(a.joined(&b)?),
            (Weight::Packed(a), Weight::Packed(b)) if a.joins(&b) => Weight::Packed(Box::new(a.joined(&b)?)),
            (a, b) => {
                return Ok(vec![Self { weight: a, bias: self.bias }, Self { weight: b, bias: next.bias }]);
            }
        };
        let bias = match (self.bias, next.bias) {
            (None, None) => None,
            (a, b) => {
                let or_zeros = |bias: Option<Tensor>, rows| match bias {
                    Some(bias) => Ok(bias),
                    None => Tensor::zeros(&device, Elem::F32, &[rows]),
                };
                Some(or_zeros(a, rows[0])?.joined(&or_zeros(b, rows[1])?)?)
            }
        };
        Ok(vec![Self { weight, bias }])
    }
}

/// Whether two dense weights can be one.
fn joins(a: &Tensor, b: &Tensor) -> bool {
    a.elem() == b.elem()
        && (a.bytes() + b.bytes()) as u64 <= a.device().max_tensor_bytes()
        && a.bytes().is_multiple_of(4)
        && b.bytes().is_multiple_of(4)
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
    use crate::kernels::pairs;
    use crate::kernels::rmsnorm::rmsnorm;
    use crate::kernels::swiglu::swiglu_halves;
    use crate::kernels::testing::{noise, relative_error};

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

    /// A weight in bf16 has its inputs rounded, another layer stays as it is.
    #[test]
    fn a_rounded_layer_is_near_the_layer() {
        let (out, inputs, tokens) = (48, 64, 9);
        let (w, x) = (noise(out * inputs, 1), tensor(tokens, &noise(tokens * inputs, 2)));
        let bytes: Vec<u8> = w.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
        let halves = || Tensor::from_bytes(&Device::Cpu, Elem::BF16, &[out, inputs], &bytes).unwrap();
        let layers = |make: &dyn Fn() -> Tensor| {
            let layer = || Linear::new(vec![make()], Some(noise(out, 3))).unwrap();
            [layer(), layer().rounded()].map(|layer| layer.forward(&x).unwrap().f32s().unwrap().to_vec())
        };
        let [exact, near] = layers(&halves);
        let error = relative_error(&near, &exact);
        assert!(error < 5e-3 && (error > 0.0) == pairs::faster(), "{error}");
        let [exact, same] = layers(&|| tensor(out, &w));
        assert_eq!(exact, same);
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

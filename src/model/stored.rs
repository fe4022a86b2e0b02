//! A checkpoint on disk, dense or GPTQ-quantized, as the source of a model's pieces.

use std::ops::Range;
use std::rc::Rc;

use super::arch::LinearSpec;
use super::linear::Linear;
use super::weights::{Weights, load_dense_linear};
use crate::checkpoint::{Checkpoint, DType, GptqLinear, QuantConfig};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::storage::{LocalFuture, Source};
use crate::tensor::{Elem, Tensor};

/// A checkpoint and, if it is quantized, how.
pub struct Stored {
    pub checkpoint: Checkpoint,
    pub quant: Option<QuantConfig>,
    widened: bool,
}

impl Stored {
    /// Reads headers and configuration only.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; [`Error::Unsupported`] for another kind of quantization than GPTQ.
    pub async fn open(source: Rc<dyn Source>) -> Result<Self> {
        let checkpoint = Checkpoint::open(source).await?;
        let quant = QuantConfig::of(&checkpoint).await?;
        Ok(Self { checkpoint, quant, widened: false })
    }

    /// The same with quantized layers widened to f32 when they are loaded, for the memory of a dense
    /// model: what quantization itself computes with.
    pub fn widened(self) -> Self {
        Self { widened: true, ..self }
    }

    /// A quantized layer on `device`, packed unless asked otherwise.
    async fn quantized(&self, spec: &LinearSpec, config: &QuantConfig, device: &Device) -> Result<Linear> {
        let layer = match apart(&self.checkpoint, &spec.module) {
            None => GptqLinear::read(&self.checkpoint, &spec.module, config).await?,
            Some([gate, up]) => {
                let gate = GptqLinear::read(&self.checkpoint, &gate, config).await?;
                let up = GptqLinear::read(&self.checkpoint, &up, config).await?;
                gate.above(up).ok_or_else(|| {
                    Error::unsupported(
                        format!("{} is stored as two layers of different schemes or orders", spec.module),
                        "Quantize the 16-bit model again",
                    )
                })?
            }
        };
        if (layer.n, layer.k) != (spec.out_features, spec.in_features) {
            return Err(Error::model(
                &spec.module,
                format!(
                    "its quantized weight is [{}, {}], config.json says [{}, {}]",
                    layer.n, layer.k, spec.out_features, spec.in_features
                ),
                "Use the config.json that belongs to the checkpoint",
            ));
        }
        if !self.widened {
            return Linear::packed(&layer, device);
        }
        let weight = layer.dequantize()?;
        let mut chunks = vec![];
        for range in Linear::chunk_rows(device, layer.n, layer.k * 4) {
            let part = weight[range.start * layer.k..range.end * layer.k].to_vec();
            chunks.push(Tensor::from_f32(device, &[range.len(), layer.k], part)?);
        }
        Linear::new(chunks, layer.bias)
    }
}

/// The layers that a `gate_up_proj` is stored as, where it is not stored as one: GPTQModel takes it apart.
pub fn apart(checkpoint: &Checkpoint, module: &str) -> Option<[String; 2]> {
    let stem = module.strip_suffix("gate_up_proj").filter(|_| !GptqLinear::is_in(checkpoint, module))?;
    let parts = ["gate_proj", "up_proj"].map(|part| format!("{stem}{part}"));
    parts.iter().all(|part| GptqLinear::is_in(checkpoint, part)).then_some(parts)
}

impl Weights for Stored {
    fn info(&self, name: &str) -> Result<Option<(Elem, Vec<usize>)>> {
        let Some(info) = self.checkpoint.info(name) else { return Ok(None) };
        let elem = match info.dtype {
            DType::F32 => Elem::F32,
            DType::F16 => Elem::F16,
            DType::BF16 => Elem::BF16,
            other => {
                return Err(Error::unsupported(
                    format!("tensor {name} is stored as {}", other.name()),
                    "Convert the model to BF16, F16 or F32 first",
                ));
            }
        };
        Ok(Some((elem, info.shape.iter().map(|&size| size as usize).collect())))
    }

    fn read_rows<'a>(&'a self, name: &'a str, rows: Range<usize>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move { self.checkpoint.read_rows(name, rows.start as u64..rows.end as u64).await })
    }

    fn linear<'a>(&'a self, spec: &'a LinearSpec, device: &'a Device) -> LocalFuture<'a, Result<Linear>> {
        Box::pin(async move {
            match &self.quant {
                Some(config)
                    if GptqLinear::is_in(&self.checkpoint, &spec.module)
                        || apart(&self.checkpoint, &spec.module).is_some() =>
                {
                    self.quantized(spec, config, device).await
                }
                _ => load_dense_linear(self, spec, device).await,
            }
        })
    }
}

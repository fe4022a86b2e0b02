//! A corner of a linear layer before and after, for a picture of what quantization does.

use crate::checkpoint::GptqLinear;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{LinearSpec, Weights, linear_elem, linear_rows};
use crate::tensor::{Host, Tensor};

/// Rows and columns of a corner at most.
const SIDE: usize = 64;

/// The first rows and columns of a layer, row-major.
#[derive(Debug, Clone)]
pub struct Corner {
    pub module: String,
    pub rows: usize,
    pub cols: usize,
    pub bits: u32,
    pub weights: Vec<f32>,
    pub codes: Vec<u8>,
    /// What is left between a weight and what its code stands for.
    pub errors: Vec<f32>,
}

impl Corner {
    /// Reads the weights again; the rest is in `quantized`.
    ///
    /// # Errors
    /// Those of the source.
    pub(super) async fn of(weights: &dyn Weights, spec: &LinearSpec, quantized: &GptqLinear) -> Result<Self> {
        let (rows, cols, n) = (SIDE.min(quantized.n), SIDE.min(quantized.k), quantized.k);
        let name = format!("{}.weight", spec.module);
        let elem = linear_elem(weights, spec)?;
        let bytes = linear_rows(weights, spec, 0..rows).await?;
        let tensor = Tensor::from_bytes(&Device::Cpu, elem, &[rows, n], &bytes)?;
        let at = |row: usize, col: usize| row * n + col;
        let weight: Box<dyn Fn(usize) -> f32> = match tensor.host_data()? {
            Host::F32(values) => Box::new(|i| values[i]),
            Host::F16(values) => Box::new(|i| values[i].to_f32()),
            Host::BF16(values) => Box::new(|i| values[i].to_f32()),
            Host::U32(_) | Host::U8(_) => return Err(Error::Internal(format!("{name} is not of floats"))),
        };
        let mut corner = Self {
            module: spec.module.clone(),
            rows,
            cols,
            bits: quantized.bits,
            weights: Vec::with_capacity(rows * cols),
            codes: Vec::with_capacity(rows * cols),
            errors: Vec::with_capacity(rows * cols),
        };
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            let (w, code) = (weight(at(row, col)), quantized.codes[at(row, col)]);
            let group = quantized.g_idx[col] as usize * quantized.n + row;
            let step = f32::from(code) - f32::from(quantized.zeros[group]);
            corner.weights.push(w);
            corner.codes.push(code);
            corner.errors.push(w - step * quantized.scales[group]);
        }
        Ok(corner)
    }
}

//! Where the pieces of a model get their tensors from.

use std::ops::Range;

use super::arch::{LinearSpec, weight};
use super::linear::Linear;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::storage::LocalFuture;
use crate::tensor::{Elem, Tensor};

/// Tensors by name. A dense checkpoint answers the first two methods; a quantized one also says how
/// its linear layers are put together.
pub trait Weights {
    /// Element type and shape, `None` if there is no such tensor.
    fn info(&self, name: &str) -> Result<Option<(Elem, Vec<usize>)>>;

    /// The little-endian bytes of rows `rows` (of the first dimension) of a tensor that is there.
    fn read_rows<'a>(&'a self, name: &'a str, rows: Range<usize>) -> LocalFuture<'a, Result<Vec<u8>>>;

    /// A linear layer, by default from the tensors `<module>.weight` and `<module>.bias`.
    fn linear<'a>(&'a self, spec: &'a LinearSpec, device: &'a Device) -> LocalFuture<'a, Result<Linear>> {
        Box::pin(load_dense_linear(self, spec, device))
    }
}

/// A small tensor, such as a norm or a bias, as f32.
///
/// # Errors
/// [`Error::Model`] when it is absent or has another shape.
pub async fn load_f32<W: Weights + ?Sized>(weights: &W, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let elem = check(weights, name, shape)?;
    let bytes = weights.read_rows(name, 0..shape[0]).await?;
    Tensor::from_bytes(&Device::Cpu, elem, shape, &bytes)?.to_f32().await
}

/// A matrix [rows, cols] as stored, in as many row chunks as the device's largest tensor asks for.
///
/// # Errors
/// [`Error::Model`] when it is absent or has another shape.
pub async fn load_row_chunks<W: Weights + ?Sized>(
    weights: &W,
    name: &str,
    [rows, cols]: [usize; 2],
    device: &Device,
) -> Result<Vec<Tensor>> {
    let elem = check(weights, name, &[rows, cols])?;
    let mut chunks = vec![];
    for range in Linear::chunk_rows(device, rows, cols * elem.bytes()) {
        let count = range.len();
        let bytes = weights.read_rows(name, range).await?;
        chunks.push(Tensor::from_bytes(device, elem, &[count, cols], &bytes)?);
    }
    Ok(chunks)
}

/// The linear layer of a dense checkpoint.
///
/// # Errors
/// [`Error::Model`] when a tensor is absent or has another shape than the configuration says.
pub async fn load_dense_linear<W: Weights + ?Sized>(
    weights: &W,
    spec: &LinearSpec,
    device: &Device,
) -> Result<Linear> {
    let (elem, cols) = (linear_elem(weights, spec)?, spec.in_features);
    let mut chunks = vec![];
    for range in Linear::chunk_rows(device, spec.out_features, cols * elem.bytes()) {
        let count = range.len();
        let bytes = linear_rows(weights, spec, range).await?;
        chunks.push(Tensor::from_bytes(device, elem, &[count, cols], &bytes)?);
    }
    let bias = if spec.bias {
        Some(load_f32(weights, &format!("{}.bias", spec.module), &[spec.out_features]).await?)
    } else {
        None
    };
    Linear::new(chunks, bias)
}

/// The element type of a dense linear layer's weight.
///
/// # Errors
/// [`Error::Model`] when it is absent or has another shape than it should.
pub fn linear_elem<W: Weights + ?Sized>(weights: &W, spec: &LinearSpec) -> Result<Elem> {
    check(weights, &weight(&spec.module), &spec.stored_shape())
}

/// The bytes of rows `rows` of a dense linear layer's weight [out, in], however it is stored.
///
/// # Errors
/// As [`linear_elem`]; those of the source.
pub async fn linear_rows<W: Weights + ?Sized>(
    weights: &W,
    spec: &LinearSpec,
    rows: Range<usize>,
) -> Result<Vec<u8>> {
    let (elem, name) = (linear_elem(weights, spec)?, weight(&spec.module));
    if !spec.transposed {
        return weights.read_rows(&name, rows).await;
    }
    let (size, out) = (elem.bytes(), spec.out_features);
    let whole = weights.read_rows(&name, 0..spec.in_features).await?;
    let mut bytes = Vec::with_capacity(rows.len() * spec.in_features * size);
    for row in rows {
        for input in whole.chunks_exact(out * size) {
            bytes.extend_from_slice(&input[row * size..][..size]);
        }
    }
    Ok(bytes)
}

/// The element type of a tensor that must be there with this shape.
pub(super) fn check<W: Weights + ?Sized>(weights: &W, name: &str, shape: &[usize]) -> Result<Elem> {
    let Some((elem, found)) = weights.info(name)? else {
        return Err(Error::model(
            name,
            "the checkpoint has no such tensor",
            "Use a complete checkpoint, or the config.json that belongs to it",
        ));
    };
    if found != shape {
        return Err(Error::model(
            name,
            format!("its shape is {found:?}, config.json says {shape:?}"),
            "Use the config.json that belongs to the checkpoint",
        ));
    }
    Ok(elem)
}

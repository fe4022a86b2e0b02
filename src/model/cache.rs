//! Keys and values of the tokens that a model has read, so that each is computed once.

use super::config::ModelConfig;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::append::Rows;
use crate::tensor::{Elem, Tensor};

/// For each layer two tensors [capacity, kv_heads · head_dim], whose first rows are in use.
///
/// A sliding window leaves out what it does not see when it reads, not here: rows are positions, and
/// taking tokens back is setting the length.
pub struct KvCache {
    layers: Vec<[Tensor; 2]>,
    capacity: usize,
    len: usize,
}

impl KvCache {
    /// Room for `capacity` tokens in `elem`, f32 or f16.
    ///
    /// # Errors
    /// [`Error::Options`] when the device cannot hold a layer of it.
    pub fn new(config: &ModelConfig, device: &Device, elem: Elem, capacity: usize) -> Result<Self> {
        let width = config.kv_heads * config.head_dim;
        let largest = device.max_tensor_bytes();
        let layer_bytes = (capacity * width * elem.bytes()) as u64;
        if layer_bytes > largest {
            let fitting = largest / (width * elem.bytes()) as u64;
            return Err(Error::options(
                format!("{} cannot hold the keys of {capacity} tokens in one buffer", device.describe()),
                format!("Ask for a context of at most {fitting} tokens"),
            ));
        }
        let tensor = || Tensor::uninit(device, elem, &[capacity, width]);
        let layers = (0..config.layers).map(|_| Ok([tensor()?, tensor()?])).collect::<Result<_>>()?;
        Ok(Self { layers, capacity, len: 0 })
    }

    /// How many bytes such a cache takes.
    pub fn bytes(config: &ModelConfig, elem: Elem, tokens: usize) -> u64 {
        (2 * config.layers * config.kv_heads * config.head_dim * elem.bytes()) as u64 * tokens as u64
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// All layers have taken `count` more tokens.
    pub(super) fn grow(&mut self, count: usize) {
        self.len = (self.len + count).min(self.capacity);
    }

    pub(super) fn rows(&mut self, layer: usize) -> Rows<'_> {
        let [keys, values] = &mut self.layers[layer];
        Rows { keys, values }
    }

    /// Keys and values of a layer.
    pub(super) fn layer(&self, layer: usize) -> [&Tensor; 2] {
        self.layers[layer].each_ref()
    }
}

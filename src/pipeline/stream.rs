//! A stream of activations through a model: the calibration text, a micro-batch at a time.
//!
//! A block is applied to a stream; another stream (the 16-bit model's beside the quantized one's)
//! is another value. Micro-batches stay on the device when the plan says that they fit, else on the
//! host.

use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::model::{Embedding, Flow, Routing};
use crate::tensor::Tensor;

/// Activations of one micro-batch, [sequences · seq_len, features].
enum Slot {
    Device(Tensor),
    Host(Vec<f32>, Vec<usize>),
    /// Taken out and not put back.
    Empty,
}

/// One value for each micro-batch, on the device or on the host.
pub struct Stream {
    slots: Vec<Slot>,
    device: Device,
    on_device: bool,
}

impl Stream {
    pub fn new(device: &Device, on_device: bool, batches: usize) -> Self {
        // The CPU device's tensors are host memory already.
        let on_device = on_device || device.is_cpu();
        Self { slots: (0..batches).map(|_| Slot::Empty).collect(), device: device.clone(), on_device }
    }

    /// Moves a micro-batch out, onto the device. `None` when nothing is there.
    pub fn take(&mut self, batch: usize) -> Result<Option<Tensor>> {
        match std::mem::replace(&mut self.slots[batch], Slot::Empty) {
            Slot::Device(tensor) => Ok(Some(tensor)),
            Slot::Host(values, shape) => Tensor::from_f32(&self.device, &shape, values).map(Some),
            Slot::Empty => Ok(None),
        }
    }

    /// Puts a micro-batch where the stream lives.
    pub async fn put(&mut self, batch: usize, tensor: Tensor) -> Result<()> {
        self.slots[batch] = if self.on_device {
            Slot::Device(tensor)
        } else {
            Slot::Host(tensor.to_f32().await?, tensor.shape().to_vec())
        };
        Ok(())
    }
}

/// The micro-batches of one model at one stage of a block. A second value may go along with it through
/// another block: the original model's activations beside the quantized one's.
pub struct Flows {
    h: Stream,
    inner: Stream,
    sum: Stream,
    routing: Vec<Option<Rc<Routing>>>,
    stages: Vec<usize>,
}

impl Flows {
    pub fn new(device: &Device, on_device: bool, batches: usize) -> Self {
        let stream = || Stream::new(device, on_device, batches);
        Self {
            h: stream(),
            inner: stream(),
            sum: stream(),
            routing: vec![None; batches],
            stages: vec![0; batches],
        }
    }

    /// With this residual stream, before a block.
    pub fn from_stream(self, h: Stream) -> Self {
        Self { h, ..self }
    }

    /// Moves a micro-batch out, onto the device. `None` when nothing is there.
    pub fn take(&mut self, batch: usize) -> Result<Option<Flow>> {
        let Some(h) = self.h.take(batch)? else { return Ok(None) };
        let (inner, sum) = (self.inner.take(batch)?, self.sum.take(batch)?);
        let routing = self.routing[batch].take();
        Ok(Some(Flow { h, inner, sum, routing, stage: self.stages[batch] }))
    }

    /// Puts it back where the streams live.
    pub async fn put(&mut self, batch: usize, flow: Flow) -> Result<()> {
        let Flow { h, inner, sum, routing, stage } = flow;
        self.routing[batch] = routing;
        self.stages[batch] = stage;
        self.h.put(batch, h).await?;
        if let Some(inner) = inner {
            self.inner.put(batch, inner).await?;
        }
        if let Some(sum) = sum {
            self.sum.put(batch, sum).await?;
        }
        Ok(())
    }
}

/// The calibration text cut into micro-batches: sequences of equal length, in order, stacked.
pub struct Batches {
    batches: Vec<Batch>,
}

/// Consecutive sequences of equal length.
pub struct Batch {
    /// Token ids, sequence after sequence.
    pub ids: Vec<u32>,
    pub seq_len: usize,
}

impl Batches {
    /// Cuts `rows` so that a micro-batch has at most `max_tokens` (or one sequence).
    pub fn new(rows: &[Vec<u32>], max_tokens: usize) -> Self {
        let mut batches: Vec<Batch> = Vec::new();
        for row in rows {
            match batches.last_mut() {
                Some(last) if last.seq_len == row.len() && last.ids.len() + row.len() <= max_tokens => {
                    last.ids.extend_from_slice(row);
                }
                _ => batches.push(Batch { ids: row.clone(), seq_len: row.len() }),
            }
        }
        Self { batches }
    }

    pub fn len(&self) -> usize {
        self.batches.len()
    }

    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    pub fn get(&self, batch: usize) -> &Batch {
        &self.batches[batch]
    }

    pub fn tokens(&self) -> usize {
        self.batches.iter().map(|batch| batch.ids.len()).sum()
    }

    pub fn longest(&self) -> usize {
        self.batches.iter().map(|batch| batch.seq_len).max().unwrap_or(0)
    }

    /// The first block's inputs.
    pub async fn embed(&self, embedding: &Embedding, device: &Device, on_device: bool) -> Result<Stream> {
        let mut stream = Stream::new(device, on_device, self.len());
        for (index, batch) in self.batches.iter().enumerate() {
            stream.put(index, embedding.embed(&batch.ids, batch.seq_len, 0)?).await?;
            device.settle().await?;
        }
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_neighbours_of_equal_length_share_a_batch() {
        let rows = [4, 4, 4, 7, 4].map(|len| vec![1; len]);
        let batches = Batches::new(&rows, 8);
        let lens: Vec<_> =
            (0..batches.len()).map(|i| (batches.get(i).ids.len(), batches.get(i).seq_len)).collect();
        assert_eq!(lens, [(8, 4), (4, 4), (7, 7), (4, 4)]);
        assert_eq!((batches.tokens(), batches.longest()), (23, 7));
    }
}

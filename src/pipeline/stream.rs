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

    /// Keeps a stage's inputs, which the next stage needs.
    pub async fn keep(&mut self, batch: usize, inner: Option<Tensor>) -> Result<()> {
        match inner {
            Some(inner) => self.inner.put(batch, inner).await,
            None => Ok(()),
        }
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
    /// They judge what the others make, and take no part in it.
    pub held: bool,
}

/// Tokens that judge a layer. Each candidate is multiplied with them, and neighbours say much the same.
const JUDGES: usize = 256;

/// Tokens that are held out at most: more would judge no better, but be missed in the sums.
pub(super) const MOST_HELD: usize = 2048;

impl Batches {
    /// Cuts `rows` so that a micro-batch has at most `max_tokens` (or one sequence). With `hold` a tenth of
    /// the sequences, evenly spread, is held out: its micro-batches come last.
    pub fn new(rows: &[Vec<u32>], max_tokens: usize, hold: bool) -> Self {
        let mean = rows.iter().map(Vec::len).sum::<usize>() / rows.len().max(1);
        let count = (rows.len() / 10).min(MOST_HELD / mean.max(1)).max(1);
        let apart = if hold && rows.len() > 1 { rows.len().div_ceil(count) } else { usize::MAX };
        let is_held = |index: usize| index % apart == apart - 1 || apart != usize::MAX && rows.len() < apart;
        let of = |held: bool| {
            rows.iter().enumerate().filter(move |(index, _)| is_held(*index) == held).map(|(_, row)| row)
        };
        Self::of(of(false), of(true), max_tokens)
    }

    /// Cuts rows to sum up and rows to hold out.
    pub fn of<'a>(
        summed: impl Iterator<Item = &'a Vec<u32>>,
        held: impl Iterator<Item = &'a Vec<u32>>,
        max_tokens: usize,
    ) -> Self {
        let mut batches: Vec<Batch> = Vec::new();
        for (row, held) in summed.map(|row| (row, false)).chain(held.map(|row| (row, true))) {
            match batches.last_mut() {
                Some(last)
                    if last.held == held
                        && last.seq_len == row.len()
                        && last.ids.len() + row.len() <= max_tokens =>
                {
                    last.ids.extend_from_slice(row);
                }
                _ => batches.push(Batch { ids: row.clone(), seq_len: row.len(), held }),
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

    /// Those of them that are not held out.
    pub fn summed_tokens(&self) -> usize {
        self.batches.iter().filter(|batch| !batch.held).map(|batch| batch.ids.len()).sum()
    }

    /// Of the tokens that are held out one in so many judges, to be [`JUDGES`] or somewhat fewer.
    pub fn judging_every(&self) -> usize {
        (self.tokens() - self.summed_tokens()).div_ceil(JUDGES).max(1)
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
        let batches = Batches::new(&rows, 8, false);
        let lens: Vec<_> =
            (0..batches.len()).map(|i| (batches.get(i).ids.len(), batches.get(i).seq_len)).collect();
        assert_eq!(lens, [(8, 4), (4, 4), (7, 7), (4, 4)]);
        assert_eq!((batches.tokens(), batches.longest()), (23, 7));
    }

    #[test]
    fn a_tenth_is_held_out_and_comes_last() {
        let held = |count: usize| {
            let rows: Vec<_> = (0..count as u32).map(|row| vec![row; 100]).collect();
            let batches = Batches::new(&rows, 300, true);
            assert_eq!(batches.tokens(), 100 * count);
            let held: Vec<u32> = batches
                .batches
                .iter()
                .filter(|batch| batch.held)
                .flat_map(|batch| batch.ids[..].chunks(100).map(|row| row[0]))
                .collect();
            assert_eq!(batches.summed_tokens(), 100 * (count - held.len()));
            assert!(batches.batches.is_sorted_by_key(|batch| batch.held));
            assert_eq!(batches.judging_every(), (100 * held.len()).div_ceil(JUDGES).max(1));
            held
        };
        assert_eq!(held(30), [9, 19, 29]);
        assert_eq!(held(4), [3]);
        assert_eq!(held(2), [1]);
        // The only sequence there is.
        assert_eq!(held(1), [0; 0]);
        // No more than judge well.
        assert_eq!(held(1000).len(), 20);
    }
}

//! Rows of token ids on their way through one checkpoint, a block at a time.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{Block, Embedding, ModelConfig, RopeTables, Stored};
use crate::pipeline::stream::{Batches, Stream};
use crate::tensor::Tensor;

/// Bytes of hidden states held between blocks. A longer text goes through the model in parts, each of
/// which reads the weights again: that costs little beside the products of so many tokens.
pub const STREAM_BYTES: usize = 256 << 20;

/// The hidden states of some rows after the blocks that they have passed. Only one block's weights
/// are in memory, and only while it is applied.
pub struct Pass<'a> {
    stored: &'a Stored,
    config: &'a ModelConfig,
    device: &'a Device,
    batches: &'a Batches,
    rope: RopeTables,
    stream: Stream,
}

impl<'a> Pass<'a> {
    /// The rows' embeddings.
    ///
    /// # Errors
    /// Those of storage and device; [`Error::Text`] for an id that the model does not have.
    pub async fn begin(
        stored: &'a Stored,
        config: &'a ModelConfig,
        batches: &'a Batches,
        device: &'a Device,
    ) -> Result<Self> {
        let rope = config.rope_tables(device, batches.longest())?;
        let ids = (0..batches.len()).flat_map(|batch| batches.get(batch).ids.iter().copied());
        let embedding = Embedding::load_rows(config, stored, device, ids).await?;
        let stream = batches.embed(&embedding, device, true).await?;
        Ok(Self { stored, config, device, batches, rope, stream })
    }

    /// Applies block `layer`. `step` is called before each micro-batch.
    pub async fn block(&mut self, layer: usize, step: &mut impl AsyncFnMut() -> Result<()>) -> Result<()> {
        let block = Block::load(self.config, layer, self.stored, self.device).await?;
        for batch in 0..self.batches.len() {
            step().await?;
            let h = self.take(batch)?;
            let h = block.forward(h, self.batches.get(batch).seq_len, &self.rope).await?;
            self.put(batch, h).await?;
            self.device.settle().await?;
        }
        Ok(())
    }

    /// Moves a micro-batch out: [tokens, hidden].
    pub fn take(&mut self, batch: usize) -> Result<Tensor> {
        self.stream
            .take(batch)?
            .ok_or_else(|| Error::Internal(format!("micro-batch {batch} was taken twice")))
    }

    /// Puts it back.
    pub async fn put(&mut self, batch: usize, h: Tensor) -> Result<()> {
        self.stream.put(batch, h).await
    }
}

/// Cuts rows into parts whose hidden states take at most `stream_bytes`.
pub fn parts<R>(rows: &[R], longest: usize, hidden: usize, stream_bytes: usize) -> Vec<&[R]> {
    let fitting = stream_bytes / (4 * hidden * longest.max(1));
    rows.chunks(fitting.max(1)).collect()
}

/// The end of an evaluation that its observer no longer wants.
pub fn go_on(wanted: bool) -> Result<()> {
    match wanted {
        true => Ok(()),
        false => Err(Error::Interrupted {
            place: "during the evaluation".into(),
            advice: "it keeps nothing; start it again".into(),
        }),
    }
}

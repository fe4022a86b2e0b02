//! The two ends of a model: the embedding table and the language-model head.

use super::arch::{head_stage, weight};
use super::config::ModelConfig;
use super::linear::Linear;
use super::norm::Norm;
use super::weights::{Weights, check, load_row_chunks};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::activation::{self, Function};
use crate::kernels::add::add_assign;
use crate::kernels::cross_entropy::nll;
use crate::kernels::embedding::gather;
use crate::tensor::{Elem, Tensor};

/// How much of the table is read at a time when only some rows are kept.
const PIECE_BYTES: usize = 8 << 20;

/// The embedding table, or those of its rows that a text uses.
pub struct Embedding {
    chunks: Vec<Tensor>,
    /// For a table of some rows only: the ids that have one, sorted; row i is that of `ids[i]`.
    kept: Option<Vec<u32>>,
    finish: Finish,
}

/// What makes a block's inputs of rows of the table.
struct Finish {
    scale: f32,
    /// A table of learned positions, and the row of position 0.
    positions: Option<(Vec<Tensor>, usize)>,
}

impl Finish {
    async fn load<W: Weights + ?Sized>(config: &ModelConfig, weights: &W, device: &Device) -> Result<Self> {
        let positions = match &config.names.positions {
            None => None,
            Some(name) => {
                let rows = config.max_position_embeddings + config.positions_offset;
                let shape = [rows, config.hidden_size];
                let chunks = load_row_chunks(weights, &weight(name), shape, device).await?;
                Some((chunks, config.positions_offset))
            }
        };
        Ok(Self { scale: config.embedding_scale, positions })
    }

    /// Of sequences of `seq_len` that start at position `start`.
    fn apply(&self, mut h: Tensor, seq_len: usize, start: usize) -> Result<Tensor> {
        if self.scale != 1.0 {
            activation::apply(&mut h, Function::Scale(self.scale), None)?;
        }
        if let Some((table, offset)) = &self.positions {
            let row = |token: usize| (offset + start + token % seq_len.max(1)) as u32;
            let table: Vec<&Tensor> = table.iter().collect();
            let rows: Vec<u32> = (0..h.rows()).map(row).collect();
            add_assign(&mut h, &gather(&table, &rows)?)?;
        }
        Ok(h)
    }
}

impl Embedding {
    /// The whole table.
    ///
    /// # Errors
    /// [`Error::Model`] when the tensor is absent or has the wrong shape.
    pub async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let shape = [config.vocab_size, config.hidden_size];
        let name = weight(&config.names.embedding);
        Ok(Self {
            chunks: load_row_chunks(weights, &name, shape, device).await?,
            kept: None,
            finish: Finish::load(config, weights, device).await?,
        })
    }

    /// Only the rows of `ids`, read piece by piece: a calibration text uses a fraction of a large
    /// vocabulary.
    ///
    /// # Errors
    /// [`Error::Text`] when an id is not below the vocabulary size, else as [`Embedding::load`].
    pub async fn load_rows<W: Weights + ?Sized>(
        config: &ModelConfig,
        weights: &W,
        device: &Device,
        ids: impl IntoIterator<Item = u32>,
    ) -> Result<Self> {
        let (vocab, cols) = (config.vocab_size, config.hidden_size);
        let name = weight(&config.names.embedding);
        let elem = check(weights, &name, &[vocab, cols])?;
        let row_bytes = cols * elem.bytes();
        let mut kept: Vec<u32> = ids.into_iter().collect();
        kept.sort_unstable();
        kept.dedup();
        if let Some(&largest) = kept.last().filter(|&&id| id as usize >= vocab) {
            return Err(outside(largest, vocab));
        }
        let mut bytes = Vec::with_capacity(kept.len() * row_bytes);
        let piece_rows = (PIECE_BYTES / row_bytes).max(1);
        let mut rest = kept.as_slice();
        while let Some(&first) = rest.first() {
            let first = first as usize;
            let count = rest.partition_point(|&id| (id as usize) < first + piece_rows);
            let (here, after) = rest.split_at(count);
            let last = here[count - 1] as usize;
            let piece = weights.read_rows(&name, first..last + 1).await?;
            for &id in here {
                bytes.extend_from_slice(&piece[(id as usize - first) * row_bytes..][..row_bytes]);
            }
            rest = after;
        }
        let mut chunks = vec![];
        for range in Linear::chunk_rows(device, kept.len(), row_bytes) {
            let part = &bytes[range.start * row_bytes..range.end * row_bytes];
            chunks.push(Tensor::from_bytes(device, elem, &[range.len(), cols], part)?);
        }
        Ok(Self { chunks, kept: Some(kept), finish: Finish::load(config, weights, device).await? })
    }

    /// The first block's input, [tokens, hidden] in f32: sequences of `seq_len` tokens, each from position
    /// `start` on.
    ///
    /// # Errors
    /// [`Error::Text`] when an id has no row.
    pub fn embed(&self, ids: &[u32], seq_len: usize, start: usize) -> Result<Tensor> {
        self.finish.apply(self.rows(ids)?, seq_len, start)
    }

    fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let table: Vec<&Tensor> = self.chunks.iter().collect();
        let Some(kept) = &self.kept else { return gather(&table, ids) };
        let row = |id: &u32| match kept.binary_search(id) {
            Ok(row) => Ok(row as u32),
            Err(_) => Err(Error::Internal(format!("no embedding was loaded for token id {id}"))),
        };
        gather(&table, &ids.iter().map(row).collect::<Result<Vec<u32>>>()?)
    }
}

/// The norm behind the last block: what the head multiplies has passed it.
///
/// # Errors
/// [`Error::Model`] when a tensor is absent or has the wrong shape.
pub async fn final_norm<W: Weights + ?Sized>(
    config: &ModelConfig,
    weights: &W,
    device: &Device,
) -> Result<Norm> {
    Norm::load(config, &config.names.final_norm, config.hidden_size, weights, device).await
}

/// The final norm and the language-model head.
pub struct Head {
    norm: Norm,
    soft_cap: Option<f32>,
    weight: Linear,
    finish: Finish,
}

impl Head {
    /// Loads the head's own weight, or the embedding table where the two are tied.
    ///
    /// # Errors
    /// [`Error::Model`] when a tensor is absent or has the wrong shape.
    pub async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let linear = match config.tie_word_embeddings {
            true => {
                let name = weight(&config.names.embedding);
                Linear::new(load_row_chunks(weights, &name, [vocab, hidden], device).await?, None)?
            }
            false => weights.linear(&head_stage(config).linears[0], device).await?,
        };
        Ok(Self {
            norm: final_norm(config, weights, device).await?,
            soft_cap: config.logit_soft_cap,
            weight: linear,
            finish: Finish::load(config, weights, device).await?,
        })
    }

    /// Logits [tokens, vocab] of the last block's output.
    ///
    /// # Errors
    /// [`Error::Device`] when they are more than one tensor may hold.
    pub fn logits(&self, h: &Tensor) -> Result<Tensor> {
        let mut logits = Tensor::uninit(h.device(), Elem::F32, &[h.rows(), self.weight.out_features()])?;
        self.logits_to(&mut logits, h)?;
        Ok(logits)
    }

    /// The same into a tensor that is there.
    pub(super) fn logits_to(&self, logits: &mut Tensor, h: &Tensor) -> Result<()> {
        self.norm.before(h, |x| self.weight.project(logits, x, false))?;
        match self.soft_cap {
            Some(cap) => activation::apply(logits, Function::SoftCap(cap), None),
            None => Ok(()),
        }
    }

    /// The embedding of a model whose table is the head's weight; see [`Embedding::embed`].
    pub(super) fn embed(&self, ids: &[u32], start: usize) -> Result<Tensor> {
        self.finish.apply(gather(&self.weight.chunks()?, ids)?, ids.len(), start)
    }

    /// Bytes that the logits of a token read.
    pub fn bytes(&self) -> u64 {
        self.weight.bytes()
    }

    /// −ln p(target) in nats for each row of the last block's output; see
    /// [`crate::kernels::cross_entropy::nll`].
    pub async fn nll(&self, h: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
        if self.weight.is_packed() || self.soft_cap.is_some() {
            return self.nll_of_logits(h, targets).await;
        }
        nll(&self.norm.apply(h)?, &self.weight.chunks()?, targets).await
    }

    /// The same from logits, some tokens at a time: a packed weight has no rows to go through.
    async fn nll_of_logits(&self, h: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
        let (device, hidden) = (h.device(), h.cols());
        let values = h.to_f32().await?;
        let mut losses = Vec::with_capacity(targets.len());
        for (values, targets) in values.chunks(LOGITS_TOKENS * hidden).zip(targets.chunks(LOGITS_TOKENS)) {
            let part = Tensor::from_f32(device, &[values.len() / hidden, hidden], values.to_vec())?;
            let logits = self.logits(&part)?;
            let cols = logits.cols();
            for (row, &target) in logits.to_f32().await?.chunks(cols).zip(targets) {
                let of_target = *row.get(target as usize).ok_or_else(|| outside(target, cols))?;
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = row.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
                losses.push((sum.ln() + f64::from(largest) - f64::from(of_target)) as f32);
            }
        }
        Ok(losses)
    }
}

/// Tokens whose logits are in memory together.
const LOGITS_TOKENS: usize = 64;

fn outside(id: u32, vocab: usize) -> Error {
    Error::text(
        format!("token id {id}"),
        format!("it is not below the vocabulary size {vocab}"),
        "Use the tokenizer that belongs to the model",
    )
}

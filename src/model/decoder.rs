//! A whole model in memory, for generation: it reads a text in chunks and then a token at a time.
//!
//! A block of one token is six dispatches: norm, q, k and v; rope and cache; attention; o onto the
//! residual; norm, gate and up; silu, product and down onto the residual. Reading in chunks is the same
//! with matrix products. [`super::Block`] computes the same a block at a time, over many sequences; blocks of
//! other kinds than that run in its stages here too.

use super::arch::{self, Kind, Qkv};
use super::block::{Block, Reading};
use super::cache::KvCache;
use super::config::ModelConfig;
use super::ends::{Embedding, Head};
use super::linear::Linear;
use super::norm::NormKind;
use super::rope::RopeTables;
use super::weights::{Weights, load_f32};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::activation::Function;
use crate::kernels::append::{HeadNorm, append};
use crate::kernels::attention::{self, Attention};
use crate::kernels::input::Input;
use crate::tensor::{Elem, Tensor};

/// How much a decoder keeps.
#[derive(Debug, Clone, Copy)]
pub struct DecoderOptions {
    /// Tokens of the longest text, prompt and answer together.
    pub context: usize,
    /// What keys and values are kept in: f16 is half the memory and half of what each token reads.
    pub cache: Elem,
}

/// A model's weights on a device, and the text that it has read so far.
pub struct Decoder {
    device: Device,
    vocab_size: usize,
    /// `None` where the head's weight is the table.
    embedding: Option<Embedding>,
    blocks: Vec<DecoderBlock>,
    head: Head,
    rope: RopeTables,
    cache: KvCache,
    /// Of one token, used again for each.
    single: Buffers,
    logits: Tensor,
}

/// A block as generation runs it.
enum DecoderBlock {
    /// The kind that most families have, in few dispatches.
    Fused(Box<Fused>),
    /// Any other, in its stages.
    Staged(Box<Block>),
}

struct Fused {
    attention_norm: Tensor,
    qkv: Linear,
    /// [2, head_dim], where queries and keys are normalized.
    head_norms: Option<Tensor>,
    o: Linear,
    mlp_norm: Tensor,
    gate_up: Linear,
    down: Linear,
    shape: Attention,
    eps: f32,
}

/// What a block needs room for, each [tokens, …] in f32.
struct Buffers {
    qkv: Tensor,
    q: Tensor,
    mixed: Tensor,
    gate_up: Tensor,
}

impl Buffers {
    fn new(config: &ModelConfig, device: &Device, tokens: usize) -> Result<Self> {
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let rows = |width| Tensor::uninit(device, Elem::F32, &[tokens, width]);
        Ok(Self {
            qkv: rows(q + 2 * kv)?,
            q: rows(q)?,
            mixed: rows(q)?,
            gate_up: rows(2 * config.intermediate_size)?,
        })
    }
}

impl DecoderBlock {
    async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        layer: usize,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        match Fused::fits(config, layer) {
            true => Ok(Self::Fused(Box::new(Fused::load(config, layer, weights, device).await?))),
            false => Ok(Self::Staged(Box::new(Block::load(config, layer, weights, device).await?))),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Fused(block) => block.linears().map(Linear::bytes).iter().sum(),
            Self::Staged(block) => block.bytes(),
        }
    }

    /// See [`Fused::forward`]; a staged block has no shorter way to its keys.
    async fn forward(
        &self,
        mut h: Tensor,
        buffers: &mut Buffers,
        cache: &mut KvCache,
        layer: usize,
        rope: &RopeTables,
        keys_only: bool,
    ) -> Result<Tensor> {
        match self {
            Self::Fused(block) => {
                block.forward(&mut h, buffers, cache, layer, rope, keys_only)?;
                Ok(h)
            }
            Self::Staged(block) => block.read(h, &mut Reading::Next(cache), rope).await,
        }
    }
}

impl Fused {
    /// Whether block `layer` is of the kind.
    fn fits(config: &ModelConfig, layer: usize) -> bool {
        let spec = arch::block(config, layer);
        let kinds: Vec<_> = spec.sections.iter().flat_map(|of| &of.branches).map(|of| &of.kind).collect();
        config.norm == NormKind::Rms
            && config.activation == Function::Silu
            && config.rope.is_some()
            && config.rotary_dim == config.head_dim
            && spec.sections.len() == 2
            && spec.head_norms().iter().all(|(_, width)| *width == config.head_dim)
            && spec.sections.iter().all(|section| section.post_norm.is_none())
            && spec.sections.iter().all(|section| section.router.is_none())
            && matches!(kinds[..], [Kind::Attention { qkv: Qkv::Apart | Qkv::Stacked, .. }, Kind::Gated])
    }

    async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        layer: usize,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let spec = arch::block(config, layer);
        let mut norms = vec![];
        for name in spec.norms() {
            norms.push(load_f32(weights, &arch::weight(name), &[config.hidden_size]).await?);
        }
        let mut head_norms = vec![];
        for (name, width) in spec.head_norms() {
            head_norms.extend(load_f32(weights, &arch::weight(name), &[width]).await?);
        }
        let mut norms = norms.into_iter();
        let mut stages = vec![];
        for stage in spec.stages() {
            let mut linears = vec![];
            for spec in &stage.linears {
                linears.push(weights.linear(spec, device).await?);
            }
            stages.push(Linear::stacked(linears)?);
        }
        let mut stages = stages.into_iter();
        let parts = (norms.next(), norms.next(), stages.next(), stages.next(), stages.next(), stages.next());
        let (Some(attention_norm), Some(mlp_norm), Some(qkv), Some(o), Some(gate_up), Some(down)) = parts
        else {
            return Err(Error::Internal("a block without its parts".into()));
        };
        let vector = |values: Vec<f32>| Tensor::from_f32(device, &[values.len()], values);
        Ok(Self {
            attention_norm: vector(attention_norm)?,
            qkv,
            head_norms: if head_norms.is_empty() { None } else { Some(vector(head_norms)?) },
            o,
            mlp_norm: vector(mlp_norm)?,
            gate_up,
            down,
            shape: Attention::of(config, layer),
            eps: config.norm_eps,
        })
    }

    fn linears(&self) -> [&Linear; 4] {
        [&self.qkv, &self.o, &self.gate_up, &self.down]
    }

    /// Takes `h` [tokens, hidden] through the block; its tokens follow those in the cache. With
    /// `keys_only` nothing but the cache is filled and `h` stays as it is.
    fn forward(
        &self,
        h: &mut Tensor,
        buffers: &mut Buffers,
        cache: &mut KvCache,
        layer: usize,
        rope: &RopeTables,
        keys_only: bool,
    ) -> Result<()> {
        let Buffers { qkv, q, mixed, gate_up } = buffers;
        let (start, end) = (cache.len(), cache.len() + h.rows());
        let normed = Input::RmsNorm { x: h, weight: &self.attention_norm, eps: self.eps };
        self.qkv.project(qkv, normed, false)?;
        let norm = self.head_norms.as_ref().map(|weights| HeadNorm { weights, eps: self.eps });
        let table =
            rope.of(layer).ok_or_else(|| Error::Internal("a decoder without rotary positions".into()))?;
        append(q, cache.rows(layer), qkv, table, norm, start)?;
        if keys_only {
            return Ok(());
        }
        let [keys, values] = cache.layer(layer);
        attention::cached(mixed, q, keys, values, &self.shape, end)?;
        self.o.project(h, Input::Plain(mixed), true)?;
        let normed = Input::RmsNorm { x: h, weight: &self.mlp_norm, eps: self.eps };
        self.gate_up.project(gate_up, normed, false)?;
        self.down.project(h, Input::SwiGlu(gate_up), true)
    }
}

impl Decoder {
    /// Tokens that are read together at most.
    pub const CHUNK: usize = 256;

    /// Loads a whole model. `progress` hears the blocks loaded and their number; false stops.
    ///
    /// # Errors
    /// [`Error::Model`] naming a tensor that is absent or has the wrong shape; [`Error::Options`] for a
    /// context that the model or the device has no room for; [`Error::Interrupted`].
    pub async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        weights: &W,
        device: &Device,
        options: DecoderOptions,
        mut progress: impl AsyncFnMut(usize, usize) -> bool,
    ) -> Result<Self> {
        let DecoderOptions { context, cache } = options;
        if context == 0 || context > config.max_position_embeddings {
            return Err(Error::options(
                format!("a context of {context} tokens is not what this model has"),
                format!(
                    "Ask for 1 to {}, its max_position_embeddings in config.json",
                    config.max_position_embeddings
                ),
            ));
        }
        let cache = KvCache::new(config, device, cache, context)?;
        let mut blocks = vec![];
        for layer in 0..config.layers {
            if !progress(layer, config.layers).await {
                return Err(Error::Interrupted {
                    place: "while the model was loaded".into(),
                    advice: "nothing was written".into(),
                });
            }
            blocks.push(DecoderBlock::load(config, layer, weights, device).await?);
        }
        Ok(Self {
            device: device.clone(),
            vocab_size: config.vocab_size,
            embedding: match config.tie_word_embeddings {
                true => None,
                false => Some(Embedding::load(config, weights, device).await?),
            },
            blocks,
            head: Head::load(config, weights, device).await?,
            rope: config.rope_tables(device, context)?,
            cache,
            single: Buffers::new(config, device, 1)?,
            logits: Tensor::uninit(device, Elem::F32, &[1, config.vocab_size])?,
        })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Rows of the embedding: every token id is below this.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Tokens of the longest text.
    pub fn context(&self) -> usize {
        self.cache.capacity()
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// Forgets all but the first `len` tokens.
    pub fn rewind(&mut self, len: usize) {
        self.cache.truncate(len);
    }

    /// Bytes of weights that one token reads: all of them but the embedding table, of which it is a row.
    pub fn weight_bytes(&self) -> u64 {
        self.blocks.iter().map(DecoderBlock::bytes).sum::<u64>() + self.head.bytes()
    }

    /// Reads up to [`Decoder::CHUNK`] tokens without asking what follows them.
    ///
    /// # Errors
    /// [`Error::Text`] when the context has no room for them or an id is not in the vocabulary;
    /// [`Error::Device`].
    pub async fn read(&mut self, ids: &[u32]) -> Result<()> {
        self.check_room(ids.len())?;
        if ids.is_empty() {
            return Ok(());
        }
        let mut h = self.embed(ids)?;
        let last = self.blocks.len() - 1;
        let mut buffers = self.single.like(ids.len())?;
        for (layer, block) in self.blocks.iter().enumerate() {
            h = block.forward(h, &mut buffers, &mut self.cache, layer, &self.rope, layer == last).await?;
        }
        self.cache.grow(ids.len());
        self.device.settle().await
    }

    /// Reads one token and gives the logits [1, vocab] of what follows. On a GPU they are asked for, and
    /// there when something waits for them.
    ///
    /// # Errors
    /// As [`Decoder::read`].
    pub async fn step(&mut self, id: u32) -> Result<&mut Tensor> {
        self.check_room(1)?;
        let mut h = self.embed(&[id])?;
        for (layer, block) in self.blocks.iter().enumerate() {
            h = block.forward(h, &mut self.single, &mut self.cache, layer, &self.rope, false).await?;
        }
        self.cache.grow(1);
        self.head.logits_to(&mut self.logits, &h)?;
        Ok(&mut self.logits)
    }

    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        match &self.embedding {
            Some(embedding) => embedding.embed(ids, ids.len(), self.len()),
            None => self.head.embed(ids, self.len()),
        }
    }

    fn check_room(&self, count: usize) -> Result<()> {
        let (len, context) = (self.len(), self.context());
        if len + count > context {
            return Err(Error::text(
                "the text",
                format!("its {} tokens are more than the context of {context}", len + count),
                "Shorten it, or use a longer context if the model has one",
            ));
        }
        Ok(())
    }
}

impl Buffers {
    /// The same for another number of tokens.
    fn like(&self, tokens: usize) -> Result<Self> {
        let rows = |of: &Tensor| Tensor::uninit(of.device(), Elem::F32, &[tokens, of.cols()]);
        Ok(Self {
            qkv: rows(&self.qkv)?,
            q: rows(&self.q)?,
            mixed: rows(&self.mixed)?,
            gate_up: rows(&self.gate_up)?,
        })
    }
}

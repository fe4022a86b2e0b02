//! One transformer block, in stages.
//!
//! ```text
//! h += o_proj(attention(rope(norm(q_proj(x))), rope(norm(k_proj(x))), v_proj(x)))   x = rmsnorm(h)
//! h += down_proj(silu(gate_proj(x)) · up_proj(x))                                   x = rmsnorm(h)
//! ```
//!
//! The quantization pipeline stops between the stages: their inputs make the Hessians, and each
//! stage's linear layers are replaced before its outputs are computed.

use super::arch::{self, LinearSpec};
use super::config::ModelConfig;
use super::linear::Linear;
use super::weights::{Weights, load_f32};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::add::add_assign;
use crate::kernels::attention::{Attention, causal};
use crate::kernels::columns::gather;
use crate::kernels::rmsnorm::rmsnorm;
use crate::kernels::rope::{self, RopeTable};
use crate::kernels::swiglu::{swiglu, swiglu_halves};
use crate::tensor::Tensor;

impl Attention {
    /// Of layer `layer`.
    pub(super) fn of(config: &ModelConfig, layer: usize) -> Self {
        Self {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
            window: config.sliding_window.get(layer).copied().flatten(),
        }
    }
}

/// The weights of one block. Activations are f32; `h` is [tokens, hidden], where tokens are
/// sequences of equal length stacked in rows.
pub struct Block {
    attention_norm: Tensor,
    mlp_norm: Tensor,
    qk_norm: Option<(Tensor, Tensor)>,
    /// In the order of their stages: q, k, v, o, gate, up, down, or with qkv and gate_up as one each.
    linears: Vec<(LinearSpec, Linear)>,
    shape: Attention,
    eps: f32,
}

impl Block {
    /// Loads block `layer`.
    ///
    /// # Errors
    /// [`Error::Model`] naming a tensor that is absent or has the wrong shape.
    pub async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        layer: usize,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let mut block = Self::without_linears(config, layer, weights, device).await?;
        for spec in arch::stages(config, layer).into_iter().flat_map(|stage| stage.linears) {
            let linear = weights.linear(&spec, device).await?;
            block.set_linear(spec, linear);
        }
        Ok(block)
    }

    /// Block `layer` with its norms only: the quantization pipeline adds each linear layer when it
    /// is quantized, so that the weights it came from need not stay.
    ///
    /// # Errors
    /// As [`Block::load`].
    pub async fn without_linears<W: Weights + ?Sized>(
        config: &ModelConfig,
        layer: usize,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let mut norms = vec![];
        for (name, shape) in arch::norms(config, layer) {
            norms.push(Tensor::from_f32(device, &shape, load_f32(weights, &name, &shape).await?)?);
        }
        let mut norms = norms.into_iter();
        let (Some(attention_norm), Some(mlp_norm)) = (norms.next(), norms.next()) else {
            return Err(Error::Internal("a block without norms".into()));
        };
        Ok(Self {
            attention_norm,
            mlp_norm,
            qk_norm: norms.next().zip(norms.next()),
            linears: vec![],
            shape: Attention::of(config, layer),
            eps: config.rms_norm_eps,
        })
    }

    /// Adds a linear layer.
    pub fn set_linear(&mut self, spec: LinearSpec, linear: Linear) {
        self.linears.push((spec, linear));
    }

    /// The linear layer with this short name, such as `q_proj`.
    pub fn linear(&self, short: &str) -> Result<&Linear> {
        self.find(short).ok_or_else(|| Error::Internal(format!("a block has no {short}")))
    }

    fn find(&self, short: &str) -> Option<&Linear> {
        self.linears.iter().find(|(spec, _)| spec.short == short).map(|(_, linear)| linear)
    }

    /// q, k and v of an input, from one layer or from three.
    fn heads(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let Some(qkv) = self.find("qkv_proj") else {
            return Ok([
                self.linear("q_proj")?.forward(x)?,
                self.linear("k_proj")?.forward(x)?,
                self.linear("v_proj")?.forward(x)?,
            ]);
        };
        let all = qkv.forward(x)?;
        let (q, kv) = (self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim);
        let part = |from: usize, to: usize| {
            let columns = Tensor::from_u32(all.device(), &[to - from], (from as u32..to as u32).collect())?;
            gather(&all, &columns)
        };
        Ok([part(0, q)?, part(q, q + kv)?, part(q + kv, q + 2 * kv)?])
    }

    /// The input of q_proj, k_proj and v_proj: [tokens, hidden].
    pub fn attention_input(&self, h: &Tensor) -> Result<Tensor> {
        rmsnorm(h, &self.attention_norm, self.eps)
    }

    /// The input of o_proj, [tokens, heads · head_dim], from [`Block::attention_input`]. Each run of
    /// `seq_len` rows is a sequence that starts at position 0.
    pub fn attention(&self, x: &Tensor, seq_len: usize, rope: &RopeTable) -> Result<Tensor> {
        let [mut q, mut k, v] = self.heads(x)?;
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            q = rmsnorm(&q, q_norm, self.eps)?;
            k = rmsnorm(&k, k_norm, self.eps)?;
        }
        rope::apply(&mut q, rope, seq_len, 0)?;
        rope::apply(&mut k, rope, seq_len, 0)?;
        causal(&q, &k, &v, &self.shape, seq_len)
    }

    /// h += o_proj(mixed), with `mixed` from [`Block::attention`].
    pub fn add_attention(&self, h: &mut Tensor, mixed: &Tensor) -> Result<()> {
        add_assign(h, &self.linear("o_proj")?.forward(mixed)?)
    }

    /// The input of gate_proj and up_proj: [tokens, hidden].
    pub fn mlp_input(&self, h: &Tensor) -> Result<Tensor> {
        rmsnorm(h, &self.mlp_norm, self.eps)
    }

    /// The input of down_proj, [tokens, intermediate], from [`Block::mlp_input`].
    pub fn mlp_hidden(&self, x: &Tensor) -> Result<Tensor> {
        if let Some(gate_up) = self.find("gate_up_proj") {
            return swiglu_halves(&gate_up.forward(x)?);
        }
        let gate = self.linear("gate_proj")?.forward(x)?;
        swiglu(gate, &self.linear("up_proj")?.forward(x)?)
    }

    /// h += down_proj(inner), with `inner` from [`Block::mlp_hidden`].
    pub fn add_mlp(&self, h: &mut Tensor, inner: &Tensor) -> Result<()> {
        add_assign(h, &self.linear("down_proj")?.forward(inner)?)
    }

    /// The whole block, in place.
    pub fn forward(&self, h: &mut Tensor, seq_len: usize, rope: &RopeTable) -> Result<()> {
        let mixed = self.attention(&self.attention_input(h)?, seq_len, rope)?;
        self.add_attention(h, &mixed)?;
        let inner = self.mlp_hidden(&self.mlp_input(h)?)?;
        self.add_mlp(h, &inner)
    }
}

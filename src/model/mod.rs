//! Language models, a block at a time.
//!
//! Only [`Decoder`] holds a whole model, for generation. [`ModelConfig`] says what `config.json` says, [`arch`] names
//! the tensors and linear layers that follow from it, and [`Embedding`], [`Block`] and [`Head`] are
//! loaded one by one through [`Weights`].

pub mod arch;
mod block;
mod cache;
mod config;
mod decoder;
mod ends;
mod family;
pub mod fold;
mod folded;
mod linear;
mod norm;
mod rope;
mod routing;
mod stored;
mod weights;

pub use arch::{LinearSpec, Stage};
pub use block::{Block, Flow};
pub use cache::KvCache;
pub use config::{Experts, ModelConfig};
pub use decoder::{Decoder, DecoderOptions};
pub use ends::{Embedding, Head, final_norm};
pub use family::Family;
pub use folded::Folded;
pub use linear::Linear;
pub use norm::{Norm, NormKind};
pub use rope::{Rope, RopeKind, RopeTables};
pub use routing::Routing;
pub use stored::{Stored, apart};
pub use weights::{Weights, linear_elem, linear_rows, load_dense_linear, load_f32, load_row_chunks};

//! Llama-like models, a block at a time.
//!
//! Nothing here holds a whole model. [`ModelConfig`] says what `config.json` says, [`arch`] names
//! the tensors and linear layers that follow from it, and [`Embedding`], [`Block`] and [`Head`] are
//! loaded one by one through [`Weights`].

pub mod arch;
mod block;
mod config;
mod ends;
mod linear;
mod rope;
mod stored;
mod weights;

pub use arch::{LinearSpec, Stage};
pub use block::Block;
pub use config::{Family, ModelConfig};
pub use ends::{Embedding, Head, final_norm};
pub use linear::Linear;
pub use rope::{Rope, RopeKind};
pub use stored::Stored;
pub use weights::{Weights, load_dense_linear, load_f32, load_row_chunks};

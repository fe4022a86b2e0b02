//! The model families, a short file each: what `config.json` leaves unsaid, and which layers a block has.
//!
//! To add one: write a file with a [`Family`] or two, put them into [`FAMILIES`], and add its tiny model to
//! `tests/goldens/models`.

mod gemma;
mod gpt2;
mod gpt_neox;
mod llama;
mod moe;
mod opt;
mod parts;
mod phi3;
mod qwen;

use std::fmt;

use super::arch::BlockSpec;
use super::config::{Keys, ModelConfig};
use crate::error::{Error, Result};

/// An architecture that [`super::Block`] computes.
pub struct Family {
    /// The `model_type` of `config.json`.
    pub name: &'static str,
    /// Reads the rest of `config.json`.
    pub(super) configure: fn(&'static Family, &Keys) -> Result<ModelConfig>,
    /// Block `layer` of a model so configured.
    pub(super) block: fn(&ModelConfig, usize) -> BlockSpec,
}

static FAMILIES: &[&Family] = &[
    &llama::LLAMA,
    &llama::MISTRAL,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &phi3::PHI3,
    &gpt_neox::GPT_NEOX,
    &opt::OPT,
    &gpt2::GPT2,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &moe::MIXTRAL,
    &moe::QWEN2_MOE,
    &moe::QWEN3_MOE,
    &moe::OLMOE,
];

impl Family {
    /// By the `model_type` of `config.json`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the names of those there are.
    pub(super) fn find(model_type: &str) -> Result<&'static Self> {
        FAMILIES.iter().find(|family| family.name == model_type).copied().ok_or_else(|| {
            let names: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
            Error::unsupported(
                format!("the model type \"{model_type}\" is not supported"),
                format!("Supported are {}", names.join(", ")),
            )
        })
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

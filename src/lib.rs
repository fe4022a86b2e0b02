//! Halftone: GPTQ quantization of language models on the user's own machine.
//!
//! The modules below are listed in the order in which they may use each other: each folder uses
//! only those above it. ARCHITECTURE.md has the map with a line per file.

// The blank lines keep the formatter from sorting the list.
pub mod face;

pub mod error;

pub mod storage;

pub mod checkpoint;

pub mod device;

pub mod tensor;

pub mod kernels;

pub mod gptq;

pub mod model;

pub mod text;

pub mod generate;

pub mod pipeline;

pub mod eval;

pub mod lesson;

#[cfg(not(target_arch = "wasm32"))]
pub mod demo;

#[cfg(not(target_arch = "wasm32"))]
pub mod cli;

#[cfg(target_arch = "wasm32")]
pub mod web;

//! One file per operation: its GPU dispatch and its CPU twin behind one function over tensors.
//! The WGSL of `kernels/<name>.rs` is `shaders/<name>.wgsl`.
//!
//! The CPU twin is the reference that the kernel is tested against, and a backend of its own.

pub mod gemm;
mod parallel;
pub mod registry;
pub mod selftest;

#[cfg(test)]
pub(crate) mod testing;

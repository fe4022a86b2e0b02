//! One file per operation: its GPU dispatch and its CPU twin behind one function over tensors.
//! The WGSL of `kernels/<name>.rs` is `shaders/<name>.wgsl`.
//!
//! The CPU twin is the reference that the kernel is tested against, and a backend of its own.

pub mod activation;
pub mod add;
pub mod append;
pub mod attention;
mod attention_row;
pub mod ceiling;
pub mod cholesky;
pub mod columns;
pub mod cross_entropy;
mod cut;
pub mod dequant;
pub mod descend;
pub mod divergence;
pub mod embedding;
pub mod gemm;
pub mod gemv;
pub mod input;
pub mod keep;
pub mod layernorm;
pub mod magnitude;
pub mod matmul;
pub mod norm;
pub mod pairs;
mod parallel;
pub mod peak;
pub mod penalize;
pub mod qmatmul;
pub mod refit;
pub mod registry;
pub mod rmsnorm;
pub mod rope;
pub mod scales;
pub mod scatter;
pub mod selftest;
mod simd;
pub mod stretch;
mod sums;
pub mod sweep;
pub mod swiglu;
pub mod symmetric;
#[cfg(not(target_arch = "wasm32"))]
mod team;
pub mod topk;

#[cfg(test)]
pub(crate) mod testing;

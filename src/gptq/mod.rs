//! GPTQ of one linear layer.
//!
//! Notation: W \[rows = out, n = in\], X inputs \[tokens, n\], H = (2/tokens)·XᵀX, damping
//! λ = damp_percent · mean(diag H). GPTQ chooses codes column by column; each column's rounding
//! error is spread over the columns still to come so that the layer's output moves least.
//!
//! # One factorization instead of three
//!
//! The paper (arXiv 2210.17323) takes the upper Cholesky factor U of (H+λI)⁻¹ = UᵀU: factor,
//! invert, factor again. Let P reverse the order in which columns are taken and
//! P(H+λI)Pᵀ = L·Lᵀ, the ordinary lower Cholesky factorization. With R = P·L·P, which is upper
//! triangular, H+λI = R·Rᵀ, so (H+λI)⁻¹ = R⁻ᵀR⁻¹ and, since the factor with a positive diagonal is
//! unique, U = R⁻¹. Nothing more is needed than L:
//!
//! - The textbook loop keeps compensated weights W' and after a block b subtracts Err·U from all
//!   later columns. Let E = W − Ŵ be the error against the *original* weights. Row by row the loop
//!   says Err·U = W'_before − … which telescopes to E = Err·R, restricted to the columns done. For
//!   the next block b: W'_b = W_b + (E_done · R_{done,b})·R_bb⁻¹. Proof: the compensated weights of
//!   all columns from b on are those that minimise ‖(W' − W + …)·R‖ given the errors made so far,
//!   and R upper triangular lets the columns of b be solved without those behind them.
//! - In reversed columns, where everything here happens, that reads
//!   W'_b = W_b + (E_{>b} · L_{>b,b})·L_bb⁻¹: one matrix product of growing depth for each block,
//!   one small triangle inverted, and no inverse of H anywhere. Columns are taken from the last to
//!   the first, which is Babai's nearest plane algorithm on the lattice with Gram matrix H+λI.
//! - err_j = (w'_j − ŵ_j)/U_jj satisfies Err = E·R, so Σ err² = tr(E(H+λI)Eᵀ): the layer's loss
//!   falls out of the loop.
//!
//! # Files
//! `scheme` what is asked for; `order` in which columns are taken; `factor` L in blocks;
//! `layer` the whole of it for one stage of a model; `exact` the same in plain f64, to read first.

pub mod exact;
pub mod factor;
pub mod layer;
pub mod order;
pub mod scheme;

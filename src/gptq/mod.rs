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
//! - The textbook loop rounds column j to ŵ_j, sets err_j = (w'_j − ŵ_j)/U_jj and subtracts err_j·U_jk
//!   from every later column k. So column k is rounded at w'_k = w_k − Σ_{j<k} err_j·U_jk, and with
//!   w'_k − ŵ_k = err_k·U_kk the error against the *original* weights, E = W − Ŵ, is E = Err·U, or
//!   Err = E·R.
//! - For a block b after the columns d that are done, the loop sees W'_b = W_b − Err_d·U_db. From
//!   U·R = I follows U_dd·R_db + U_db·R_bb = 0, so −Err_d·U_db = Err_d·U_dd·R_db·R_bb⁻¹, and with
//!   Err_d·U_dd = E_d: W'_b = W_b + (E_d·R_db)·R_bb⁻¹. Inside the block the usual rule holds, with
//!   U_bb = R_bb⁻¹.
//! - In reversed columns, where everything here happens, that reads
//!   W'_b = W_b + (E_{>b}·L_{>b,b})·L_bb⁻¹: one matrix product of growing depth for each block, one
//!   small triangle inverted, and no inverse of H anywhere. Columns are taken from the last to the
//!   first, which is Babai's nearest plane algorithm on the lattice with Gram matrix H+λI.
//! - Since Err = E·R, Σ err² = tr(E(H+λI)Eᵀ): the layer's loss falls out of the loop.
//!
//! # Files
//! `scheme` what is asked for; `order` in which columns are taken; `factor` L in blocks;
//! `drift` and `correction` move weights towards the original model's outputs before they are rounded;
//! `awq` scales of inputs for weights that round better;
//! `rounding` the sweep over blocks, and plain rounding; `refit` scales fitted to the codes; `held` rows
//! that take no part in any of it, and `judge` who chooses by them; `stage` what the layers of one stage share; `rows` the
//! whole of it for some rows of one of them; `losses` what that cost; `exact` the same in plain f64, to read first.

pub mod awq;
pub mod correction;
pub mod drift;
pub mod exact;
pub mod factor;
pub mod held;
mod judge;
pub mod losses;
pub mod order;
mod refit;
mod rounding;
pub mod rows;
pub mod scheme;
pub mod stage;

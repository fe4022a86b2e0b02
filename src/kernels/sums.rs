//! What the CPU's products of few rows leave, on its way to the output.

use super::gemm::Target;
use crate::error::Result;
use crate::tensor::Tensor;

/// Outputs that lie together.
pub const TILE: usize = 32;

/// Sums [tiles, rows, TILE]: a task writes the tiles that it owns as one piece of memory.
pub struct Sums {
    pub values: Vec<f32>,
    n: usize,
    rows: usize,
}

impl Sums {
    pub fn new(n: usize, rows: usize) -> Self {
        Self { values: vec![0.0; n.div_ceil(TILE) * rows * TILE], n, rows }
    }

    /// y = sums (+ y if `add`) (+ bias).
    ///
    /// # Errors
    /// [`crate::error::Error::Internal`] for tensors that are not f32 of the host.
    pub fn store(&self, y: Target, bias: Option<&Tensor>, add: bool) -> Result<()> {
        let bias = bias.map(Tensor::f32s).transpose()?;
        let (offset, ld) = (y.offset, y.ld);
        let y = y.tensor.f32s_mut()?;
        for (tile, sums) in self.values.chunks_exact(self.rows * TILE).enumerate() {
            let first = tile * TILE;
            let width = TILE.min(self.n - first);
            for (row, sums) in sums.chunks_exact(TILE).enumerate() {
                let y = &mut y[offset + row * ld + first..][..width];
                for (lane, (y, sum)) in y.iter_mut().zip(sums).enumerate() {
                    let old = if add { *y } else { 0.0 };
                    *y = old + bias.map_or(0.0, |bias| bias[first + lane]) + sum;
                }
            }
        }
        Ok(())
    }
}

//! A symmetric matrix kept as its lower half in block columns: H += X·Xᵀ sums, and the reordered,
//! damped block columns that a Cholesky factorization starts from.
//!
//! Block columns keep every buffer far below WebGPU's binding limit: for n = 11008 the whole matrix
//! would be 485 MB, a block column of 512 is 22 MB at most.

use super::gemm::{Scaling, syrk_panel};
use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::Result;
use crate::tensor::{Elem, Tensor};

/// Columns in one stored panel.
pub const PANEL: usize = 512;

/// The lower half of a symmetric n × n matrix of f32; panel p holds rows p·512..n of columns
/// p·512..min((p+1)·512, n). What lies above the diagonal inside a panel is unspecified.
pub struct SymmetricPanels {
    pub n: usize,
    pub panels: Vec<Tensor>,
}

impl SymmetricPanels {
    pub fn zeros(device: &Device, n: usize) -> Result<Self> {
        let panels = (0..n.div_ceil(PANEL))
            .map(|p| Tensor::zeros(device, Elem::F32, &[n - p * PANEL, PANEL.min(n - p * PANEL)]))
            .collect::<Result<_>>()?;
        Ok(Self { n, panels })
    }

    /// H += scale · XᵀX for `x` [tokens, n].
    pub fn accumulate(&mut self, x: &Tensor, scale: f32) -> Result<()> {
        for (p, panel) in self.panels.iter_mut().enumerate() {
            syrk_panel(panel, x, p * PANEL, Scaling { alpha: scale, beta: 1.0 })?;
        }
        Ok(())
    }

    /// The diagonal, f32 [n] on the host.
    pub async fn diagonal(&self) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(self.n);
        for panel in &self.panels {
            values.extend(diagonal(panel)?.to_f32().await?);
        }
        Ok(values)
    }

    pub fn device(&self) -> &Device {
        self.panels[0].device()
    }
}

/// The diagonal of the top square of a panel [rows, w] → [w].
fn diagonal(panel: &Tensor) -> Result<Tensor> {
    let w = panel.cols();
    match panel.device().clone() {
        Device::Cpu => {
            let values = panel.f32s()?;
            Tensor::from_f32(panel.device(), &[w], (0..w).map(|i| values[i * w + i]).collect())
        }
        Device::Gpu(gpu) => gpu::diagonal(&gpu, panel),
    }
}

/// The block column c0..c1 of the matrix in another order, with another diagonal:
/// out[i − c0][j − c0] = H[order[i]][order[j]] for i > j, `diagonal[i]` for i = j.
///
/// `order` u32 [n], `diagonal` f32 [n] → f32 [n − c0, c1 − c0]; what lies above the diagonal is
/// filled symmetrically.
pub fn reordered(
    h: &SymmetricPanels,
    order: &Tensor,
    diagonal: &Tensor,
    c0: usize,
    c1: usize,
) -> Result<Tensor> {
    let mut out = Tensor::uninit(h.device(), Elem::F32, &[h.n - c0, c1 - c0])?;
    match h.device().clone() {
        Device::Cpu => {
            let (order, diagonal) = (order.u32s()?, diagonal.f32s()?);
            let (n, panels) = (h.n, h.panels.iter().map(Tensor::f32s).collect::<Result<Vec<_>>>()?);
            for_chunks(out.f32s_mut()?, c1 - c0, |row, out| {
                let i = c0 + row;
                for (j, out) in (c0..c1).zip(out) {
                    let (a, b) = (order[i] as usize, order[j] as usize);
                    let (low, high) = (a.min(b), a.max(b));
                    let p = low / PANEL;
                    let width = PANEL.min(n - p * PANEL);
                    *out = if i == j {
                        diagonal[i]
                    } else {
                        panels[p][(high - p * PANEL) * width + low - p * PANEL]
                    };
                }
            });
        }
        Device::Gpu(gpu) => gpu::reordered(&gpu, h, order, diagonal, c0, &mut out)?,
    }
    Ok(out)
}

mod gpu {
    use super::*;
    use crate::device::Gpu;
    use crate::error::Error;

    pub fn diagonal(_gpu: &Gpu, _panel: &Tensor) -> Result<Tensor> {
        Err(Error::Internal("diagonal has no GPU kernel yet".into()))
    }

    pub fn reordered(
        _gpu: &Gpu,
        _h: &SymmetricPanels,
        _order: &Tensor,
        _diagonal: &Tensor,
        _c0: usize,
        _out: &mut Tensor,
    ) -> Result<()> {
        Err(Error::Internal("reordered has no GPU kernel yet".into()))
    }
}

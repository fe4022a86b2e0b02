//! A symmetric matrix kept as its lower half in block columns: H += X·Xᵀ sums, and the reordered,
//! damped block columns that a Cholesky factorization starts from.
//!
//! Block columns keep every buffer far below WebGPU's binding limit: for n = 11008 the whole matrix
//! would be 485 MB, a block column of 512 is 22 MB at most.

use super::gemm::{Mat, Scaling, Target, gemm, syrk_panel};
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
///
/// # Errors
/// Those of the device.
pub fn diagonal(panel: &Tensor) -> Result<Tensor> {
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

/// out[:, at..] += factor·X·H[:, c0..c1] for X, `left` f32 [rows, n], with the block column c0..c1 of H in its
/// natural order as [`reordered`] gives it, `below`.
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn add_product(
    out: &mut Tensor,
    at: usize,
    left: &Tensor,
    h: &SymmetricPanels,
    below: &Tensor,
    c0: usize,
    factor: f32,
) -> Result<()> {
    let (rows, own) = (left.rows(), below.cols());
    let scaling = Scaling { alpha: factor, beta: 1.0 };
    let inside = Mat::of(left).part(0, c0, rows, own);
    gemm(Target::at(out, 0, at), inside, Mat::of(below).part(0, 0, own, own), scaling, None)?;
    add_outside(out, at, left, h, below, c0, scaling)
}

/// out += X·H[:, c0..c1] as [`add_product`], without the rows c0..c1 of H.
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn add_outer_product(
    out: &mut Tensor,
    left: &Tensor,
    h: &SymmetricPanels,
    below: &Tensor,
    c0: usize,
) -> Result<()> {
    add_outside(out, 0, left, h, below, c0, Scaling::ADD)
}

fn add_outside(
    out: &mut Tensor,
    at: usize,
    left: &Tensor,
    h: &SymmetricPanels,
    below: &Tensor,
    c0: usize,
    scaling: Scaling,
) -> Result<()> {
    let (rows, width) = (left.rows(), below.cols());
    let c1 = c0 + width;
    if c1 < h.n {
        let right = Mat::of(left).part(0, c1, rows, h.n - c1);
        gemm(Target::at(out, 0, at), right, Mat::of(below).part(width, 0, h.n - c1, width), scaling, None)?;
    }
    // What is above these rows lies across in the panels before.
    for (p, panel) in h.panels.iter().enumerate() {
        let first = p * PANEL;
        let columns = panel.cols().min(c0.saturating_sub(first));
        if columns > 0 {
            let before = Mat::of(left).part(0, first, rows, columns);
            let across = Mat::of(panel).part(c0 - first, 0, width, columns).t();
            gemm(Target::at(out, 0, at), before, across, scaling, None)?;
        }
    }
    Ok(())
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{ELEMENT, GROUP, ranges};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct DiagonalParams {
        w: u32,
    }

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct ReorderedParams {
        n: u32,
        c0: u32,
        width: u32,
        panel: u32,
        first: u32,
        end: u32,
    }

    const DIAGONAL: Kernel = Kernel {
        name: "symmetric_diagonal",
        source: include_str!("../../shaders/symmetric_diagonal.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// Panels that one dispatch reads; with three more buffers it binds seven of the eight that
    /// every device allows.
    const PANELS: usize = 4;

    const REORDERED: Kernel = Kernel {
        name: "symmetric_reordered",
        source: include_str!("../../shaders/symmetric_reordered.wgsl"),
        bindings: &[
            Access::Read,
            Access::Read,
            Access::Read,
            Access::Read,
            Access::Read,
            Access::Read,
            Access::ReadWrite,
        ],
    };

    pub const KERNELS: &[Registered] =
        &[(&DIAGONAL, size_of::<DiagonalParams>()), (&REORDERED, size_of::<ReorderedParams>())];

    pub fn diagonal(gpu: &Gpu, panel: &Tensor) -> Result<Tensor> {
        let w = panel.cols();
        let out = Tensor::uninit(panel.device(), Elem::F32, &[w])?;
        gpu.dispatch(
            &DIAGONAL,
            &[],
            &[panel.gpu()?, out.gpu()?],
            bytemuck::bytes_of(&DiagonalParams { w: w as u32 }),
            [w.div_ceil(GROUP) as u32, 1, 1],
            ELEMENT * w as f64,
        )?;
        Ok(out)
    }

    pub fn reordered(
        gpu: &Gpu,
        h: &SymmetricPanels,
        order: &Tensor,
        diagonal: &Tensor,
        c0: usize,
        out: &mut Tensor,
    ) -> Result<()> {
        let (order, diagonal) = (order.gpu()?, diagonal.gpu()?);
        for (index, panels) in h.panels.chunks(PANELS).enumerate() {
            // Where there are no four, the last stands in for those that are missing.
            let panel = |which: usize| panels[which.min(panels.len() - 1)].gpu();
            for part in ranges(gpu, out.len(), ELEMENT) {
                let params = ReorderedParams {
                    n: h.n as u32,
                    c0: c0 as u32,
                    width: out.cols() as u32,
                    panel: (index * PANELS) as u32,
                    first: part.start as u32,
                    end: part.end as u32,
                };
                gpu.dispatch(
                    &REORDERED,
                    &[("PANEL", PANEL as f64)],
                    &[panel(0)?, panel(1)?, panel(2)?, panel(3)?, order, diagonal, out.gpu()?],
                    bytemuck::bytes_of(&params),
                    gpu.unfold(part.len().div_ceil(GROUP)),
                    ELEMENT * part.len() as f64,
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    /// Element (i, j) of a symmetric matrix.
    fn element(values: &[f32], n: usize, i: usize, j: usize) -> f32 {
        values[i.max(j) * n + i.min(j)]
    }

    fn panels(device: &Device, values: &[f32], n: usize) -> SymmetricPanels {
        let panels = (0..n.div_ceil(PANEL))
            .map(|p| {
                let (start, end) = (p * PANEL, n.min((p + 1) * PANEL));
                // What lies above the diagonal must not matter.
                let content = (start..n)
                    .flat_map(|i| (start..end).map(move |j| (i, j)))
                    .map(|(i, j)| if i < j { f32::NAN } else { values[i * n + j] })
                    .collect();
                Tensor::from_f32(device, &[n - start, end - start], content).unwrap()
            })
            .collect();
        SymmetricPanels { n, panels }
    }

    #[test]
    fn both_devices_reorder_and_read_the_diagonal_exactly() {
        let gpu = test_gpu();
        // One panel; two, the second short; more than one dispatch reads.
        for n in [40, 700, 2300] {
            let values = noise(n * n, 1);
            let order: Vec<u32> = (0..n).map(|i| (i * 37 % n) as u32).rev().collect();
            let damped = noise(n, 2);
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let h = panels(device, &values, n);
                let diagonal = pollster::block_on(h.diagonal()).unwrap();
                assert!((0..n).all(|i| diagonal[i] == values[i * n + i]));
                if let Device::Gpu(gpu) = device {
                    gpu.set_submit_budget(30_000.0 * 64.0);
                }
                let order_tensor = Tensor::from_u32(device, &[n], order.clone()).unwrap();
                let damped_tensor = Tensor::from_f32(device, &[n], damped.clone()).unwrap();
                for (c0, c1) in [(0, 40), (n - 12, n), (n / 2 - 7, n / 2 + 13)] {
                    let out = reordered(&h, &order_tensor, &damped_tensor, c0, c1).unwrap();
                    assert_eq!(out.shape(), [n - c0, c1 - c0]);
                    let out = pollster::block_on(out.to_f32()).unwrap();
                    for (at, &got) in out.iter().enumerate() {
                        let (i, j) = (c0 + at / (c1 - c0), c0 + at % (c1 - c0));
                        let moved = element(&values, n, order[i] as usize, order[j] as usize);
                        let want = if i == j { damped[i] } else { moved };
                        assert_eq!(got, want, "{}: {n}, {i}, {j}", device.describe());
                    }
                }
            }
        }
    }
}

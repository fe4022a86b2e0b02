//! The GPU side of gemm: which kernel serves a product, and how it is cut into dispatches.

use super::{Mat, Scaling, Target};
use crate::device::{Access, Gpu, GpuBuffer, Kernel};
use crate::error::Result;
use crate::kernels::registry::Registered;
use crate::tensor::Tensor;

/// `GemmParams` of shaders/shared/gemm_params.wgsl; strides and offsets are in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub tiles_x: u32,
    pub a_offset: u32,
    pub a_row: u32,
    pub a_col: u32,
    pub b_offset: u32,
    pub b_row: u32,
    pub b_col: u32,
    pub c_offset: u32,
    pub c_row: u32,
    pub alpha: f32,
    pub beta: f32,
    pub has_bias: u32,
    pub lower: u32,
    pub row0: u32,
    pub col0: u32,
    pub group: u32,
    pub groups: u32,
    pub word_rows: u32,
}

/// A, B, bias, C.
const BINDINGS: &[Access] = &[Access::Read, Access::Read, Access::Read, Access::ReadWrite];

pub const ANY: Kernel =
    Kernel { name: "gemm_any", source: include_str!("../../../shaders/gemm_any.wgsl"), bindings: BINDINGS };
pub const REG: Kernel =
    Kernel { name: "gemm_reg", source: include_str!("../../../shaders/gemm_reg.wgsl"), bindings: BINDINGS };
pub const TILE: Kernel =
    Kernel { name: "gemm_tile", source: include_str!("../../../shaders/gemm_tile.wgsl"), bindings: BINDINGS };

/// A, words, grid, bias, C.
const PACKED_BINDINGS: &[Access] =
    &[Access::Read, Access::Read, Access::Read, Access::Read, Access::ReadWrite];

/// The same for packed weights.
pub const PACKED_REG: Kernel = Kernel {
    name: "qgemm_reg",
    source: include_str!("../../../shaders/qgemm_reg.wgsl"),
    bindings: PACKED_BINDINGS,
};
pub const PACKED_TILE: Kernel = Kernel {
    name: "qgemm_tile",
    source: include_str!("../../../shaders/qgemm_tile.wgsl"),
    bindings: PACKED_BINDINGS,
};

/// For [`crate::kernels::registry`].
pub const KERNELS: &[Registered] = &[
    (&ANY, size_of::<Params>()),
    (&REG, size_of::<Params>()),
    (&TILE, size_of::<Params>()),
    (&PACKED_REG, size_of::<Params>()),
    (&PACKED_TILE, size_of::<Params>()),
];

/// One way to multiply matrices whose stored rows are aligned to four elements.
pub struct Variant {
    pub name: &'static str,
    kernel: &'static Kernel,
    /// Its form for packed weights.
    packed: &'static Kernel,
    constants: &'static [(&'static str, f64)],
    /// Outputs of one workgroup, in either direction.
    tile: usize,
}

/// All of them compute the same; [`super::tune`] finds the fastest.
pub const VARIANTS: &[Variant] = &[
    Variant { name: "registers", kernel: &REG, packed: &PACKED_REG, constants: &[], tile: 64 },
    Variant {
        name: "tile 64",
        kernel: &TILE,
        packed: &PACKED_TILE,
        constants: &[("THREADS", 8.0), ("DEPTH", 16.0)],
        tile: 64,
    },
    Variant {
        name: "tile 128",
        kernel: &TILE,
        packed: &PACKED_TILE,
        constants: &[("THREADS", 16.0), ("DEPTH", 16.0)],
        tile: 128,
    },
];

const UNALIGNED: Variant =
    Variant { name: "any", kernel: &ANY, packed: &PACKED_REG, constants: &[], tile: 32 };

/// Before anything is measured: barriers are slow where they are emulated, and pay elsewhere.
pub fn variant(gpu: &Gpu) -> &'static Variant {
    let guess = usize::from(!gpu.summary().software);
    let choice = gpu.tuned(super::CHOICE).map_or(guess, |index| index as usize);
    VARIANTS.get(choice).unwrap_or(&VARIANTS[guess])
}

pub fn gemm(
    gpu: &Gpu,
    c: Target,
    a: Mat,
    b: Mat,
    scaling: Scaling,
    bias: Option<&Tensor>,
    lower: bool,
) -> Result<()> {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let aligned = |mat: Mat| mat.offset.is_multiple_of(4) && mat.ld.is_multiple_of(4);
    let variant = if aligned(a) && aligned(b) { variant(gpu) } else { &UNALIGNED };
    let mut constants = vec![("ELEM", b.tensor.elem().shader_constant())];
    if aligned(a) && aligned(b) {
        constants.push(("A_TRANSPOSED", a.transposed.into()));
        constants.push(("B_TRANSPOSED", b.transposed.into()));
    }
    constants.extend_from_slice(variant.constants);

    let strides = |mat: Mat| if mat.transposed { (1, mat.ld) } else { (mat.ld, 1) };
    let ((a_row, a_col), (b_row, b_col)) = (strides(a), strides(b));
    let a_buffer = a.tensor.gpu()?;
    // A kernel that reads no bias must have something bound in its place.
    let bias_buffer = bias.map_or(Ok(a_buffer), Tensor::gpu)?;
    let buffers = [a_buffer, b.tensor.gpu()?, bias_buffer, c.tensor.gpu()?];

    let params = Params {
        m: m as u32,
        n: n as u32,
        k: k as u32,
        a_offset: a.offset as u32,
        a_row: a_row as u32,
        a_col: a_col as u32,
        b_offset: b.offset as u32,
        b_row: b_row as u32,
        b_col: b_col as u32,
        c_offset: c.offset as u32,
        c_row: c.ld as u32,
        alpha: scaling.alpha,
        beta: scaling.beta,
        has_bias: bias.is_some().into(),
        lower: lower.into(),
        ..Params::default()
    };
    in_parts(gpu, variant.kernel, variant.tile, &constants, &buffers, params)
}

/// Records the dispatches of a product, whose parameters are given as if it were one.
fn in_parts(
    gpu: &Gpu,
    kernel: &Kernel,
    tile: usize,
    constants: &[(&str, f64)],
    buffers: &[&GpuBuffer],
    whole: Params,
) -> Result<()> {
    let (m, n, k) = (whole.m as usize, whole.n as usize, whole.k as usize);
    let (rows, cols) = part_of_budget(gpu.submit_budget(), m, n, k, tile);
    for row in (0..m).step_by(rows) {
        for col in (0..n).step_by(cols) {
            let (part_m, part_n) = (rows.min(m - row), cols.min(n - col));
            if whole.lower != 0 && row + part_m <= col {
                continue;
            }
            let (tiles_y, tiles_x) = (part_m.div_ceil(tile), part_n.div_ceil(tile));
            let params = Params {
                m: part_m as u32,
                n: part_n as u32,
                tiles_x: tiles_x as u32,
                a_offset: whole.a_offset + row as u32 * whole.a_row,
                b_offset: whole.b_offset + col as u32 * whole.b_col,
                c_offset: whole.c_offset + row as u32 * whole.c_row + col as u32,
                row0: row as u32,
                col0: col as u32,
                ..whole
            };
            gpu.dispatch(
                kernel,
                constants,
                buffers,
                bytemuck::bytes_of(&params),
                gpu.unfold(tiles_x * tiles_y),
                flops(part_m, part_n, k),
            )?;
        }
    }
    Ok(())
}

impl Variant {
    /// The product of a packed weight; `buffers` are A, words, grid, bias and C.
    pub fn packed(
        &self,
        gpu: &Gpu,
        constants: &[(&str, f64)],
        buffers: &[&GpuBuffer],
        params: Params,
    ) -> Result<()> {
        let all = [self.constants, constants].concat();
        in_parts(gpu, self.packed, self.tile, &all, buffers, params)
    }
}

fn flops(m: usize, n: usize, k: usize) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

/// How many rows and columns one dispatch may compute: whole tiles, all columns if a row of tiles
/// is not too much, and at least one tile.
fn part_of_budget(budget: f64, m: usize, n: usize, k: usize, tile: usize) -> (usize, usize) {
    let tiles = ((budget / flops(tile, tile, k.max(1))) as usize).max(1);
    let tiles_x = n.div_ceil(tile).max(1);
    let cols = tiles.min(tiles_x);
    let rows = (tiles / tiles_x).clamp(1, m.div_ceil(tile).max(1));
    (rows * tile, cols * tile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_is_cut_into_whole_tiles_within_the_budget() {
        let tile = flops(64, 64, 100);
        assert_eq!(part_of_budget(1e18, 300, 130, 100, 64), (320, 192));
        assert_eq!(part_of_budget(7.0 * tile, 300, 130, 100, 64), (128, 192));
        assert_eq!(part_of_budget(2.0 * tile, 300, 130, 100, 64), (64, 128));
        assert_eq!(part_of_budget(0.0, 300, 130, 100, 64), (64, 64));
        assert_eq!(part_of_budget(1.0, 1, 1, 0, 64), (64, 64));
    }
}

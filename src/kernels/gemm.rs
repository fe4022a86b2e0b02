//! Matrix products: C = α·op(A)·op(B) + β·C (+ bias), with any leading dimension.
//!
//! Three of the four transpositions occur: rows × rows (`A·Bᵀ`, every linear layer and Cholesky),
//! plain (`A·B`, the sweep's compensation), columns × columns (`Aᵀ·B`, the Hessian). B may be a
//! weight as stored in a checkpoint, f16 or bf16; products and sums are f32.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef};

use super::parallel::{faer_par, for_chunks};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

/// A matrix inside a tensor: `rows × cols` as it takes part in the product, that is after
/// transposition.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    pub tensor: &'a Tensor,
    /// Elements before the first one.
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    /// Elements from one stored row to the next.
    pub ld: usize,
    /// Stored as [cols, rows].
    pub transposed: bool,
}

impl<'a> Mat<'a> {
    /// The whole tensor, [rows, cols].
    pub fn of(tensor: &'a Tensor) -> Self {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        Self { tensor, offset: 0, rows, cols, ld: cols, transposed: false }
    }

    /// The part that starts at stored row `row` and column `col`, of stored size `rows × cols`.
    /// Call before [`Mat::t`].
    pub fn part(self, row: usize, col: usize, rows: usize, cols: usize) -> Self {
        debug_assert!(!self.transposed && row + rows <= self.rows && col + cols <= self.cols);
        Self { offset: self.offset + row * self.ld + col, rows, cols, ..self }
    }

    /// The transpose of this matrix.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    fn check(&self, name: &str) -> Result<()> {
        let (stored_rows, stored_cols) =
            if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        let end = if stored_rows == 0 { 0 } else { self.offset + (stored_rows - 1) * self.ld + stored_cols };
        if stored_cols > self.ld || end > self.tensor.len() {
            return Err(Error::Internal(format!("gemm: {name} reaches past its tensor")));
        }
        Ok(())
    }
}

/// Where a product goes: rows `row..`, columns `col..` of a [rows, cols] tensor of f32.
pub struct Target<'a> {
    pub tensor: &'a mut Tensor,
    pub offset: usize,
    pub ld: usize,
}

impl<'a> Target<'a> {
    pub fn of(tensor: &'a mut Tensor) -> Self {
        let ld = tensor.cols();
        Self { tensor, offset: 0, ld }
    }

    pub fn at(tensor: &'a mut Tensor, row: usize, col: usize) -> Self {
        let ld = tensor.cols();
        Self { tensor, offset: row * ld + col, ld }
    }
}

/// What a product does to what is there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scaling {
    pub alpha: f32,
    /// 0 overwrites (whatever was there), 1 adds.
    pub beta: f32,
}

impl Scaling {
    pub const SET: Self = Self { alpha: 1.0, beta: 0.0 };
    pub const ADD: Self = Self { alpha: 1.0, beta: 1.0 };
    pub const SUB: Self = Self { alpha: -1.0, beta: 1.0 };
}

/// C = α·A·B + β·C (+ bias on every row). A and C are f32; B is f32, f16 or bf16.
///
/// # Errors
/// [`Error::Internal`] when the shapes do not fit.
pub fn gemm(c: Target, a: Mat, b: Mat, scaling: Scaling, bias: Option<&Tensor>) -> Result<()> {
    a.check("A")?;
    b.check("B")?;
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let c_end = if m == 0 { 0 } else { c.offset + (m - 1) * c.ld + n };
    if b.rows != k || n > c.ld || c_end > c.tensor.len() || bias.is_some_and(|bias| bias.len() != n) {
        return Err(Error::Internal(format!("gemm: {m}×{k} times {}×{n} does not fit", b.rows)));
    }
    match c.tensor.device().clone() {
        Device::Cpu => cpu(c, a, b, scaling, bias),
        Device::Gpu(gpu) => gpu::gemm(&gpu, c, a, b, scaling, bias),
    }
}

/// Y = X·Wᵀ (+ bias), the linear layer: X [tokens, in], W [out, in] → Y [tokens, out].
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut y = Tensor::uninit(x.device(), Elem::F32, &[x.rows(), weight.rows()])?;
    gemm(Target::of(&mut y), Mat::of(x), Mat::of(weight).t(), Scaling::SET, bias)?;
    Ok(y)
}

fn cpu(c: Target, a: Mat, b: Mat, scaling: Scaling, bias: Option<&Tensor>) -> Result<()> {
    let (m, n) = (a.rows, b.cols);
    if m == 0 || n == 0 {
        return Ok(());
    }
    let bias = bias.map(Tensor::f32s).transpose()?;
    let widened;
    let b_values = match b.tensor.host_data()? {
        Host::F32(values) => &values[b.offset..],
        packed => {
            widened = widen(packed, b)?;
            &widened
        }
    };
    let b_ld = if b.tensor.elem() == Elem::F32 {
        b.ld
    } else if b.transposed {
        b.rows
    } else {
        b.cols
    };
    let a_values = &a.tensor.f32s()?[a.offset..];
    let c_values = &mut c.tensor.f32s_mut()?[c.offset..];
    if let Some(bias) = bias {
        for row in c_values.chunks_mut(c.ld).take(m) {
            for (value, bias) in row[..n].iter_mut().zip(bias) {
                *value = *value * scaling.beta + bias;
            }
        }
    }
    let accum = if bias.is_some() || scaling.beta != 0.0 { Accum::Add } else { Accum::Replace };
    matmul(
        dense_mut(c_values, m, n, c.ld),
        accum,
        dense(a_values, a),
        dense(b_values, Mat { ld: b_ld, ..b }),
        scaling.alpha,
        faer_par(),
    );
    Ok(())
}

fn dense<'a>(values: &'a [f32], mat: Mat) -> MatRef<'a, f32> {
    if mat.transposed {
        MatRef::from_row_major_slice_with_stride(values, mat.cols, mat.rows, mat.ld).transpose()
    } else {
        MatRef::from_row_major_slice_with_stride(values, mat.rows, mat.cols, mat.ld)
    }
}

/// By way of the transpose: `from_row_major_slice_with_stride_mut` of faer 0.24.4 swaps the strides
/// and then writes outside of the slice.
fn dense_mut(values: &mut [f32], rows: usize, cols: usize, ld: usize) -> MatMut<'_, f32> {
    MatMut::from_column_major_slice_with_stride_mut(values, cols, rows, ld).transpose_mut()
}

/// The stored matrix of 16-bit floats as dense f32 rows.
fn widen(packed: &Host, b: Mat) -> Result<Vec<f32>> {
    let (rows, cols) = if b.transposed { (b.cols, b.rows) } else { (b.rows, b.cols) };
    let mut wide = vec![0f32; rows * cols];
    for_chunks(&mut wide, cols, |row, out| {
        let at = b.offset + row * b.ld;
        match packed {
            Host::BF16(values) => {
                for (out, x) in out.iter_mut().zip(&values[at..at + cols]) {
                    *out = f32::from_bits(u32::from(x.to_bits()) << 16);
                }
            }
            Host::F16(values) => {
                use half::slice::HalfFloatSliceExt;
                values[at..at + cols].convert_to_f32_slice(out);
            }
            Host::F32(_) | Host::U32(_) | Host::U8(_) => {}
        }
    });
    match packed {
        Host::BF16(_) | Host::F16(_) => Ok(wide),
        _ => Err(Error::Internal("gemm: B must hold floats".into())),
    }
}

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};

    /// `GemmParams` of shaders/shared/gemm_params.wgsl; strides and offsets are in elements.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    pub struct Params {
        m: u32,
        n: u32,
        k: u32,
        tiles_x: u32,
        a_offset: u32,
        a_row: u32,
        a_col: u32,
        b_offset: u32,
        b_row: u32,
        b_col: u32,
        c_offset: u32,
        c_row: u32,
        alpha: f32,
        beta: f32,
        has_bias: u32,
        lower: u32,
        row0: u32,
        pad: [u32; 3],
    }

    const ANY: Kernel = Kernel {
        name: "gemm_any",
        source: include_str!("../../shaders/gemm_any.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::Read, Access::ReadWrite],
    };

    pub fn gemm(gpu: &Gpu, c: Target, a: Mat, b: Mat, scaling: Scaling, bias: Option<&Tensor>) -> Result<()> {
        let (m, n, k) = (a.rows, b.cols, a.cols);
        let strides = |mat: Mat| if mat.transposed { (1, mat.ld) } else { (mat.ld, 1) };
        let ((a_row, a_col), (b_row, b_col)) = (strides(a), strides(b));
        let tile = 32;
        let (tiles_y, tiles_x) = (m.div_ceil(tile), n.div_ceil(tile));
        let params = Params {
            m: m as u32,
            n: n as u32,
            k: k as u32,
            tiles_x: tiles_x as u32,
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
            lower: 0,
            row0: 0,
            pad: [0; 3],
        };
        let a_buffer = a.tensor.gpu()?;
        let buffers = [a_buffer, b.tensor.gpu()?, bias.map_or(Ok(a_buffer), Tensor::gpu)?, c.tensor.gpu()?];
        gpu.dispatch(
            &ANY,
            &[("ELEM", b.tensor.elem().shader_constant())],
            &buffers,
            bytemuck::bytes_of(&params),
            gpu.unfold(tiles_x * tiles_y),
            2.0 * m as f64 * n as f64 * k as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    fn naive(a: &[f32], b: &[f32], m: usize, n: usize, k: usize) -> Vec<f32> {
        let mut c = vec![0f32; m * n];
        for i in 0..m {
            for j in 0..n {
                c[i * n + j] =
                    (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum::<f64>() as f32;
            }
        }
        c
    }

    fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
        (0..rows * cols).map(|i| x[(i % rows) * cols + i / rows]).collect()
    }

    #[test]
    fn the_cpu_twin_agrees_with_the_definition_in_every_transposition() {
        let (m, n, k) = (13, 20, 24);
        let (a, b) = (noise(m * k, 1), noise(k * n, 2));
        let want = naive(&a, &b, m, n, k);
        for (ta, tb) in [(false, false), (false, true), (true, false)] {
            let stored_a = if ta { transpose(&a, m, k) } else { a.clone() };
            let stored_b = if tb { transpose(&b, k, n) } else { b.clone() };
            let shape = |t, r, c| if t { [c, r] } else { [r, c] };
            let a = Tensor::from_f32(&Device::Cpu, &shape(ta, m, k), stored_a).unwrap();
            let b = Tensor::from_f32(&Device::Cpu, &shape(tb, k, n), stored_b).unwrap();
            let (a, b) = (Mat::of(&a), Mat::of(&b));
            let (a, b) = (if ta { a.t() } else { a }, if tb { b.t() } else { b });
            let mut c = Tensor::zeros(&Device::Cpu, Elem::F32, &[m, n]).unwrap();
            gemm(Target::of(&mut c), a, b, Scaling::SET, None).unwrap();
            assert!(relative_error(c.f32s().unwrap(), &want) < 1e-6);
            gemm(Target::of(&mut c), a, b, Scaling::SUB, None).unwrap();
            assert!(c.f32s().unwrap().iter().all(|x| x.abs() < 1e-5));
        }
    }

    #[test]
    fn the_gpu_agrees_with_the_cpu_twin() {
        let Some(gpu) = test_gpu() else { return };
        for (ta, tb) in [(false, false), (false, true), (true, false)] {
            for (m, n, k) in [(1, 1, 1), (13, 20, 24), (64, 64, 64), (33, 7, 30), (70, 130, 96)] {
                let shape = |t, r, c| if t { [c, r] } else { [r, c] };
                let run = |device: &Device| {
                    let a = Tensor::from_f32(device, &shape(ta, m, k), noise(m * k, 1)).unwrap();
                    let b = Tensor::from_f32(device, &shape(tb, k, n), noise(k * n, 2)).unwrap();
                    let mut c = Tensor::zeros(device, Elem::F32, &[m, n]).unwrap();
                    let (a, b) = (Mat::of(&a), Mat::of(&b));
                    let (a, b) = (if ta { a.t() } else { a }, if tb { b.t() } else { b });
                    gemm(Target::of(&mut c), a, b, Scaling::SET, None).unwrap();
                    pollster::block_on(c.to_f32()).unwrap()
                };
                let error = relative_error(&run(&gpu), &run(&Device::Cpu));
                assert!(error < 1e-5, "{m}×{n}×{k} {ta} {tb}: {error}");
            }
        }
    }
}

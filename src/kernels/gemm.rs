//! Matrix products: C = α·op(A)·op(B) + β·C (+ bias), with any leading dimension.
//!
//! Three of the four transpositions occur: rows × rows (`A·Bᵀ`, every linear layer and Cholesky),
//! plain (`A·B`, the sweep's compensation), columns × columns (`Aᵀ·B`, the Hessian). B may be a
//! weight as stored in a checkpoint, f16 or bf16; products and sums are f32.

use super::matmul::{Product, Strided, Values, matmul};
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
    let product = Product {
        m: a.rows,
        n: b.cols,
        k: a.cols,
        a: strided(a)?,
        b: strided(b)?,
        alpha: scaling.alpha,
        beta: scaling.beta,
        bias: bias.map(Tensor::f32s).transpose()?,
        lower: false,
        parallel: true,
    };
    matmul(&mut c.tensor.f32s_mut()?[c.offset..], c.ld, product);
    Ok(())
}

fn strided<'a>(mat: Mat<'a>) -> Result<Strided<'a>> {
    let values = match mat.tensor.host_data()? {
        Host::F32(v) => Values::F32(&v[mat.offset..]),
        Host::F16(v) => Values::F16(&v[mat.offset..]),
        Host::BF16(v) => Values::BF16(&v[mat.offset..]),
        Host::U32(_) | Host::U8(_) => return Err(Error::Internal("gemm: operands must be floats".into())),
    };
    let (row, col) = if mat.transposed { (1, mat.ld) } else { (mat.ld, 1) };
    Ok(Strided { values, row, col })
}

mod gpu {
    use super::*;
    use crate::device::Gpu;

    pub fn gemm(
        _gpu: &Gpu,
        _c: Target,
        _a: Mat,
        _b: Mat,
        _scaling: Scaling,
        _bias: Option<&Tensor>,
    ) -> Result<()> {
        Err(Error::Internal("gemm has no GPU kernel yet".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error};

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
}

pub fn syrk_panel(panel: &mut Tensor, x: &Tensor, c0: usize, scaling: Scaling) -> Result<()> {
    let (t, n, w) = (x.rows(), x.cols(), panel.cols());
    let x = Mat::of(x);
    gemm(Target::of(panel), x.part(0, c0, t, n - c0).t(), x.part(0, c0, t, w), scaling, None)
}

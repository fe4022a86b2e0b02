//! Columns of a weight in another order, widened to f32: out[r][j] = w[r][columns[j]].

use half::slice::HalfFloatSliceExt;

use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

/// In place of a column number: a column of zeros, for inputs that are never active.
pub const ZERO_COLUMN: u32 = u32::MAX;

/// `w` [rows, n] of f32, f16 or bf16, `columns` u32 [m] → f32 [rows, m].
///
/// # Errors
/// [`Error::Internal`] when `w` does not hold floats.
pub fn gather(w: &Tensor, columns: &Tensor) -> Result<Tensor> {
    let mut out = Tensor::uninit(w.device(), Elem::F32, &[w.rows(), columns.len()])?;
    match w.device().clone() {
        Device::Cpu => cpu(w, columns.u32s()?, &mut out)?,
        Device::Gpu(gpu) => gpu::gather(&gpu, w, columns, &mut out)?,
    }
    Ok(out)
}

/// All columns as they are, widened to f32.
///
/// # Errors
/// As [`gather`].
pub fn copy(w: &Tensor) -> Result<Tensor> {
    let n = w.cols();
    gather(w, &Tensor::from_u32(w.device(), &[n], (0..n as u32).collect())?)
}

fn cpu(w: &Tensor, columns: &[u32], out: &mut Tensor) -> Result<()> {
    let n = w.cols();
    if columns.iter().any(|&c| c != ZERO_COLUMN && c as usize >= n) {
        return Err(Error::Internal("columns: a column number is out of range".into()));
    }
    // The first columns in their own order are whole runs of memory.
    let natural = columns.iter().enumerate().all(|(j, &column)| column as usize == j);
    let out = out.f32s_mut()?;
    match w.host_data()? {
        Host::F32(v) if natural => {
            for_chunks(out, columns.len(), |row, out| out.copy_from_slice(&v[row * n..][..out.len()]))
        }
        Host::F16(v) if natural => {
            for_chunks(out, columns.len(), |row, out| v[row * n..][..out.len()].convert_to_f32_slice(out));
        }
        Host::BF16(v) if natural => {
            for_chunks(out, columns.len(), |row, out| v[row * n..][..out.len()].convert_to_f32_slice(out));
        }
        Host::F32(v) => pick(out, columns, n, |at| v[at]),
        Host::F16(v) => pick(out, columns, n, |at| v[at].to_f32()),
        Host::BF16(v) => pick(out, columns, n, |at| v[at].to_f32()),
        Host::U32(_) | Host::U8(_) => return Err(Error::Internal("columns: not a weight".into())),
    }
    Ok(())
}

fn pick(out: &mut [f32], columns: &[u32], n: usize, at: impl Fn(usize) -> f32 + Sync) {
    for_chunks(out, columns.len(), |row, out| {
        for (out, &column) in out.iter_mut().zip(columns) {
            *out = if column == ZERO_COLUMN { 0.0 } else { at(row * n + column as usize) };
        }
    });
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{ELEMENT, GROUP, ranges};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        n: u32,
        m: u32,
        first: u32,
        end: u32,
    }

    const COLUMNS: Kernel = Kernel {
        name: "columns",
        source: include_str!("../../shaders/columns.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::ReadWrite],
    };

    pub const KERNELS: &[Registered] = &[(&COLUMNS, size_of::<Params>())];

    pub fn gather(gpu: &Gpu, w: &Tensor, columns: &Tensor, out: &mut Tensor) -> Result<()> {
        if !matches!(w.elem(), Elem::F32 | Elem::F16 | Elem::BF16) {
            return Err(Error::Internal("columns: not a weight".into()));
        }
        for part in ranges(gpu, out.len(), ELEMENT) {
            let params = Params {
                n: w.cols() as u32,
                m: columns.len() as u32,
                first: part.start as u32,
                end: part.end as u32,
            };
            gpu.dispatch(
                &COLUMNS,
                &[("ELEM", w.elem().shader_constant())],
                &[w.gpu()?, columns.gpu()?, out.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold(part.len().div_ceil(GROUP)),
                ELEMENT * part.len() as f64,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    #[test]
    fn columns_of_every_type_are_gathered_alike_on_both_devices() {
        let gpu = test_gpu();
        let (rows, n) = (7, 13);
        let values = noise(rows * n, 1);
        let mixed = vec![12, 0, ZERO_COLUMN, 5, 5, 11, 1, ZERO_COLUMN, 3];
        // Columns from the first on in their own order are copied as they lie.
        let lists = [mixed, (0..n as u32).collect(), (0..5).collect()];
        let elems = [Elem::F32, Elem::F16, Elem::BF16];
        for (columns, elem) in lists.iter().flat_map(|list| elems.map(|elem| (list, elem))) {
            let (bytes, wide): (Vec<u8>, Vec<f32>) = match elem {
                Elem::F16 => {
                    let packed: Vec<_> = values.iter().map(|&x| f16::from_f32(x)).collect();
                    (bytemuck::cast_slice(&packed).to_vec(), packed.iter().map(|x| x.to_f32()).collect())
                }
                Elem::BF16 => {
                    let packed: Vec<_> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                    (bytemuck::cast_slice(&packed).to_vec(), packed.iter().map(|x| x.to_f32()).collect())
                }
                _ => (bytemuck::cast_slice(&values).to_vec(), values.clone()),
            };
            let want: Vec<f32> = (0..rows)
                .flat_map(|row| {
                    let wide = &wide[row * n..];
                    columns.iter().map(|&c| if c == ZERO_COLUMN { 0.0 } else { wide[c as usize] })
                })
                .collect();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                // The second time in many dispatches.
                for budget in [1e9, 10.0 * 64.0] {
                    if let Device::Gpu(gpu) = device {
                        gpu.set_submit_budget(budget);
                    }
                    let w = Tensor::from_bytes(device, elem, &[rows, n], &bytes).unwrap();
                    let columns = Tensor::from_u32(device, &[columns.len()], columns.clone()).unwrap();
                    let got = gather(&w, &columns).unwrap();
                    assert_eq!(got.shape(), [rows, columns.len()]);
                    assert_eq!(pollster::block_on(got.to_f32()).unwrap(), want);
                }
            }
        }
    }

    #[test]
    fn more_workgroups_than_one_dimension_holds() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        gpu.set_submit_budget(1e12);
        let rows = 1_050_000;
        assert!(4 * rows > 65_535 * 64);
        let w = Tensor::from_f32(&device, &[rows, 1], (0..rows).map(|row| row as f32).collect()).unwrap();
        let columns = Tensor::from_u32(&device, &[4], vec![0, ZERO_COLUMN, 0, 0]).unwrap();
        let got = pollster::block_on(gather(&w, &columns).unwrap().to_f32()).unwrap();
        let right = |(row, got): (usize, &[f32])| got == [row as f32, 0.0, row as f32, row as f32];
        assert!(got.chunks(4).enumerate().all(right));
    }

    #[test]
    fn what_holds_no_floats_is_refused() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let codes = Tensor::zeros(device, Elem::U8, &[2, 4]).unwrap();
            let columns = Tensor::from_u32(device, &[1], vec![0]).unwrap();
            assert!(gather(&codes, &columns).is_err());
        }
    }
}

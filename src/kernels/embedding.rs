//! Rows of the embedding table, by token id.

use half::slice::HalfFloatSliceExt;

use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

/// Tokens per piece of parallel work.
const PIECE: usize = 32;

/// Row `ids[i]` of the table as row i of the result [tokens, d] in f32. The table [vocab, d] is
/// f32, f16 or bf16 and comes as consecutive row chunks, because a whole one may be larger than a
/// binding.
///
/// # Errors
/// [`Error::Text`] when an id is not below vocab; [`Error::Internal`] when the chunks do not fit
/// together.
pub fn gather(table: &[&Tensor], ids: &[u32]) -> Result<Tensor> {
    let first = table.first().ok_or_else(|| Error::Internal("embedding: no table".into()))?;
    let (device, cols, elem) = (first.device(), first.cols(), first.elem());
    let alike = |t: &&Tensor| t.cols() == cols && t.elem() == elem && t.device().same(device);
    if cols == 0 || !table.iter().all(alike) {
        return Err(Error::Internal("embedding: chunks of different kinds".into()));
    }
    let vocab: usize = table.iter().map(|chunk| chunk.rows()).sum();
    if let Some(position) = ids.iter().position(|&id| id as usize >= vocab) {
        return Err(Error::text(
            format!("token {position}"),
            format!("id {} is not below the vocabulary size {vocab}", ids[position]),
            "Use the tokenizer that belongs to the model",
        ));
    }
    let mut rows = Tensor::uninit(device, Elem::F32, &[ids.len(), cols])?;
    match device {
        Device::Cpu => cpu(&mut rows, table, ids)?,
        Device::Gpu(gpu) => gpu::gather(gpu, &rows, table, ids)?,
    }
    Ok(rows)
}

fn cpu(rows: &mut Tensor, table: &[&Tensor], ids: &[u32]) -> Result<()> {
    let cols = rows.cols();
    let mut chunks = Vec::with_capacity(table.len());
    for chunk in table {
        let data = chunk.host_data()?;
        if matches!(data, Host::U32(_) | Host::U8(_)) {
            return Err(Error::Internal("embedding: the table must hold floats".into()));
        }
        chunks.push((chunk.rows(), data));
    }
    for_chunks(rows.f32s_mut()?, PIECE * cols, |piece, out| {
        for (out, &id) in out.chunks_mut(cols).zip(&ids[piece * PIECE..]) {
            let mut row = id as usize;
            for (count, data) in &chunks {
                if row >= *count {
                    row -= count;
                    continue;
                }
                let range = row * cols..(row + 1) * cols;
                match data {
                    Host::F32(values) => out.copy_from_slice(&values[range]),
                    Host::F16(values) => values[range].convert_to_f32_slice(out),
                    Host::BF16(values) => values[range].convert_to_f32_slice(out),
                    Host::U32(_) | Host::U8(_) => {}
                }
                break;
            }
        }
    });
    Ok(())
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{GROUP, whole_quads};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        tokens: u32,
        row_quads: u32,
        first: u32,
        count: u32,
    }

    const EMBEDDING: Kernel = Kernel {
        name: "embedding",
        source: include_str!("../../shaders/embedding.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&EMBEDDING, size_of::<Params>())];

    pub fn gather(gpu: &Gpu, rows: &Tensor, table: &[&Tensor], ids: &[u32]) -> Result<()> {
        let row_quads = whole_quads("embedding", "row", rows.cols(), 4)?;
        let id_buffer = Tensor::from_u32(rows.device(), &[ids.len()], ids.to_vec())?;
        let mut first = 0;
        for chunk in table {
            let count = chunk.rows() as u32;
            let params = Params { tokens: ids.len() as u32, row_quads, first, count };
            gpu.dispatch(
                &EMBEDDING,
                &[("ELEM", chunk.elem().shader_constant())],
                &[chunk.gpu()?, id_buffer.gpu()?, rows.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold((rows.len() / 4).div_ceil(GROUP)),
                rows.len() as f64,
            )?;
            first += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    /// A table of 10 rows of 8 in chunks of 4, 4 and 2 rows, and its values.
    fn table(device: &Device, elem: Elem) -> (Vec<Tensor>, Vec<f32>) {
        let values = noise(80, 1);
        let (bytes, values): (Vec<u8>, Vec<f32>) = match elem {
            Elem::F16 => {
                let packed: Vec<_> = values.iter().map(|&x| half::f16::from_f32(x)).collect();
                (bytemuck::cast_slice(&packed).to_vec(), packed.iter().map(|x| x.to_f32()).collect())
            }
            Elem::BF16 => {
                let packed: Vec<_> = values.iter().map(|&x| half::bf16::from_f32(x)).collect();
                (bytemuck::cast_slice(&packed).to_vec(), packed.iter().map(|x| x.to_f32()).collect())
            }
            _ => (bytemuck::cast_slice(&values).to_vec(), values),
        };
        let chunks = bytes
            .chunks(4 * 8 * elem.bytes())
            .map(|chunk| {
                Tensor::from_bytes(device, elem, &[chunk.len() / 8 / elem.bytes(), 8], chunk).unwrap()
            })
            .collect();
        (chunks, values)
    }

    fn check(device: &Device) {
        let ids = [9, 0, 3, 4, 7, 8, 3];
        for elem in [Elem::F32, Elem::F16, Elem::BF16] {
            let (chunks, values) = table(device, elem);
            let want: Vec<f32> = ids.iter().flat_map(|&id| values[id * 8..][..8].to_vec()).collect();
            let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
            let got = gather(&chunks.iter().collect::<Vec<_>>(), &ids).unwrap();
            assert_eq!(got.shape(), [7, 8]);
            assert_eq!(pollster::block_on(got.to_f32()).unwrap(), want);
        }
    }

    #[test]
    fn both_devices_find_rows_in_every_chunk() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            check(device);
        }
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_refused_by_number() {
        let (chunks, _) = table(&Device::Cpu, Elem::F32);
        let error = gather(&chunks.iter().collect::<Vec<_>>(), &[1, 10]).err().unwrap().to_string();
        assert!(error.contains("token 1: id 10 is not below the vocabulary size 10"), "{error}");
    }
}

//! Rotary position embedding, in the half-split form of Hugging Face: elements i and i + d/2 of a
//! head are the pair that is turned by position · inv_freq[i].
//! (Su et al. 2021, arXiv 2104.09864.)

use super::parallel::for_chunks;
use super::simd::multiversion;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Tokens per piece of parallel work.
const PIECE: usize = 16;

/// Cosines and sines for positions 0, 1, …, made once and used by every layer.
pub struct RopeTable {
    /// [positions, head_dim]: head_dim/2 cosines, then as many sines.
    table: Tensor,
}

impl RopeTable {
    /// Computed in f64 from `inv_freq` (radians per position, head_dim/2 of them); `magnitude`
    /// multiplies every entry (the attention factor of YaRN, else 1). A frequency of 0 leaves its pair as it is.
    pub fn new(device: &Device, inv_freq: &[f64], magnitude: f64, positions: usize) -> Result<Self> {
        let mut table = Vec::with_capacity(positions * inv_freq.len() * 2);
        for position in 0..positions {
            let angles = inv_freq
                .iter()
                .map(|freq| (position as f64 * freq, if *freq == 0.0 { 1.0 } else { magnitude }));
            table.extend(angles.clone().map(|(angle, by)| (angle.cos() * by) as f32));
            table.extend(angles.map(|(angle, by)| (angle.sin() * by) as f32));
        }
        Ok(Self { table: Tensor::from_f32(device, &[positions, inv_freq.len() * 2], table)? })
    }

    pub fn positions(&self) -> usize {
        self.table.rows()
    }

    pub fn head_dim(&self) -> usize {
        self.table.cols()
    }

    /// [positions, head_dim]: cosines, then sines.
    pub(super) fn tensor(&self) -> &Tensor {
        &self.table
    }
}

/// Turns every head of `x` [tokens, heads · head_dim] (f32) by its token's position. Rows are
/// sequences of `seq_len` tokens, each starting at position `start`.
///
/// # Errors
/// [`Error::Internal`] when the shapes do not fit or the table ends before the last position.
pub fn apply(x: &mut Tensor, table: &RopeTable, seq_len: usize, start: usize) -> Result<()> {
    let (tokens, width, head_dim) = (x.rows(), x.cols(), table.head_dim());
    let fits = head_dim > 0
        && width.is_multiple_of(head_dim)
        && seq_len > 0
        && tokens.is_multiple_of(seq_len)
        && start + seq_len <= table.positions()
        && x.elem() == Elem::F32
        && x.device().same(table.table.device());
    if !fits {
        return Err(Error::Internal(format!(
            "rope: {:?} in sequences of {seq_len} from {start} by a table {:?}",
            x.shape(),
            table.table.shape()
        )));
    }
    match x.device() {
        Device::Cpu => {
            let table = table.table.f32s()?;
            for_chunks(x.f32s_mut()?, PIECE * width, |piece, rows| {
                for (index, row) in rows.chunks_mut(width).enumerate() {
                    let position = start + (piece * PIECE + index) % seq_len;
                    turn(row, &table[position * head_dim..][..head_dim]);
                }
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::apply(gpu, x, &table.table, seq_len, start),
    }
}

multiversion! {
    /// Turns every head of a row by the angles of its position.
    pub(super) fn turn(row: &mut [f32], table: &[f32]) {
        let half = table.len() / 2;
        let (cos, sin) = table.split_at(half);
        for head in row.chunks_exact_mut(table.len()) {
            let (first, second) = head.split_at_mut(half);
            for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
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
        heads: u32,
        half: u32,
        seq_len: u32,
        start: u32,
    }

    const ROPE: Kernel = Kernel {
        name: "rope",
        source: include_str!("../../shaders/rope.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&ROPE, size_of::<Params>())];

    pub fn apply(gpu: &Gpu, x: &Tensor, table: &Tensor, seq_len: usize, start: usize) -> Result<()> {
        let half = whole_quads("rope", "head", table.cols(), 8)? / 2;
        let params = Params {
            tokens: x.rows() as u32,
            heads: (x.cols() / table.cols()) as u32,
            half,
            seq_len: seq_len as u32,
            start: start as u32,
        };
        gpu.dispatch(
            &ROPE,
            &[],
            &[table.gpu()?, x.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((x.len() / 8).div_ceil(GROUP)),
            3.0 * x.len() as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    const INV_FREQ: [f64; 4] = [1.0, 0.1, 0.01, 0.001];

    #[test]
    fn each_pair_turns_by_its_position_within_the_sequence() {
        let (sequences, seq_len, heads, start) = (3, 20, 2, 5);
        let input = noise(sequences * seq_len * heads * 8, 1);

        let mut want = vec![0f32; input.len()];
        for (index, want) in want.iter_mut().enumerate() {
            let (i, position) = (index % 8, start + index / 16 % seq_len);
            let (sin, cos) = (position as f64 * INV_FREQ[i % 4]).sin_cos();
            let (this, other) =
                (f64::from(input[index]), f64::from(input[if i < 4 { index + 4 } else { index - 4 }]));
            *want = (1.5 * (this * cos + other * if i < 4 { -sin } else { sin })) as f32;
        }
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let table = RopeTable::new(device, &INV_FREQ, 1.5, 25).unwrap();
            let shape = [sequences * seq_len, heads * 8];
            let mut x = Tensor::from_f32(device, &shape, input.clone()).unwrap();
            apply(&mut x, &table, seq_len, start).unwrap();
            assert!(relative_error(&pollster::block_on(x.to_f32()).unwrap(), &want) < 1e-6);
        }
    }

    #[test]
    fn positions_past_the_table_are_refused() {
        let table = RopeTable::new(&Device::Cpu, &INV_FREQ, 1.0, 4).unwrap();
        let mut x = Tensor::zeros(&Device::Cpu, Elem::F32, &[4, 8]).unwrap();
        assert!(apply(&mut x, &table, 4, 0).is_ok());
        assert!(apply(&mut x, &table, 4, 1).is_err());
    }
}

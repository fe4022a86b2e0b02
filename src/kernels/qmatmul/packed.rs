//! A quantized weight as the kernels read it.
//!
//! The file's words run over all outputs before the next input follows; the kernels walk down the
//! inputs of a few outputs. So a layer is packed once more when it is loaded: in tiles of [`TILE`]
//! outputs, whose words lie one behind the other, and whose codes count from the middle of their
//! range, as two's complement. Layers that see one input stack by putting their tiles together.
//!
//! Inputs are taken in an order in which groups are runs of equal length, so that no kernel meets
//! a `g_idx`: where the file has one of its own, or groups do not fill words, [`Packed::order`] says
//! which input each slot multiplies, or none.

use half::f16;

use crate::checkpoint::GptqLinear;
use crate::device::{Device, host};
use crate::error::{Error, Result};
use crate::kernels::columns::ZERO_COLUMN;
use crate::kernels::parallel::for_chunks;
use crate::tensor::Tensor;

/// Outputs whose words lie together.
pub use crate::kernels::sums::TILE;

/// What a packed weight is, besides its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Inputs.
    pub k: usize,
    /// Codes of one output: `k` and what fills up groups; a multiple of [`Form::unit_codes`].
    pub depth: usize,
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// Codes that share a scale: a multiple of [`Form::unit_codes`]. The last group may be shorter.
    pub group: usize,
    /// Scales are f32 and not f16.
    pub wide: bool,
}

impl Form {
    /// Codes that fill words exactly.
    pub fn unit_codes(&self) -> usize {
        unit(self.bits).0
    }

    /// Words of one output.
    pub fn word_rows(&self) -> usize {
        self.depth * self.bits as usize / 32
    }

    /// Words of one output in a whole group.
    pub fn group_rows(&self) -> usize {
        self.group * self.bits as usize / 32
    }

    pub fn groups(&self) -> usize {
        self.depth.div_ceil(self.group)
    }

    /// Words of [`Packed::grid`] for one output and group.
    pub fn grid_words(&self) -> usize {
        if self.wide { 2 } else { 1 }
    }
}

/// Codes and the words that they fill.
fn unit(bits: u32) -> (usize, usize) {
    if bits == 3 { (32, 3) } else { (32 / bits as usize, 1) }
}

/// A quantized weight [n, k] on a device.
pub struct Packed {
    /// u32 [tiles, word_rows, TILE]: codes less 2^(bits − 1), two's complement, low bits first.
    pub words: Tensor,
    /// u32 [tiles, groups, TILE]: the scale in f16 in the low half, the zero point less 2^(bits − 1)
    /// in two's complement in the high half. Or, when wide, [tiles, groups, 2, TILE] with f32 for both.
    pub grid: Tensor,
    /// u32 [depth]: the input of each slot, or [`ZERO_COLUMN`]. `None` if slot i takes input i.
    pub order: Option<Tensor>,
    order_host: Option<Vec<u32>>,
    /// Outputs.
    pub n: usize,
    pub form: Form,
    /// Some zero point is not in the middle.
    pub zeros: bool,
}

/// In which order inputs are taken, and the scale of each run.
struct Slots {
    inputs: Vec<u32>,
    group: usize,
    /// The file's group of each run of `group` slots.
    group_of: Vec<u32>,
}

impl Slots {
    fn of(g_idx: &[u32], groups: usize, unit: usize) -> Self {
        let mut members = vec![vec![]; groups];
        for (input, &group) in g_idx.iter().enumerate() {
            members[group as usize].push(input as u32);
        }
        let filled = |len: usize| len.next_multiple_of(unit);
        let longest = filled(members.iter().map(Vec::len).max().unwrap_or(0)).max(unit);
        // Groups of very different lengths, which no known program writes, would be mostly filling:
        // their scales are repeated instead.
        let even = longest * groups <= g_idx.len() + g_idx.len() / 4 + longest;
        let group = if even { longest } else { unit };
        let mut slots = Self { inputs: vec![], group, group_of: vec![] };
        for (index, inputs) in members.iter().enumerate().filter(|(_, inputs)| !inputs.is_empty()) {
            // Only the last run may be short.
            slots.inputs.resize(slots.inputs.len().next_multiple_of(group), ZERO_COLUMN);
            slots.inputs.extend_from_slice(inputs);
            slots.inputs.resize(filled(slots.inputs.len()), ZERO_COLUMN);
            slots.group_of.resize(slots.inputs.len().div_ceil(group), index as u32);
        }
        slots
    }
}

impl Packed {
    /// The outputs `rows` of a layer, on `device`.
    ///
    /// # Errors
    /// [`Error::Internal`] when the layer's parts do not fit each other; [`Error::Device`] when it is
    /// too large for one buffer.
    pub fn new(layer: &GptqLinear, rows: std::ops::Range<usize>, device: &Device) -> Result<Self> {
        let (n, k, bits) = (rows.len(), layer.k, layer.bits);
        let groups = layer.groups();
        let fits = [2, 3, 4, 8].contains(&bits)
            && rows.end <= layer.n
            && k > 0
            && layer.codes.len() == layer.n * k
            && layer.zeros.len() == groups * layer.n
            && layer.g_idx.len() == k
            && layer.g_idx.iter().all(|&group| (group as usize) < groups);
        if !fits {
            return Err(Error::Internal("qmatmul: the parts of a layer do not fit each other".into()));
        }
        let (unit_codes, unit_words) = unit(bits);
        let middle = 1i32 << (bits - 1);
        let slots = Slots::of(&layer.g_idx, groups, unit_codes);
        let scale = |row: usize, group: u32| layer.scales[group as usize * layer.n + rows.start + row];
        let zero = |row: usize, group: u32| {
            i32::from(layer.zeros[group as usize * layer.n + rows.start + row]) - middle
        };
        // Shaders may read the smallest f16 as zero.
        let narrow = |scale: f32| {
            let half = f16::from_f32(scale);
            half.to_f32().to_bits() == scale.to_bits() && (half.is_normal() || scale == 0.0)
        };
        let wide = !layer.scales.iter().all(|&scale| narrow(scale));
        let form = Form { k, depth: slots.inputs.len(), bits, group: slots.group, wide };

        let tiles = n.div_ceil(TILE);
        let len = tiles * form.word_rows() * TILE;
        let mut words = host::in_large_pages(len);
        words.resize(len, 0u32);
        let mask = (1u64 << bits) - 1;
        for_chunks(&mut words, form.word_rows() * TILE, |tile, words| {
            for lane in 0..TILE.min(n - tile * TILE) {
                let codes = &layer.codes[(rows.start + tile * TILE + lane) * k..][..k];
                let units = slots.inputs.chunks_exact(unit_codes);
                for (inputs, words) in units.zip(words.chunks_exact_mut(unit_words * TILE)) {
                    let (mut buffer, mut held, mut row) = (0u64, 0, 0);
                    for &input in inputs {
                        let code = codes.get(input as usize).map_or(0, |&code| i32::from(code) - middle);
                        buffer |= (code as u64 & mask) << held;
                        held += bits;
                        if held >= 32 {
                            words[row * TILE + lane] = buffer as u32;
                            (buffer, held, row) = (buffer >> 32, held - 32, row + 1);
                        }
                    }
                }
            }
        });
        let grid_len = form.grid_words() * TILE;
        let mut grid = vec![0u32; tiles * form.groups() * grid_len];
        for_chunks(&mut grid, form.groups() * grid_len, |tile, grid| {
            for (grid, &group) in grid.chunks_exact_mut(grid_len).zip(&slots.group_of) {
                for lane in 0..TILE.min(n - tile * TILE) {
                    let (scale, zero) = (scale(tile * TILE + lane, group), zero(tile * TILE + lane, group));
                    if wide {
                        grid[lane] = scale.to_bits();
                        grid[TILE + lane] = (zero as f32).to_bits();
                    } else {
                        grid[lane] = u32::from(f16::from_f32(scale).to_bits()) | (zero as u32) << 16;
                    }
                }
            }
        });
        let zeros = (0..n).any(|row| slots.group_of.iter().any(|&group| zero(row, group) != 0));
        let natural = slots.inputs.iter().enumerate().all(|(slot, &input)| slot == input as usize);
        let order_host = (!natural).then_some(slots.inputs);
        let order = match &order_host {
            Some(order) => Some(Tensor::from_u32(device, &[order.len()], order.clone())?),
            None => None,
        };
        Ok(Self {
            words: Tensor::from_u32(device, &[tiles, form.word_rows(), TILE], words)?,
            grid: Tensor::from_u32(device, &[tiles, form.groups(), form.grid_words() * TILE], grid)?,
            order,
            order_host,
            n,
            form,
            zeros,
        })
    }

    /// Bytes that a product reads of it.
    pub fn bytes(&self) -> usize {
        self.words.bytes() + self.grid.bytes()
    }

    pub fn device(&self) -> &Device {
        self.words.device()
    }

    /// The most outputs of a layer with `k` inputs that one [`Packed`] may have on `device`.
    pub fn most_rows(device: &Device, k: usize, bits: u32) -> usize {
        // A quarter of filling and a scale for every unit is the most there can be.
        let row_bytes = (k + k / 4 + 64) * bits as usize / 8;
        let rows = device.max_tensor_bytes() / row_bytes.max(1) as u64;
        (usize::try_from(rows).unwrap_or(usize::MAX) / TILE * TILE).max(TILE)
    }

    /// Whether the outputs of `next` can follow in one weight: the same form, order of inputs and device,
    /// no tile left open, and no more than a buffer holds.
    pub fn joins(&self, next: &Self) -> bool {
        let bytes = |a: &Tensor, b: &Tensor| (a.bytes() + b.bytes()) as u64;
        let largest = bytes(&self.words, &next.words).max(bytes(&self.grid, &next.grid));
        self.form == next.form
            && self.order_host == next.order_host
            && self.n.is_multiple_of(TILE)
            && self.device().same(next.device())
            && largest <= self.device().max_tensor_bytes()
    }

    /// This weight with the outputs of `next` after its own.
    ///
    /// # Errors
    /// [`Error::Internal`] where it does not join; [`Error::Device`] where there is no memory.
    pub fn joined(self, next: &Self) -> Result<Self> {
        if !self.joins(next) {
            return Err(Error::Internal("qmatmul: weights of two kinds cannot be joined".into()));
        }
        Ok(Self {
            words: self.words.joined(&next.words)?,
            grid: self.grid.joined(&next.grid)?,
            n: self.n + next.n,
            zeros: self.zeros || next.zeros,
            ..self
        })
    }
}

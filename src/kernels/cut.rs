//! How the smaller GPU kernels cut their work: into quads of four elements, into lanes, the threads
//! that share a row, and into dispatches that fit a submit.

use std::ops::Range;

use crate::device::Gpu;
use crate::error::{Error, Result};
use crate::face;

/// Threads of a workgroup in every kernel that uses these.
pub const GROUP: usize = 64;

/// `len` elements as quads; `len` must be a multiple of `multiple`, itself one of four.
///
/// # Errors
/// [`Error::Unsupported`] otherwise.
pub fn whole_quads(kernel: &str, what: &str, len: usize, multiple: usize) -> Result<u32> {
    if len == 0 || !len.is_multiple_of(multiple) {
        return Err(Error::unsupported(
            format!("{kernel}: a {what} of {len} is not a multiple of {multiple}, as the GPU kernel needs"),
            face::USE_CPU,
        ));
    }
    Ok((len / 4) as u32)
}

/// How many threads should share a row of `len` items: a power of two up to the workgroup's 64. A
/// software adapter gets one, since its barriers cost more than they save.
pub fn lanes(gpu: &Gpu, len: usize) -> usize {
    if gpu.summary().software { 1 } else { len.next_power_of_two().min(GROUP) }
}

/// What an element costs that is read, hardly worked on, and written: memory moves so much more
/// slowly than arithmetic that it counts as this many floating-point operations.
pub const ELEMENT: f64 = 64.0;

/// Cuts `count` items of `cost` floating-point operations each into consecutive ranges, each within
/// the submit budget where one item is.
pub fn ranges(gpu: &Gpu, count: usize, cost: f64) -> impl Iterator<Item = Range<usize>> + use<> {
    let len = ((gpu.submit_budget() / cost.max(1.0)) as usize).clamp(1, count.max(1));
    (0..count).step_by(len).map(move |start| start..count.min(start + len))
}

//! Rows in parallel natively, one after another in a browser (wasm without threads).
//!
//! By the [`team`]; by rayon where that works for another caller.

#[cfg(not(target_arch = "wasm32"))]
use super::team;

/// Calls `each(index, chunk)` for consecutive chunks of `len` elements. A single chunk stays on the
/// calling thread: waking another takes longer than decoding's small products.
#[cfg(not(target_arch = "wasm32"))]
pub fn for_chunks<T: Send>(data: &mut [T], len: usize, each: impl Fn(usize, &mut [T]) + Sync) {
    use rayon::prelude::*;
    if data.len() <= len {
        if !data.is_empty() {
            each(0, data);
        }
        return;
    }
    let (len, total) = (len.max(1), data.len());
    let start = Start(data.as_mut_ptr());
    let shared = team::run(total.div_ceil(len), &|index| {
        let from = index * len;
        // SAFETY: within the data, which is borrowed for as long as this runs; each index comes once, and
        // the chunks of two do not overlap.
        each(index, unsafe { std::slice::from_raw_parts_mut(start.at(from), len.min(total - from)) });
    });
    if !shared {
        data.par_chunks_mut(len).enumerate().for_each(|(index, chunk)| each(index, chunk));
    }
}

/// Where the data begins, for the threads that share it.
#[cfg(not(target_arch = "wasm32"))]
struct Start<T>(*mut T);

#[cfg(not(target_arch = "wasm32"))]
impl<T> Start<T> {
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

// SAFETY: it gives out disjoint parts of data that may be sent.
#[cfg(not(target_arch = "wasm32"))]
unsafe impl<T: Send> Sync for Start<T> {}

#[cfg(target_arch = "wasm32")]
pub fn for_chunks<T: Send>(data: &mut [T], len: usize, each: impl Fn(usize, &mut [T]) + Sync) {
    for (index, chunk) in data.chunks_mut(len.max(1)).enumerate() {
        each(index, chunk);
    }
}

/// How many threads share the work, for cutting it into that many pieces or a few times as many.
pub fn threads() -> usize {
    #[cfg(not(target_arch = "wasm32"))]
    {
        rayon::current_num_threads()
    }
    #[cfg(target_arch = "wasm32")]
    {
        1
    }
}

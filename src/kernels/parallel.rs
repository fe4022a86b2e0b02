//! Rows in parallel natively, one after another in a browser (wasm without threads).

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
    data.par_chunks_mut(len.max(1)).enumerate().for_each(|(index, chunk)| each(index, chunk));
}

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

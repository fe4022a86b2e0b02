//! Host memory that is used again, and large pages for what is read whole again and again.
//!
//! A system gives large vectors fresh pages, and clearing those costs as much as the cheaper
//! operations do. The core runs on one thread and makes vectors of a few sizes over and over, so those that
//! it lets go lie here for the next of their size.

use std::cell::RefCell;

/// Smaller vectors come from the allocator's own store.
const SMALLEST: usize = 1 << 16;

/// Elements kept at most: 64 MiB.
const KEPT: usize = 1 << 24;
/// The same in bytes.
pub const KEPT_BYTES: u64 = 4 * KEPT as u64;

thread_local! {
    static SHELF: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A vector of `count` elements; what they are is unspecified.
pub fn take(count: usize) -> Vec<f32> {
    let fitting = |capacity: usize| capacity >= count && capacity <= 2 * count;
    let found = SHELF.with_borrow_mut(|shelf| {
        let index = (0..shelf.len())
            .filter(|&index| count >= SMALLEST && fitting(shelf[index].capacity()))
            .min_by_key(|&index| shelf[index].capacity())?;
        Some(shelf.swap_remove(index))
    });
    match found {
        None => vec![0.0; count],
        Some(mut values) => {
            values.resize(count, 0.0);
            values
        }
    }
}

/// Takes back a vector that nobody needs.
pub fn give(values: Vec<f32>) {
    if values.capacity() < SMALLEST {
        return;
    }
    // A thread that ends drops what it holds in any order.
    let _ = SHELF.try_with(|shelf| {
        let mut shelf = shelf.borrow_mut();
        let kept: usize = shelf.iter().map(Vec::capacity).sum();
        if kept + values.capacity() <= KEPT {
            shelf.push(values);
        }
    });
}

/// The elements that `bytes` hold, which need not be aligned; a weight of many megabytes in large pages, since
/// to look up a page for each 4 kB takes longer than to read a part of it.
pub fn of_bytes<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    let mut values = in_large_pages(bytes.len() / size_of::<T>());
    values.extend(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>));
    values
}

/// An empty vector with room for `count` elements, in large pages if it is large and the system has them.
pub fn in_large_pages<T>(count: usize) -> Vec<T> {
    let values = Vec::with_capacity(count);
    #[cfg(target_os = "linux")]
    linux::advise(values.as_ptr() as usize, count * size_of::<T>());
    values
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    }

    const MADV_HUGEPAGE: c_int = 14;
    const PAGE: usize = 4096;
    /// Bytes from which on memory surely holds a large page of 2 MiB.
    const LARGE: usize = 4 << 20;

    /// Asks for large pages for memory that nothing was written to yet. A system that has none says no, and
    /// all stays as it was.
    pub fn advise(address: usize, length: usize) {
        if length < LARGE {
            return;
        }
        let begin = address.next_multiple_of(PAGE);
        let end = (address + length) / PAGE * PAGE;
        // SAFETY: whole pages within an allocation; the advice changes nothing of what is in them.
        unsafe { madvise(begin as *mut c_void, end.saturating_sub(begin), MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_out_of_unaligned_bytes_whatever_their_number() {
        for count in [0, 5, (1 << 20) + 3] {
            let want: Vec<u32> = (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
            let mut bytes = vec![0];
            bytes.extend(want.iter().flat_map(|x| x.to_le_bytes()));
            assert_eq!(of_bytes::<u32>(&bytes[1..]), want);
        }
    }

    #[test]
    fn a_vector_comes_back_for_its_size_and_not_for_one_much_smaller() {
        let values = take(SMALLEST + 10);
        let place = values.as_ptr();
        give(values);
        let small = take(SMALLEST / 4);
        assert_ne!(small.as_ptr(), place);
        let again = take(SMALLEST);
        assert_eq!((again.as_ptr(), again.len()), (place, SMALLEST));
    }

    #[test]
    fn no_more_than_the_limit_is_kept() {
        for _ in 0..3 {
            give(vec![0.0; KEPT / 2]);
        }
        assert_eq!(SHELF.with_borrow(|shelf| shelf.iter().map(Vec::capacity).sum::<usize>()), KEPT);
    }
}

//! Host memory that is used again.
//!
//! A system gives large vectors fresh pages, and clearing those costs as much as the cheaper
//! operations do. The core runs on one thread and makes vectors of a few sizes over and over, so those that
//! it lets go lie here for the next of their size.

use std::cell::RefCell;

/// Smaller vectors come from the allocator's own store.
const SMALLEST: usize = 1 << 16;

/// Elements kept at most: 64 MiB.
const KEPT: usize = 1 << 24;

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

#[cfg(test)]
mod tests {
    use super::*;

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

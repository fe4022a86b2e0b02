//! Where windows lie in a long sequence of tokens.

use std::ops::Range;

use super::random::SplitMix64;

/// Fewer tokens predict nothing.
pub(crate) const MIN_TOKENS: usize = 2;

/// Windows into a text, in the order of the text.
pub(crate) struct Placement {
    pub(crate) windows: Vec<Range<usize>>,
    /// Some windows share tokens, because the text is too short for all of them.
    pub(crate) overlapping: bool,
}

/// `count` windows of `length` out of `tokens`, spread over the whole text.
///
/// The text is divided into `count` equal strides with one window at a random place in each, so
/// that no window touches another and every part of the text is as likely as any. A text that is
/// too short for that gets equal strides of window *starts* instead, never two equal windows; one
/// shorter than a window is a single shorter window, or none below two tokens.
pub(crate) fn random_windows(tokens: usize, length: usize, count: usize, rng: &mut SplitMix64) -> Placement {
    if tokens < length {
        let windows = (tokens >= MIN_TOKENS && count > 0).then_some(0..tokens).into_iter().collect();
        return Placement { windows, overlapping: false };
    }
    let overlapping = tokens / length < count;
    // Without overlap a window must end inside its stride, with overlap it must only start there.
    let (span, inside) = if overlapping { (tokens - length + 1, 1) } else { (tokens, length) };
    let count = count.min(span);
    let edge = |index: usize| (index as u128 * span as u128 / count as u128) as usize;
    let window = |index: usize| {
        let free = edge(index + 1) - edge(index) - inside + 1;
        let start = edge(index) + rng.below(free);
        start..start + length
    };
    let windows: Vec<_> = (0..count).map(window).collect();
    Placement { overlapping: windows.windows(2).any(|pair| pair[1].start < pair[0].end), windows }
}

/// Windows of `length` side by side over all `tokens`; the last one may be shorter, and is left
/// out below two tokens. `samples` takes that many of them, evenly spaced.
pub(crate) fn consecutive_windows(tokens: usize, length: usize, samples: Option<usize>) -> Vec<Range<usize>> {
    let all = tokens / length + usize::from(tokens % length >= MIN_TOKENS);
    let count = samples.map_or(all, |samples| samples.min(all));
    let start = |index: usize| (index as u128 * all as u128 / count as u128) as usize * length;
    (0..count).map(|index| start(index)..(start(index) + length).min(tokens)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn random(tokens: usize, length: usize, count: usize, seed: u64) -> Placement {
        random_windows(tokens, length, count, &mut SplitMix64::new(seed, 0))
    }

    #[test]
    fn windows_reach_both_ends_of_the_text() {
        let first = (0..200).map(|seed| random(100, 10, 5, seed).windows[0].start).min();
        let last = (0..200).map(|seed| random(100, 10, 5, seed).windows[4].end).max();
        assert_eq!((first, last), (Some(0), Some(100)));
    }

    #[test]
    fn a_text_that_just_fits_is_used_whole() {
        let placement = random(30, 10, 3, 1);
        assert_eq!(placement.windows, [0..10, 10..20, 20..30]);
        assert!(!placement.overlapping);
    }

    #[test]
    fn a_text_of_one_window_is_one_sample() {
        for tokens in [2, 7, 10] {
            assert_eq!(random(tokens, 10, 8, 1).windows, std::slice::from_ref(&(0..tokens)));
        }
        assert!(random(1, 10, 8, 1).windows.is_empty());
        assert!(random(0, 10, 8, 1).windows.is_empty());
    }

    #[test]
    fn consecutive_windows_cover_everything() {
        assert_eq!(consecutive_windows(25, 10, None), [0..10, 10..20, 20..25]);
        assert_eq!(consecutive_windows(21, 10, None), [0..10, 10..20]);
        assert_eq!(consecutive_windows(100, 10, Some(3)), [0..10, 30..40, 60..70]);
        assert_eq!(consecutive_windows(25, 10, Some(9)).len(), 3);
        assert_eq!(consecutive_windows(7, 10, None), std::slice::from_ref(&(0..7)));
        assert!(consecutive_windows(1, 10, None).is_empty());
    }

    proptest! {
        #[test]
        fn windows_are_in_bounds_distinct_and_repeatable(
            tokens in 0_usize..5000, length in 2_usize..600, count in 1_usize..200, seed: u64,
        ) {
            let placement = random(tokens, length, count, seed);
            prop_assert_eq!(&random(tokens, length, count, seed).windows, &placement.windows);
            for window in &placement.windows {
                prop_assert!(window.end <= tokens);
                prop_assert_eq!(window.len(), length.min(tokens));
            }
            for pair in placement.windows.windows(2) {
                prop_assert!(pair[0].start < pair[1].start);
                prop_assert!(placement.overlapping || pair[0].end <= pair[1].start);
            }
            if tokens >= length * count {
                prop_assert!(!placement.overlapping);
                prop_assert_eq!(placement.windows.len(), count);
            } else if tokens >= length {
                prop_assert_eq!(placement.windows.len(), count.min(tokens - length + 1));
            }
        }
    }
}

//! Hot CPU loops compiled for several instruction sets.
//!
//! Release builds target plain x86-64, whose vectors are four floats wide. `multiversion!` compiles
//! one body again for AVX2 and AVX-512 and picks at run time. All versions give the same bits:
//! Rust never contracts a product and a sum into one rounding by itself, and sums here run in a
//! fixed number of lanes.

/// Defines a function whose body is compiled for the vectors of the machine it runs on.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn plain($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx512f") {
                    // SAFETY: the processor has what the function was compiled for.
                    return unsafe { avx512($($arg),*) };
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            plain($($arg),*)
        }
    };
}
pub(crate) use multiversion;

/// Partial sums that run side by side: two registers of AVX-512, four of AVX2.
const LANES: usize = 32;

/// eˣ with a relative error below 2e-7, free of branches so that loops over it vectorize.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; eʳ is the degree-6 polynomial of the Cephes library (`expf`), 2ⁿ is
/// put together from bits. Results saturate at about 1e-38 and 2e38; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5·2²³: adding it leaves the nearest integer in the low bits
    const LN2_HIGH: f32 = 0.693_359_4; // 355/512, few bits, so that n times it is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Written so that NaN passes both comparisons.
    let x = if x < -87.3 { -87.3 } else { x };
    let x = if x > 88.3 { 88.3 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let power = f32::from_bits((shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127)) << 23);
    (p * (r * r) + r + 1.0) * power
}

/// `x` between `low` and `high`: one instruction each, where `f32::max` and `f32::min` also look for NaN.
#[inline(always)]
pub fn cut(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > low { x } else { low };
    if x < high { x } else { high }
}

/// A finite f16 from its bits, free of branches so that loops over it vectorize.
#[inline(always)]
pub fn half_to_f32(bits: u16) -> f32 {
    // With the exponent's bits where f32 has them, its bias is 112 too small.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * REBIAS;
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Asks for the cache line at an address that will be read soon; any address will do.
#[inline(always)]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which touches no memory; every x86-64 has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Σ f(x), in a fixed order.
#[inline(always)]
pub fn sum(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += f(x);
    }
    fold(lanes, |a, b| a + b)
}

/// The largest f(x), −∞ of none; NaN is passed over.
#[inline(always)]
pub fn largest(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, f(x));
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = larger(*lane, f(x));
    }
    fold(lanes, larger)
}

/// Replaces each x by exp(x − `offset`) and returns the sum of the results.
#[inline(always)]
pub fn exp_and_sum(values: &mut [f32], offset: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp(*x - offset);
            *lane += *x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *x = exp(*x - offset);
        *lane += *x;
    }
    fold(lanes, |a, b| a + b)
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::noise;

    #[test]
    fn exp_is_within_two_ten_millionths() {
        for i in -873_000..883_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 2e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-1e30) > 0.0 && exp(-1e30) < 2e-38);
        assert!(exp(1e30) > 1e38 && exp(1e30).is_finite());
    }

    #[test]
    fn every_finite_half_is_widened_exactly() {
        for bits in (0..=u16::MAX).filter(|bits| bits & 0x7c00 != 0x7c00) {
            assert_eq!(half_to_f32(bits).to_bits(), half::f16::from_bits(bits).to_f32().to_bits());
        }
    }

    #[test]
    fn reductions_agree_with_the_definition_at_every_length() {
        for len in [0, 1, 31, 32, 33, 1000] {
            let x = noise(len, 3);
            let want: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((f64::from(sum(&x, |x| x * x)) - want).abs() <= 1e-5 * want);
            assert_eq!(largest(&x, |x| x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let mut e = x.clone();
            let total = exp_and_sum(&mut e, 0.5);
            let want: f64 = x.iter().map(|&x| (f64::from(x) - 0.5).exp()).sum();
            assert!((f64::from(total) - want).abs() <= 1e-5 * want);
            assert!(e.iter().zip(&x).all(|(e, x)| (e - (x - 0.5).exp()).abs() < 1e-6));
        }
    }

    multiversion! {
        fn dispatched(values: &mut [f32]) -> f32 {
            exp_and_sum(values, 0.25)
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let mut plain = noise(777, 4);
        let mut best = plain.clone();
        let (a, b) = (exp_and_sum(&mut plain, 0.25), dispatched(&mut best));
        assert_eq!(a.to_bits(), b.to_bits());
        assert!(plain.iter().zip(&best).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

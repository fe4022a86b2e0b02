//! One loop, compiled for several instruction sets, the best one called at run time.
//!
//! Release builds target plain x86-64 so that they run everywhere; the loops that matter are
//! compiled again for AVX2 and AVX-512. Results are the same to the bit: Rust never contracts a
//! product and a sum into one rounding, and sums are written over fixed lanes.

/// `simd_dispatch! { pub fn name(args…) -> Ret; body_function }` makes `name`, which calls the
/// `#[inline(always)]` function `body_function` under the widest instruction set there is.
macro_rules! simd_dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?; $body:path) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "the lists are those of the functions dispatched")]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn middle($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the processor has these features, as just checked.
                    return unsafe { wide($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor has these features, as just checked.
                    return unsafe { middle($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}

pub(crate) use simd_dispatch;

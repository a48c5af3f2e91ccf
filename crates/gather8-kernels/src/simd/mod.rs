//! The passes in the processor's widest vectors, bit-equal to [`scalar`](crate::scalar).
//!
//! Every pass is written once, as loops over small local arrays without branches or calls, and
//! compiled for each [`Level`]; the compiler makes the vectors. That keeps the bits: rustc neither
//! contracts a product and a sum nor reorders floating-point operations, so that the vectorised
//! loop is the loop. What the processor has is found out at run time.
//!
//! Values are taken to f32 in blocks that stay in the first cache, worked on, and stored in their
//! type: the arithmetic exists once for all types, not once per combination.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($($feature:tt),+) => { $(std::arch::is_x86_feature_detected!($feature))&&+ };
}

/// `leveled! { fn name<G: Bound>(args) -> R = body; }` makes `name(level, args)`, which calls
/// `body(args)` compiled for that level; for the target's own if the processor has not got it.
/// `body` and all that it calls must be `inline(always)`: what is not inlined is compiled for the
/// target's own level. Arguments are plain parameters, not captures, so that the compiler knows
/// that the slices do not overlap.
///
/// FMA is not enabled on purpose: no pass may use it.
macro_rules! leveled {
    ($(
        fn $name:ident $(<$($generic:ident : $bound:path),+>)?
        ($($arg:ident : $type:ty),+) $(-> $ret:ty)? = $body:ident;
    )+) => { $(
        #[allow(clippy::too_many_arguments, reason = "plain parameters, see above")]
        fn $name $(<$($generic: $bound),+>)? (
            level: $crate::simd::Level,
            $($arg: $type),+
        ) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::simd::Level;

                #[allow(clippy::too_many_arguments, reason = "plain parameters, see above")]
                #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
                fn avx2 $(<$($generic: $bound),+>)? ($($arg: $type),+) $(-> $ret)? {
                    $body $(::<$($generic),+>)? ($($arg),+)
                }

                #[allow(clippy::too_many_arguments, reason = "plain parameters, see above")]
                #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
                fn avx512 $(<$($generic: $bound),+>)? ($($arg: $type),+) $(-> $ret)? {
                    $body $(::<$($generic),+>)? ($($arg),+)
                }

                if level == Level::Avx512 && level.is_available() {
                    // SAFETY: the processor has the features that the function was compiled for.
                    return unsafe { avx512 $(::<$($generic),+>)? ($($arg),+) };
                }
                if level == Level::Avx2 && level.is_available() {
                    // SAFETY: as above.
                    return unsafe { avx2 $(::<$($generic),+>)? ($($arg),+) };
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = level;
            $body $(::<$($generic),+>)? ($($arg),+)
        }
    )+ };
}

mod adamw;
mod amax;
mod block;
mod cast;
mod gradient;
mod memory;

pub use adamw::optimize;
pub use amax::amax_word;
pub use cast::{cast, decode};
pub use gradient::{accumulate, divide, divide_in_place, norm, norm_tile};

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// What the target has in any case: 128-bit vectors on x86-64 and aarch64.
    Portable,
    /// x86-64-v3: 256-bit vectors.
    Avx2,
    /// x86-64-v4: 512-bit vectors.
    Avx512,
}

impl Level {
    /// The widest that this processor has.
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            let levels = Self::available();
            levels.into_iter().max().unwrap_or(Self::Portable)
        })
    }

    /// All that this processor has, the narrowest first.
    pub fn available() -> Vec<Self> {
        let levels = [Self::Portable, Self::Avx2, Self::Avx512];
        levels.into_iter().filter(|level| level.is_available()).collect()
    }

    /// A name for benchmarks and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has!("avx2", "bmi1", "bmi2", "lzcnt", "popcnt"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && has!("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

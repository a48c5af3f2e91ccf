//! Hints to the memory system. They change no value; elsewhere than on x86-64 they do nothing.

/// Bytes in a cache line.
pub(super) const LINE: usize = 64;

/// Asks for the cache lines of `values`, as if they lay `ahead` bytes further on.
#[inline(always)]
pub(super) fn prefetch<T>(values: &[T], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of_val(values)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let line = values.as_ptr().cast::<i8>().wrapping_add(ahead + offset);
        // SAFETY: a prefetch may name any address, mapped or not; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, ahead);
}

/// Stores whole cache lines past the caches, which spares reading them first. A destination that
/// begins at no multiple of 16 is written in the ordinary way. [`fence`] must follow before
/// anybody else is told of the bytes.
#[inline(always)]
pub(super) fn stream<const N: usize>(from: &[u8; N], to: &mut [u8; N]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        if to.as_ptr().addr().is_multiple_of(16) && N.is_multiple_of(16) {
            for (from, to) in from.chunks_exact(16).zip(to.chunks_exact_mut(16)) {
                let from = from.as_ptr().cast::<__m128i>();
                let to = to.as_mut_ptr().cast::<__m128i>();
                // SAFETY: 16 readable and 16 writable bytes, the latter at a multiple of 16; SSE2
                // is part of x86-64.
                unsafe { _mm_stream_si128(to, _mm_loadu_si128(from)) };
            }
            return;
        }
    }
    *to = *from;
}

/// Orders the stores of [`stream`] before every later store of this thread, such as the release
/// of a lock.
#[inline(always)]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

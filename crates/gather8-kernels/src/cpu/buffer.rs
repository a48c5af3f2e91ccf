//! Memory that streams share.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::backend::Memory;
use crate::error::{Error, Result};

use super::history::History;

/// Buffers start at a multiple of this.
const ALIGNMENT: usize = 256;

/// A piece of memory of a [`Cpu`](super::Cpu) backend.
pub struct Buffer {
    base: NonNull<u8>,
    allocation: NonNull<u8>,
    layout: Layout,
    len: usize,
    memory: Memory,
    /// The backend that it belongs to, and its number there.
    owner: u64,
    number: u64,
    pub(super) history: Mutex<History>,
}

// SAFETY: the memory is plain bytes that no thread owns. Every access goes through the unsafe
// methods below, whose callers promise that conflicting accesses are ordered.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(super) fn new(
        device: &str,
        owner: u64,
        number: u64,
        bytes: u64,
        memory: Memory,
    ) -> Result<Self> {
        let refuse = |reason: String| Error::OutOfMemory {
            device: device.to_owned(),
            bytes,
            reason: format!("{reason}; make the model, its shards or the arena smaller"),
        };
        let len = usize::try_from(bytes).map_err(|e| refuse(e.to_string()))?;
        // Aligned by hand: the allocator zeroes over-aligned memory by writing it, while ordinary
        // zeroed memory comes from the system untouched. The length is rounded up so that host
        // memory holds whole words.
        let layout = len
            .checked_next_multiple_of(4)
            .and_then(|len| len.checked_add(ALIGNMENT))
            .and_then(|len| Layout::from_size_align(len, 16).ok())
            .ok_or_else(|| refuse("no address space holds that much".to_owned()))?;
        // SAFETY: the layout's size is at least ALIGNMENT.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| refuse("the system has no more memory".to_owned()))?;
        let skip = allocation.align_offset(ALIGNMENT);
        // SAFETY: for bytes `align_offset` is exact and below ALIGNMENT, which the allocation has
        // on top of the length.
        let base = unsafe { allocation.add(skip) };
        Ok(Self { base, allocation, layout, len, memory, owner, number, history: Mutex::default() })
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    pub(super) fn memory(&self) -> Memory {
        self.memory
    }

    pub(super) fn owner(&self) -> u64 {
        self.owner
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The range as offsets, cut to the buffer.
    fn offsets(&self, range: &Range<u64>) -> (usize, usize) {
        let start = range.start.min(self.len()) as usize;
        let end = range.end.min(self.len()) as usize;
        (start, end.saturating_sub(start))
    }

    /// # Safety
    /// While the slice lives nothing writes these bytes: the caller is an operation that the order
    /// checker has admitted with a read or a write of them.
    pub(super) unsafe fn bytes(&self, range: &Range<u64>) -> &[u8] {
        let (start, len) = self.offsets(range);
        // SAFETY: in bounds by `offsets`; initialised, since the memory was zeroed; no writer by
        // this function's contract.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(start), len) }
    }

    /// # Safety
    /// While the slice lives nothing else reads or writes these bytes: the caller is an operation
    /// that the order checker has admitted with a write of them, and it makes this slice once. The
    /// buffer is device memory ([`peek`](crate::Backend::peek) reads host memory at any time).
    #[allow(clippy::mut_from_ref, reason = "exclusive by contract, as in UnsafeCell")]
    pub(super) unsafe fn bytes_mut(&self, range: &Range<u64>) -> &mut [u8] {
        let (start, len) = self.offsets(range);
        // SAFETY: in bounds by `offsets`; initialised; exclusive by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(start), len) }
    }

    /// The word at an offset, or `None` if it is not aligned or not inside.
    ///
    /// # Safety
    /// While the reference lives, others touch the word by 32-bit atomics only, or read it while
    /// the caller does not write: the caller is an operation that the order checker has admitted
    /// with an accumulation or a write of it, or one that loads host memory.
    pub(super) unsafe fn word(&self, at: u64) -> Option<&AtomicU32> {
        let at = usize::try_from(at).ok()?;
        let fits = at.is_multiple_of(4) && at.checked_add(4)? <= self.len.next_multiple_of(4);
        // SAFETY: aligned, since the base is; inside the allocation, whose length is rounded up to
        // words; touched by atomics only, by this function's contract.
        fits.then(|| unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) })
    }

    /// Host memory as it is now, from the first word on, each word whole.
    pub(super) fn load_words(&self, range: &Range<u64>) -> Vec<u8> {
        let first = range.start & !3;
        let mut bytes = Vec::with_capacity((range.end - first) as usize + 4);
        for at in (first..range.end).step_by(4) {
            // SAFETY: host memory is written by `store_words` and accumulations only, which are
            // 32-bit atomics.
            if let Some(word) = unsafe { self.word(at) } {
                bytes.extend_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
            }
        }
        bytes.truncate((range.end - first) as usize);
        bytes.drain(..(range.start - first) as usize);
        bytes
    }

    /// Writes host memory, from the last word to the first: who loads a first word that has been
    /// written then finds the others written too.
    ///
    /// # Safety
    /// The caller is an operation that the order checker has admitted with a write of every word
    /// that the range touches.
    pub(super) unsafe fn store_words(&self, range: &Range<u64>, bytes: &[u8]) {
        let first = range.start & !3;
        for word in (first / 4..range.end.div_ceil(4)).rev() {
            let at = 4 * word;
            // SAFETY: plain reads of the word are ordered by the checker; all else is atomic.
            let Some(word) = (unsafe { self.word(at) }) else { continue };
            let from = range.start.max(at);
            let to = range.end.min(at + 4);
            let Some(new) = bytes.get((from - range.start) as usize..(to - range.start) as usize)
            else {
                continue;
            };
            let put = |old: u32| {
                let mut word = old.to_ne_bytes();
                if let Some(part) = word.get_mut((from - at) as usize..(to - at) as usize) {
                    part.copy_from_slice(new);
                }
                u32::from_ne_bytes(word)
            };
            if to - from == 4 {
                word.store(put(0), Ordering::Release);
            } else {
                word.store(put(word.load(Ordering::Relaxed)), Ordering::Release);
            }
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; the last handle is gone, and with it every
        // operation that could touch the memory.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) };
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("number", &self.number)
            .field("len", &self.len)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

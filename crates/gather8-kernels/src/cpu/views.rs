//! How an operation reaches the bytes that it has declared.

use std::fmt;
use std::ops::Range;

use crate::backend::{Memory, Span};
use crate::error::{Error, Result};

use super::Cpu;
use super::access::Access;
use super::buffer::Buffer;

/// The bytes of a submitted operation's spans, by the spans' index in the list that was passed to
/// [`Cpu::submit`].
pub struct Views<'a>(Vec<View<'a>>);

/// One span's bytes.
#[derive(Debug)]
#[non_exhaustive]
pub enum View<'a> {
    /// A span that was declared as read.
    Read(&'a [u8]),
    /// A span that was declared as written.
    Write(Written<'a>),
}

impl<'a> Views<'a> {
    /// # Safety
    /// The caller is an operation that the order checker has admitted with these accesses, which
    /// are disjoint but for reads; it opens them once.
    pub(super) unsafe fn open(accesses: &'a [Access]) -> Self {
        let open = |access: &'a Access| match access {
            // SAFETY: by this function's contract.
            Access::Read(span) => View::Read(unsafe { read(span) }),
            // SAFETY: by this function's contract.
            Access::Write(span) | Access::ReadWrite(span) => View::Write(unsafe { write(span) }),
        };
        Self(accesses.iter().map(open).collect())
    }

    /// Makes what was written to host memory visible there.
    pub(super) fn commit(self) {
        for view in self.0 {
            if let View::Write(written) = view {
                written.commit();
            }
        }
    }

    /// Spans in the operation.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if the operation touches no span.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes of span `index`, which was declared as read. The slice does not borrow the views,
    /// so that others can be written meanwhile.
    ///
    /// # Errors
    /// [`Error::Job`] if there is no such span or it was declared as written (then
    /// [`write`](Self::write) gives its bytes).
    pub fn read(&self, index: usize) -> Result<&'a [u8]> {
        match self.0.get(index) {
            Some(View::Read(bytes)) => Ok(bytes),
            _ => Err(self.refuse(index, "read")),
        }
    }

    /// The bytes of span `index`, which was declared as written.
    ///
    /// # Errors
    /// [`Error::Job`] if there is no such span or it was declared as read only.
    pub fn write(&mut self, index: usize) -> Result<&mut [u8]> {
        let problem = self.refuse(index, "written");
        match self.0.get_mut(index) {
            Some(View::Write(written)) => Ok(written.bytes_mut()),
            _ => Err(problem),
        }
    }

    /// All at once, in the order of declaration.
    pub fn all(&mut self) -> &mut [View<'a>] {
        &mut self.0
    }

    fn refuse(&self, index: usize, how: &str) -> Error {
        Error::Job {
            pass: "views",
            problem: format!(
                "span {index} of the {} that the operation declared is not declared as {how}",
                self.0.len()
            ),
        }
    }
}

impl fmt::Debug for Views<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Views({} spans)", self.0.len())
    }
}

/// Bytes that an operation writes. Device memory is written in place; host memory, which
/// [`peek`](crate::Backend::peek) may be reading, through a copy that goes in word by word after
/// the operation has succeeded.
pub struct Written<'a>(Target<'a>);

enum Target<'a> {
    Device(&'a mut [u8]),
    Host { buffer: &'a Buffer, range: Range<u64>, copy: Vec<u64>, skip: usize },
}

impl Written<'_> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Target::Device(bytes) => bytes,
            Target::Host { range, copy, skip, .. } => {
                bytemuck::cast_slice(copy).get(within(range, *skip)).unwrap_or_default()
            }
        }
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Target::Device(bytes) => bytes,
            Target::Host { range, copy, skip, .. } => {
                bytemuck::cast_slice_mut(copy).get_mut(within(range, *skip)).unwrap_or_default()
            }
        }
    }

    pub(super) fn commit(self) {
        if let Target::Host { buffer, range, .. } = &self.0 {
            // SAFETY: `write` was called for an admitted write of this range, widened to words.
            unsafe { buffer.store_words(range, self.bytes()) };
        }
    }
}

impl fmt::Debug for Written<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Written({} bytes)", self.bytes().len())
    }
}

fn within(range: &Range<u64>, skip: usize) -> Range<usize> {
    skip..skip + (range.end - range.start) as usize
}

/// # Safety
/// The caller is an operation that the order checker has admitted with a read or a write of the
/// span, and the slice does not outlive it.
pub(super) unsafe fn read(span: &Span<Cpu>) -> &[u8] {
    // SAFETY: by this function's contract.
    unsafe { span.buffer().bytes(&span.range()) }
}

/// # Safety
/// The caller is an operation that the order checker has admitted with a write of the span; it
/// makes no other slice of these bytes while this one lives, and this one does not outlive it.
pub(super) unsafe fn write(span: &Span<Cpu>) -> Written<'_> {
    let (buffer, range) = (span.buffer(), span.range());
    Written(match buffer.memory() {
        // SAFETY: by this function's contract; an operation's touches are disjoint.
        Memory::Device => Target::Device(unsafe { buffer.bytes_mut(&range) }),
        Memory::Host => {
            // Kept at the same place within 8 bytes, so that words can be reached as words.
            let skip = (range.start % 8) as usize;
            let mut copy = vec![0_u64; (skip + span.len() as usize).div_ceil(8)];
            if let Some(bytes) =
                bytemuck::cast_slice_mut::<u64, u8>(&mut copy).get_mut(within(&range, skip))
            {
                // SAFETY: by this function's contract.
                bytes.copy_from_slice(unsafe { buffer.bytes(&range) });
            }
            Target::Host { buffer, range, copy, skip }
        }
    })
}

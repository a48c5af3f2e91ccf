//! What a device must be able to do.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::DType;
use crate::job::Job;

/// Where a buffer lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The device's own memory.
    Device,
    /// Memory that passes write and the host reads with [`Backend::peek`] without waiting for a
    /// stream: pinned host memory on a GPU.
    Host,
}

/// A device: memory, streams, events, and passes over lists of tensors. The value is a cheap handle;
/// clones mean the same device.
///
/// Operations on one stream run in the order in which they were issued; operations on different
/// streams run in any order that events do not forbid. Issuing never waits for the device, except
/// in [`download`](Self::download), [`synchronize`](Self::synchronize) and [`alloc`](Self::alloc).
/// An operation that fails after it was issued makes every later call on the backend return its
/// error, but for [`peek`](Self::peek): host memory is where the reason may stand.
pub trait Backend: Clone + fmt::Debug + Send + Sync + 'static {
    /// A piece of memory, freed when the last [`Span`] and the last operation that uses it are gone.
    type Buffer: Send + Sync + 'static;
    /// A queue of operations.
    type Stream: Clone + Send + Sync + 'static;
    /// A point in a stream.
    type Event: Clone + Send + Sync + 'static;
    /// A pass, ready to launch.
    type Plan: Send + Sync + 'static;
    /// A captured sequence of operations, ready to launch again and again.
    type Graph: Send + Sync + 'static;

    /// A name for errors and logs, such as `cpu` or `cuda:0`.
    fn name(&self) -> String;

    /// A zeroed buffer whose address is a multiple of 256 and never changes. Zero bytes are allowed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn alloc(&self, bytes: u64, memory: Memory) -> Result<Arc<Self::Buffer>>;

    /// The buffer's size in bytes.
    fn size(buffer: &Self::Buffer) -> u64;

    /// A new stream; the name appears in errors and traces.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn stream(&self, name: &str) -> Result<Self::Stream>;

    /// Prepares one pass: all jobs are of one kind (one variant of [`Job`]); an empty list is a
    /// pass that does nothing.
    ///
    /// # Errors
    /// [`Error::Job`] if kinds are mixed or a job's spans do not fit each other.
    fn plan(&self, jobs: &[Job<Self>]) -> Result<Self::Plan>;

    /// Launches a planned pass.
    ///
    /// # Errors
    /// What an earlier operation on this backend failed with, or the launch itself.
    fn run(&self, on: &Self::Stream, plan: &Self::Plan) -> Result<()>;

    /// Copies host bytes to the device in stream order; `bytes` may be reused at once.
    ///
    /// # Errors
    /// [`Error::Job`] if the lengths differ.
    fn upload(&self, on: &Self::Stream, bytes: &[u8], to: &Span<Self>) -> Result<()>;

    /// Copies device bytes to the host in stream order and waits for them.
    ///
    /// # Errors
    /// [`Error::Job`] if the lengths differ, or what an earlier operation failed with.
    fn download(&self, on: &Self::Stream, from: &Span<Self>, bytes: &mut [u8]) -> Result<()>;

    /// Copies within the device, in stream order. The spans must not overlap.
    ///
    /// # Errors
    /// [`Error::Job`] if the lengths differ.
    fn copy(&self, on: &Self::Stream, from: &Span<Self>, to: &Span<Self>) -> Result<()>;

    /// Sets every byte of the span, in stream order.
    ///
    /// # Errors
    /// What an earlier operation failed with.
    fn fill(&self, on: &Self::Stream, span: &Span<Self>, byte: u8) -> Result<()>;

    /// Reads memory of kind [`Memory::Host`] as it is now, without waiting for anything. Each
    /// aligned 32-bit word is read whole. On a backend that has failed, too.
    ///
    /// # Errors
    /// [`Error::Job`] if the span is not host memory.
    fn peek(&self, span: &Span<Self>) -> Result<Vec<u8>>;

    /// A point after everything issued on the stream so far.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn record(&self, on: &Self::Stream) -> Result<Self::Event>;

    /// Holds back what is issued on the stream from now on until the event has passed. `id` names
    /// the wait in tests that drop one wait at a time.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn wait(&self, on: &Self::Stream, event: &Self::Event, id: &'static str) -> Result<()>;

    /// Waits on the host until the event has passed.
    ///
    /// # Errors
    /// What an operation before the event failed with.
    fn wait_host(&self, event: &Self::Event) -> Result<()>;

    /// Waits on the host for everything issued on the stream so far.
    ///
    /// # Errors
    /// What an operation on this backend failed with.
    fn synchronize(&self, on: &Self::Stream) -> Result<()>;

    /// Captures what `issue` issues on `on`, and on every stream that waits for an event of it,
    /// instead of running it. Those streams must have been joined back into `on` by events before
    /// `issue` returns, and events do not cross the border of a capture. Uploads keep their bytes
    /// with the graph; downloads and waits on the host are refused.
    ///
    /// # Errors
    /// What `issue` returns; [`Error::Job`] if a capture is under way already or a stream is not
    /// joined; [`Error::Device`] if the driver refuses the capture.
    fn capture<T>(
        &self,
        on: &Self::Stream,
        issue: impl FnOnce() -> Result<T>,
    ) -> Result<(Self::Graph, T)>;

    /// Runs a captured graph: all of it after what the stream was given before, and before what it
    /// is given after. The same passes run on the same addresses; what may change between launches
    /// is what lies in device memory.
    ///
    /// # Errors
    /// What an earlier operation on this backend failed with, or the launch itself.
    fn launch(&self, on: &Self::Stream, graph: &Self::Graph) -> Result<()>;

    /// Fails if an operation on this backend has failed; never waits.
    ///
    /// # Errors
    /// That operation's error.
    fn check(&self) -> Result<()>;
}

/// A range of bytes in a buffer. Cloning shares the buffer. That two spans overlap is no error:
/// events, not borrows, say who may touch them when.
pub struct Span<B: Backend> {
    buffer: Arc<B::Buffer>,
    range: Range<u64>,
}

impl<B: Backend> Span<B> {
    /// The bytes `range` of the buffer.
    ///
    /// # Errors
    /// [`Error::SpanOutOfBounds`].
    pub fn new(buffer: &Arc<B::Buffer>, range: Range<u64>) -> Result<Self> {
        let len = B::size(buffer);
        if range.start > range.end || range.end > len {
            return Err(Error::SpanOutOfBounds { start: range.start, end: range.end, len });
        }
        Ok(Self { buffer: Arc::clone(buffer), range })
    }

    /// The whole buffer.
    pub fn whole(buffer: &Arc<B::Buffer>) -> Self {
        Self { buffer: Arc::clone(buffer), range: 0..B::size(buffer) }
    }

    /// A part of this span; `range` counts from its first byte.
    ///
    /// # Errors
    /// [`Error::SpanOutOfBounds`].
    pub fn sub(&self, range: Range<u64>) -> Result<Self> {
        if range.start > range.end || range.end > self.len() {
            return Err(Error::SpanOutOfBounds {
                start: range.start,
                end: range.end,
                len: self.len(),
            });
        }
        let from = self.range.start;
        Ok(Self { buffer: Arc::clone(&self.buffer), range: from + range.start..from + range.end })
    }

    /// Bytes in the span.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// True if it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffer that it lies in.
    pub fn buffer(&self) -> &Arc<B::Buffer> {
        &self.buffer
    }

    /// Its bytes, counted from the start of the buffer.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}

impl<B: Backend> Clone for Span<B> {
    fn clone(&self) -> Self {
        Self { buffer: Arc::clone(&self.buffer), range: self.range.clone() }
    }
}

impl<B: Backend> fmt::Debug for Span<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({:p}, {:?})", Arc::as_ptr(&self.buffer), self.range)
    }
}

/// A span and the type of the elements in it.
pub struct Tensor<B: Backend> {
    /// The bytes; a whole number of elements.
    pub span: Span<B>,
    /// The elements' type.
    pub dtype: DType,
}

impl<B: Backend> Tensor<B> {
    /// Pairs a span with a type.
    ///
    /// # Errors
    /// [`Error::Job`] if the span does not hold a whole number of aligned elements.
    pub fn new(span: Span<B>, dtype: DType) -> Result<Self> {
        let size = dtype.size();
        if !span.len().is_multiple_of(size) || !span.range().start.is_multiple_of(size) {
            return Err(Error::Job {
                pass: "tensor",
                problem: format!(
                    "bytes {:?} of a buffer are not whole, aligned {} elements",
                    span.range(),
                    dtype.name()
                ),
            });
        }
        Ok(Self { span, dtype })
    }

    /// Elements in the tensor.
    pub fn elements(&self) -> u64 {
        self.span.len() / self.dtype.size()
    }
}

impl<B: Backend> Clone for Tensor<B> {
    fn clone(&self) -> Self {
        Self { span: self.span.clone(), dtype: self.dtype }
    }
}

impl<B: Backend> fmt::Debug for Tensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype.name(), self.span)
    }
}

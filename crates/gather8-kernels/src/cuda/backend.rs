//! [`Backend`] for [`Cuda`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;
use sys::CUresult as Code;

use super::core::lock;
use super::handles::{EventInner, StreamInner};
use super::plan::PlanInner;
use super::staging::{PIECE, pinned_copy};
use super::{Buffer, Cuda, Event, Graph, Plan, Stream};
use crate::backend::{Backend, Memory, Span};
use crate::error::{Error, Result};
use crate::job::Job;

fn same_length(pass: &'static str, from: u64, to: u64) -> Result<()> {
    if from == to {
        return Ok(());
    }
    Err(Error::Job { pass, problem: format!("{from} bytes do not fit a span of {to} bytes") })
}

impl Cuda {
    /// Fails if a graph is being captured: the call would wait for work that is not running.
    fn not_captured(&self, pass: &'static str) -> Result<()> {
        if self.0.capturing.load(Ordering::Acquire) {
            return Err(Error::Job {
                pass,
                problem: "it waits for the device, which a captured graph cannot do: call it \
                          outside of the capture"
                    .to_owned(),
            });
        }
        Ok(())
    }

    /// Handles of another backend lead into another context.
    pub(super) fn own_stream<'a>(&self, on: &'a Stream) -> Result<&'a StreamInner> {
        if Arc::ptr_eq(&self.0, &on.0.core) {
            return Ok(&on.0);
        }
        Err(self.foreign("stream", &on.0.core.name))
    }

    fn foreign(&self, what: &str, of: &str) -> Error {
        Error::Device {
            device: self.0.name.clone(),
            what: format!("using a {what}"),
            reason: format!("it belongs to another backend ({of}): use one backend per rank"),
        }
    }
}

impl Backend for Cuda {
    type Buffer = Buffer;
    type Stream = Stream;
    type Event = Event;
    type Plan = Plan;
    type Graph = Graph;

    fn name(&self) -> String {
        self.0.name.clone()
    }

    fn alloc(&self, bytes: u64, memory: Memory) -> Result<Arc<Buffer>> {
        self.0.enter()?;
        Buffer::new(&self.0, bytes, memory).map(Arc::new)
    }

    fn size(buffer: &Buffer) -> u64 {
        buffer.bytes()
    }

    fn stream(&self, name: &str) -> Result<Stream> {
        self.0.enter()?;
        Stream::new(&self.0, name)
    }

    fn plan(&self, jobs: &[Job<Self>]) -> Result<Plan> {
        self.0.enter()?;
        PlanInner::new(&self.0, jobs).map(|plan| Plan(Arc::new(plan)))
    }

    fn run(&self, on: &Stream, plan: &Plan) -> Result<()> {
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        if !Arc::ptr_eq(&self.0, &plan.0.core) {
            return Err(self.foreign("plan", &plan.0.core.name));
        }
        self.0.keep(|| plan.0.clone());
        self.observe(|| format!("{plan:?}"), stream)?;
        for launch in &plan.0.launches {
            // The driver copies the arguments during the call and writes none of them.
            let mut arguments = [std::ptr::null_mut(); 4];
            for (pointer, argument) in arguments.iter_mut().zip(&launch.arguments) {
                *pointer = std::ptr::from_ref(argument).cast_mut().cast();
            }
            // SAFETY: a kernel of this context with its arguments; the plan's tables and buffers
            // live as long as the plan, and freeing them waits for the launch.
            let code = unsafe {
                sys::cuLaunchKernel(
                    launch.function.0,
                    launch.blocks,
                    1,
                    1,
                    launch.threads,
                    1,
                    1,
                    0,
                    stream.raw.0,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            self.0.check(launch.kernel, code)?;
        }
        Ok(())
    }

    fn upload(&self, on: &Stream, bytes: &[u8], to: &Span<Self>) -> Result<()> {
        same_length("upload", bytes.len() as u64, to.len())?;
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.observe(|| "upload".to_owned(), stream)?;
        if self.0.capturing.load(Ordering::Acquire) {
            // A graph repeats the copy, so the bytes stay with it.
            let memory = Arc::new(pinned_copy(&self.0, bytes)?);
            let host = memory.host.0;
            let buffer = Arc::clone(to.buffer());
            self.0.keep(move || Arc::new((memory, buffer)));
            // SAFETY: as many bytes on both sides, kept as long as the graph.
            let code = unsafe {
                sys::cuMemcpyHtoDAsync_v2(to.address(), host.cast(), bytes.len(), stream.raw.0)
            };
            return self.0.check("uploading", code);
        }
        let mut staging = lock(&self.0.staging);
        let mut address = to.address();
        for piece in bytes.chunks(PIECE) {
            staging.copy(&self.0, stream.raw.0, piece, address)?;
            address += piece.len() as u64;
        }
        Ok(())
    }

    fn download(&self, on: &Stream, from: &Span<Self>, bytes: &mut [u8]) -> Result<()> {
        same_length("download", from.len(), bytes.len() as u64)?;
        self.not_captured("download")?;
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        if !bytes.is_empty() {
            self.observe(|| "download".to_owned(), stream)?;
            // SAFETY: as many bytes on both sides; the call below waits before the borrow ends.
            let code = unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    bytes.as_mut_ptr().cast(),
                    from.address(),
                    bytes.len(),
                    stream.raw.0,
                )
            };
            self.0.check("downloading", code)?;
        }
        self.synchronize(on)
    }

    fn copy(&self, on: &Stream, from: &Span<Self>, to: &Span<Self>) -> Result<()> {
        same_length("copy", from.len(), to.len())?;
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        if from.is_empty() {
            return Ok(());
        }
        self.observe(|| "copy".to_owned(), stream)?;
        self.0.keep(|| Arc::new((Arc::clone(from.buffer()), Arc::clone(to.buffer()))));
        // SAFETY: as many bytes on both sides; freeing either buffer waits for the copy.
        let code = unsafe {
            sys::cuMemcpyDtoDAsync_v2(
                to.address(),
                from.address(),
                from.len() as usize,
                stream.raw.0,
            )
        };
        self.0.check("copying", code)
    }

    fn fill(&self, on: &Stream, span: &Span<Self>, byte: u8) -> Result<()> {
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        if span.is_empty() {
            return Ok(());
        }
        self.observe(|| "fill".to_owned(), stream)?;
        self.0.keep(|| span.buffer().clone());
        // SAFETY: bytes of a live buffer; freeing it waits for the fill.
        let code = unsafe {
            sys::cuMemsetD8Async(span.address(), byte, span.len() as usize, stream.raw.0)
        };
        self.0.check("filling", code)
    }

    /// Works on a backend that has failed, too: host memory is where the reason may stand.
    fn peek(&self, span: &Span<Self>) -> Result<Vec<u8>> {
        let Some(host) = span.buffer().host() else {
            return Err(Error::Job {
                pass: "peek",
                problem: format!(
                    "{:?} is device memory: allocate it as host memory, or download it",
                    span.buffer()
                ),
            });
        };
        let range = span.range();
        let mut bytes = Vec::with_capacity(span.len() as usize);
        let mut at = range.start;
        while at < range.end {
            let word = at & !3;
            let address = host.wrapping_add(word as usize);
            let stop = range.end.min(word + 4);
            let skip = (at - word) as usize;
            let take = (stop - at) as usize;
            // Allocations are rounded up to pages, so the last word is whole, too.
            // SAFETY: an aligned word of a live allocation, which a kernel may be writing.
            let value = unsafe { address.cast::<u32>().read_volatile() };
            bytes.extend(value.to_ne_bytes().iter().skip(skip).take(take));
            at = stop;
        }
        Ok(bytes)
    }

    fn record(&self, on: &Stream) -> Result<Event> {
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        let event = Event(Arc::new(EventInner { raw: self.0.event()?, core: Arc::clone(&self.0) }));
        // SAFETY: a live event and stream of this context.
        let code = unsafe { sys::cuEventRecord(event.0.raw.0, stream.raw.0) };
        self.0.check("recording an event", code)?;
        Ok(event)
    }

    fn wait(&self, on: &Stream, event: &Event, id: &'static str) -> Result<()> {
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        if !Arc::ptr_eq(&self.0, &event.0.core) {
            return Err(self.foreign("event", &event.0.core.name));
        }
        if self.0.observer.leaves_out(id) {
            return Ok(());
        }
        // SAFETY: a live event and stream of this context.
        let code = unsafe { sys::cuStreamWaitEvent(stream.raw.0, event.0.raw.0, 0) };
        self.0.check("waiting for an event", code)
    }

    fn wait_host(&self, event: &Event) -> Result<()> {
        self.not_captured("wait")?;
        self.0.enter()?;
        // SAFETY: a live event.
        let code = unsafe { sys::cuEventSynchronize(event.0.raw.0) };
        self.0.check("waiting for an event", code)?;
        self.0.check_failure()
    }

    fn synchronize(&self, on: &Stream) -> Result<()> {
        self.not_captured("synchronize")?;
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        // SAFETY: a live stream.
        let code = unsafe { sys::cuStreamSynchronize(stream.raw.0) };
        self.0.check(&format!("running what was issued on stream `{}`", stream.name), code)?;
        self.0.check_failure()
    }

    fn check(&self) -> Result<()> {
        self.0.enter()?;
        if self.0.capturing.load(Ordering::Acquire) {
            // A capture allows no query; the launch of its graph will tell.
            return Ok(());
        }
        // The service stream is idle; a context that has failed says so on any stream.
        // SAFETY: a live stream.
        match unsafe { sys::cuStreamQuery(self.0.service.0) } {
            Code::CUDA_ERROR_NOT_READY => Ok(()),
            code => self.0.check("an earlier operation", code),
        }
    }

    fn capture<T>(&self, on: &Stream, issue: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        self.capture_graph(self.own_stream(on)?, issue)
    }

    fn launch(&self, on: &Stream, graph: &Graph) -> Result<()> {
        self.own_stream(on)?;
        if !Arc::ptr_eq(&self.0, graph.core()) {
            return Err(self.foreign("graph", &graph.core().name));
        }
        graph.launch(on)
    }
}

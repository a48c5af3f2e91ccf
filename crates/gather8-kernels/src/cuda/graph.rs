//! Captured graphs: a sequence of operations that is launched at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;
use sys::CUgraphNodeType as NodeType;

use super::core::{Core, Keep, lock};
use super::driver::Handle;
use super::handles::StreamInner;
use super::{Cuda, Stream};
use crate::error::{Error, Result};

/// A captured sequence of operations, ready to launch. It keeps every plan and buffer that it uses.
///
/// A replay runs the same kernels on the same addresses. What may change between replays is what
/// lies in device memory: gradients, the groups' learning rates, the step count.
pub struct Graph {
    core: Arc<Core>,
    graph: Handle<sys::CUgraph>,
    executable: Handle<sys::CUgraphExec>,
    kernels: usize,
    nodes: usize,
    _kept: Vec<Keep>,
}

impl Cuda {
    /// [`Backend::capture`](crate::Backend::capture).
    pub(super) fn capture_graph<T>(
        &self,
        on: &StreamInner,
        issue: impl FnOnce() -> Result<T>,
    ) -> Result<(Graph, T)> {
        self.0.enter()?;
        {
            let mut capture = lock(&self.0.capture);
            if capture.is_some() {
                return Err(Error::Job {
                    pass: "capture",
                    problem: "another capture on this device has not ended".to_owned(),
                });
            }
            *capture = Some(Vec::new());
        }
        let ended = Ending { core: &self.0, on: on.raw, begun: false };
        self.0.capturing.store(true, Ordering::Release);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream.
        let code = unsafe { sys::cuStreamBeginCapture_v2(on.raw.0, mode) };
        self.0.check("beginning a capture", code)?;
        let mut ended = ended;
        ended.begun = true;
        let value = issue()?;
        let (graph, kept) = ended.end()?;
        let mut graph = Graph {
            core: Arc::clone(&self.0),
            graph,
            executable: Handle(std::ptr::null_mut()),
            kernels: 0,
            nodes: 0,
            _kept: kept,
        };
        (graph.nodes, graph.kernels) = graph.count()?;
        // SAFETY: a whole graph and a pointer to write to.
        let code =
            unsafe { sys::cuGraphInstantiateWithFlags(&mut graph.executable.0, graph.graph.0, 0) };
        self.0.check("instantiating a graph", code)?;
        Ok((graph, value))
    }
}

impl Graph {
    /// Launches everything that was captured, in stream order.
    ///
    /// # Errors
    /// What an earlier operation failed with, or the launch itself.
    pub fn launch(&self, on: &Stream) -> Result<()> {
        self.core.enter()?;
        // SAFETY: an instantiated graph and a live stream.
        let code = unsafe { sys::cuGraphLaunch(self.executable.0, on.0.raw.0) };
        self.core.check("launching a graph", code)
    }

    pub(super) const fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Kernels in it.
    pub const fn kernels(&self) -> usize {
        self.kernels
    }

    /// Nodes of any kind in it: kernels, copies, fills.
    pub const fn nodes(&self) -> usize {
        self.nodes
    }

    fn count(&self) -> Result<(usize, usize)> {
        let mut count = 0;
        // SAFETY: without an array only the number is written.
        let code = unsafe { sys::cuGraphGetNodes(self.graph.0, std::ptr::null_mut(), &mut count) };
        self.core.check("counting a graph's nodes", code)?;
        let mut nodes = vec![std::ptr::null_mut(); count];
        // SAFETY: an array of as many nodes as it is told.
        let code = unsafe { sys::cuGraphGetNodes(self.graph.0, nodes.as_mut_ptr(), &mut count) };
        self.core.check("listing a graph's nodes", code)?;
        let mut kernels = 0;
        for node in nodes {
            let mut kind = NodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            // SAFETY: a node of this graph and a value to write to.
            self.core.check("asking for a node's kind", unsafe {
                sys::cuGraphNodeGetType(node, &mut kind)
            })?;
            kernels += usize::from(kind == NodeType::CU_GRAPH_NODE_TYPE_KERNEL);
        }
        Ok((count, kernels))
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} nodes, {} kernels)", self.nodes, self.kernels)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.core.bind().is_ok() {
            if !self.executable.0.is_null() {
                // SAFETY: instantiated here; a replay in flight is left to finish by the driver.
                unsafe { sys::cuGraphExecDestroy(self.executable.0) };
            }
            // SAFETY: captured here, destroyed once.
            unsafe { sys::cuGraphDestroy(self.graph.0) };
        }
    }
}

/// Ends the capture however `issue` ends, by a panic too.
struct Ending<'a> {
    core: &'a Core,
    on: Handle<sys::CUstream>,
    begun: bool,
}

impl Ending<'_> {
    fn end(mut self) -> Result<(Handle<sys::CUgraph>, Vec<Keep>)> {
        self.begun = false;
        let mut graph = std::ptr::null_mut();
        // SAFETY: a stream whose capture this value has seen begin.
        let code = unsafe { sys::cuStreamEndCapture(self.on.0, &mut graph) };
        let kept = lock(&self.core.capture).take().unwrap_or_default();
        self.core.check("ending a capture", code)?;
        Ok((Handle(graph), kept))
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if self.begun {
            let mut graph = std::ptr::null_mut();
            // SAFETY: a stream whose capture this value has seen begin.
            let code = unsafe { sys::cuStreamEndCapture(self.on.0, &mut graph) };
            if code == sys::CUresult::CUDA_SUCCESS && !graph.is_null() {
                // SAFETY: just captured, and nobody else's.
                unsafe { sys::cuGraphDestroy(graph) };
            }
        }
        self.core.capturing.store(false, Ordering::Release);
        lock(&self.core.capture).take();
    }
}

//! The CUDA backend against the CPU backend, bit by bit. Every test needs a GPU, so each is ignored
//! by default: `cargo test -p gather8-kernels --features cuda --release --test cuda -- --ignored`,
//! or the bundle of `.ci/gpu-bundle` on a machine without Rust.
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "the helpers of tests fail as tests do"
)]

mod bench;
mod exhaustive;
mod graphs;
mod handles;
mod optimizer;
mod passes;
#[path = "../support/mod.rs"]
mod support;
mod tables;

use std::sync::OnceLock;

use bytemuck::Pod;
use gather8_kernels::cpu::Cpu;
use gather8_kernels::cuda::Cuda;
use gather8_kernels::{Backend, DType, Job, Memory, Span, Tensor};

/// One device for all tests of the program.
pub(crate) fn cuda() -> Cuda {
    static CUDA: OnceLock<Cuda> = OnceLock::new();
    CUDA.get_or_init(|| Cuda::new(0).unwrap_or_else(|error| panic!("{error}"))).clone()
}

/// The reference, on every core.
pub(crate) fn cpu() -> Cpu {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Cpu::builder().threads(cores).build()
}

/// A backend and a stream on it.
pub(crate) struct Desk<B: Backend> {
    pub(crate) backend: B,
    pub(crate) stream: B::Stream,
}

impl<B: Backend> Desk<B> {
    pub(crate) fn new(backend: B) -> Self {
        let stream = backend.stream("test").unwrap();
        Self { backend, stream }
    }

    /// A span with these bytes, `skew` bytes away from a multiple of 256.
    pub(crate) fn put<T: Pod>(&self, values: &[T], skew: u64) -> Span<B> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let len = bytes.len() as u64 + skew;
        let buffer = self.backend.alloc(len, Memory::Device).unwrap();
        let span = Span::new(&buffer, skew..skew + bytes.len() as u64).unwrap();
        self.backend.upload(&self.stream, bytes, &span).unwrap();
        span
    }

    pub(crate) fn tensor<T: Pod>(&self, values: &[T], dtype: DType, skew: u64) -> Tensor<B> {
        Tensor::new(self.put(values, skew * dtype.size()), dtype).unwrap()
    }

    pub(crate) fn get(&self, span: &Span<B>) -> Vec<u8> {
        let mut bytes = vec![0; span.len() as usize];
        self.backend.download(&self.stream, span, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn get_as<T: Pod>(&self, span: &Span<B>) -> Vec<T> {
        bytemuck::pod_collect_to_vec(&self.get(span))
    }

    pub(crate) fn run(&self, jobs: &[Job<B>]) {
        let plan = self.backend.plan(jobs).unwrap_or_else(|error| panic!("{error}"));
        self.backend.run(&self.stream, &plan).unwrap();
    }
}

/// Runs a case on both backends and compares what it returns.
macro_rules! same {
    ($case:expr) => {{
        let expected = $case(&$crate::Desk::new($crate::cpu()));
        let found = $case(&$crate::Desk::new($crate::cuda()));
        assert_eq!(expected.len(), found.len());
        for ((what, expected), (_, found)) in expected.iter().zip(&found) {
            $crate::compare(what, expected, found);
        }
    }};
}
pub(crate) use same;

/// Compares bytes; names the first difference.
pub(crate) fn compare(what: &str, expected: &[u8], found: &[u8]) {
    assert_eq!(expected.len(), found.len(), "{what}: lengths");
    if let Some(at) = expected.iter().zip(found).position(|(a, b)| a != b) {
        let around = at / 16 * 16..(at / 16 * 16 + 16).min(found.len());
        panic!(
            "{what}: byte {at} of {} differs: the CPU has {:02x?}, the GPU {:02x?}",
            found.len(),
            &expected[around.clone()],
            &found[around]
        );
    }
}

/// Lengths that meet every edge of the kernels' tiles. `GATHER8_TEST_LENGTH` leaves out those above
/// it, for tools that look at every access.
pub(crate) fn lengths() -> impl Iterator<Item = usize> + Clone {
    let most = std::env::var("GATHER8_TEST_LENGTH").map_or(usize::MAX, |most| {
        most.parse().expect("GATHER8_TEST_LENGTH is a number of elements")
    });
    LENGTHS.into_iter().filter(move |&elements| elements <= most)
}

const LENGTHS: [usize; 27] = [
    0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 17, 31, 33, 255, 256, 257, 511, 1025, 2048, 4095, 4097, 8191,
    8192, 8193, 16_385, 40_000, 100_003,
];

/// What cases return: a name and bytes.
pub(crate) type Results = Vec<(String, Vec<u8>)>;

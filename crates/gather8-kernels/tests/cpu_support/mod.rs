//! What the tests of the CPU backend share.
#![allow(dead_code, unreachable_pub, reason = "every test file uses a part of it")]

use std::sync::Arc;

use bytemuck::{NoUninit, Pod};
use gather8_kernels::backend::{Backend, Memory, Span, Tensor};
use gather8_kernels::cpu::{Cpu, Stream};
use gather8_kernels::{DType, Error, Job};

/// A span over a new device buffer.
pub fn device(cpu: &Cpu, bytes: usize) -> Span<Cpu> {
    Span::whole(&cpu.alloc(bytes as u64, Memory::Device).unwrap())
}

/// A span over a new device buffer that holds these values; the upload is over on return.
pub fn holding<T: NoUninit>(cpu: &Cpu, on: &Stream, values: &[T]) -> Span<Cpu> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let span = device(cpu, bytes.len());
    cpu.upload(on, bytes, &span).unwrap();
    cpu.synchronize(on).unwrap();
    span
}

/// The span's values, downloaded.
pub fn values<T: Pod>(cpu: &Cpu, on: &Stream, span: &Span<Cpu>) -> Vec<T> {
    let mut values = vec![T::zeroed(); span.len() as usize / size_of::<T>()];
    cpu.download(on, span, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

/// A tensor over all of a span.
pub fn tensor(span: &Span<Cpu>, dtype: DType) -> Tensor<Cpu> {
    Tensor::new(span.clone(), dtype).unwrap()
}

/// Plans and runs one pass and waits for it.
pub fn run(cpu: &Cpu, on: &Stream, jobs: &[Job<Cpu>]) {
    cpu.run(on, &cpu.plan(jobs).unwrap()).unwrap();
    cpu.synchronize(on).unwrap();
}

/// The names that an order error holds: first, its stream, second, its stream.
pub fn names(result: gather8_kernels::Result<()>) -> [String; 4] {
    match result {
        Err(Error::Unordered { first, first_stream, second, second_stream, .. }) => {
            [first, first_stream, second, second_stream]
        }
        other => panic!("an order error was due, not {other:?}"),
    }
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    pub fn bf16s(&mut self, n: usize) -> Vec<u16> {
        (0..n).map(|_| gather8_kernels::scalar::f32_to_bf16(self.float())).collect()
    }
}

/// An error for operations that fail on purpose.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub &'static str);

pub type Source = Arc<dyn std::error::Error + Send + Sync>;

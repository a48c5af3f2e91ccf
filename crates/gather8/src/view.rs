//! A gathered weight in use.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gather8_kernels::layout::BytesRecord;
use gather8_kernels::scalar::{self, ElementsMut};
use gather8_kernels::{Backend, DType, Span};

use crate::error::{Error, Result};
use crate::hooks::{Encoding, Unsharded};

/// One stay of a unit in gathered form.
pub(crate) struct Residence<B: Backend> {
    pub(crate) unit_name: String,
    /// Number of the place that it is gathered to.
    pub(crate) place: usize,
    /// After the gather.
    pub(crate) ready: B::Event,
    pub(crate) released: AtomicBool,
    /// Guards that keep it.
    pub(crate) guards: AtomicUsize,
    /// The streams that read the weights: each has waited for `ready`.
    pub(crate) consumers: Mutex<Vec<B::Stream>>,
}

impl<B: Backend> Residence<B> {
    pub(crate) fn add_consumer(&self, stream: &B::Stream) {
        self.consumers.lock().unwrap_or_else(PoisonError::into_inner).push(stream.clone());
    }

    pub(crate) fn consumers(&self) -> Vec<B::Stream> {
        self.consumers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A whole weight, valid until its unit is resharded; after that every method returns
/// [`Error::UsedAfterReshard`].
#[derive(Clone)]
pub struct WeightView<B: Backend> {
    pub(crate) backend: B,
    pub(crate) residence: Arc<Residence<B>>,
    pub(crate) unsharded: Unsharded<B>,
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    /// The stream that the view was asked on.
    pub(crate) stream: B::Stream,
}

impl<B: Backend> WeightView<B> {
    /// The weight's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its dimensions.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The gathered elements and how to read them: for kernels of the trainer's own, on the compute
    /// stream or on a stream that was [registered](Self::register).
    ///
    /// # Errors
    /// [`Error::UsedAfterReshard`].
    pub fn unsharded(&self) -> Result<&Unsharded<B>> {
        self.check()?;
        Ok(&self.unsharded)
    }

    /// Lets `stream` read the weight: it waits for the gather now, and whoever overwrites the bytes
    /// after the reshard waits for it.
    ///
    /// # Errors
    /// [`Error::UsedAfterReshard`]; a failure of the device.
    pub fn register(&self, stream: &B::Stream) -> Result<()> {
        self.check()?;
        self.backend.wait(stream, &self.residence.ready, "use-after-gather")?;
        self.residence.add_consumer(stream);
        Ok(())
    }

    /// The scale that decodes the bytes (value = code × it); `None` for a weight that is gathered
    /// as stored. Waits for the gather.
    ///
    /// # Errors
    /// [`Error::UsedAfterReshard`]; a failure of the gather.
    pub fn scale_inv(&self) -> Result<Option<f32>> {
        self.check()?;
        match &self.unsharded.encoding {
            Encoding::Float8 { record, .. } => Ok(Some(self.record(record)?.scale_inv)),
            Encoding::Stored(_) => Ok(None),
        }
    }

    /// The gathered bytes on the host: float8 codes, or elements as stored (little endian).
    ///
    /// # Errors
    /// [`Error::UsedAfterReshard`]; a failure of the gather.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check()?;
        self.fetch(&self.unsharded.bytes)
    }

    /// The decoded weight on the host, row-major: `f32(code) * scale_inv` in f32 for float8.
    ///
    /// # Errors
    /// [`Error::UsedAfterReshard`]; a failure of the gather.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        self.check()?;
        let bytes = self.fetch(&self.unsharded.bytes)?;
        Ok(match &self.unsharded.encoding {
            Encoding::Float8 { format, record } => {
                let scale_inv = self.record(record)?.scale_inv;
                let mut values = vec![0.0; bytes.len()];
                scalar::decode(&bytes, *format, scale_inv, ElementsMut::F32(&mut values));
                values
            }
            Encoding::Stored(DType::F32) => bytemuck::pod_collect_to_vec::<u8, f32>(&bytes),
            Encoding::Stored(DType::F16) => bytemuck::pod_collect_to_vec::<u8, u16>(&bytes)
                .into_iter()
                .map(|bits| half::f16::from_bits(bits).to_f32())
                .collect(),
            Encoding::Stored(_) => bytemuck::pod_collect_to_vec::<u8, u16>(&bytes)
                .into_iter()
                .map(scalar::bf16_to_f32)
                .collect(),
        })
    }

    fn record(&self, span: &Span<B>) -> Result<BytesRecord> {
        let bytes = self.fetch(span)?;
        Ok(bytemuck::pod_read_unaligned(&bytes))
    }

    fn fetch(&self, span: &Span<B>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(span.len()).unwrap_or(usize::MAX)];
        self.backend.download(&self.stream, span, &mut bytes)?;
        Ok(bytes)
    }

    fn check(&self) -> Result<()> {
        if self.residence.released.load(Ordering::Acquire) {
            return Err(Error::UsedAfterReshard {
                weight: self.name.clone(),
                unit: self.residence.unit_name.clone(),
            });
        }
        Ok(())
    }
}

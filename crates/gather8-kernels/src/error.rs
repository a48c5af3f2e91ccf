//! One error enum for the crate.

use std::sync::Arc;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in a pass or on a backend. Cloneable: a stream that failed gives the same
/// error to every later call.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A span reaches beyond its buffer.
    #[error("span {start}..{end} lies outside a buffer of {len} bytes")]
    SpanOutOfBounds {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Bytes in the buffer.
        len: u64,
    },
    /// A job's spans do not fit each other.
    #[error("{pass}: {problem}")]
    Job {
        /// The pass, such as `cast`.
        pass: &'static str,
        /// What does not fit, with the sizes.
        problem: String,
    },
    /// A scale was asked of an amax that is NaN or infinite.
    #[error(
        "no scale exists for the non-finite amax {amax}: find the NaN or infinity in the tensor first"
    )]
    NonFiniteAmax {
        /// The amax.
        amax: f32,
    },
    /// A recipe value lies outside its range.
    #[error("{name} must lie in {range}, not {value}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// The allowed values.
        range: &'static str,
        /// What was given.
        value: String,
    },
    /// Memory for a buffer could not be had.
    #[error("{device}: cannot allocate {bytes} bytes: {reason}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        bytes: u64,
        /// What the allocator said.
        reason: String,
    },
    /// Two operations touch the same bytes and no event orders them.
    #[error(
        "{second} on stream `{second_stream}` is not ordered after {first} on stream `{first_stream}`, \
         which touches the same bytes ({start}..{end} of buffer {buffer}): record an event after the first and wait for it"
    )]
    Unordered {
        /// The operation that was issued earlier.
        first: String,
        /// Its stream.
        first_stream: String,
        /// The operation that was refused.
        second: String,
        /// Its stream.
        second_stream: String,
        /// The buffer's number.
        buffer: u64,
        /// First shared byte.
        start: u64,
        /// One past the last shared byte.
        end: u64,
    },
    /// An operation on a stream failed after it was issued.
    #[error("{source}")]
    Stream {
        /// The operation.
        operation: String,
        /// Why; collectives put their own error here.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The device, its driver or its compiler said no.
    #[error("{device}: {what}: {reason}")]
    Device {
        /// The device or library.
        device: String,
        /// The call.
        what: String,
        /// What it answered, and what to do.
        reason: String,
    },
}

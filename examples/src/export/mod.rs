//! A checkpoint in float8: every matrix of a safetensors file is sharded over ranks and gathered
//! through the runtime, as a training step would, and the gathered bytes are written.
//!
//! A two-dimensional F32, F16 or BF16 tensor `x` becomes float8 codes under the name `x` and one F32
//! scalar `x_scale`, the factor that decodes (value = code × it). Everything else, tensors without
//! elements among it, and the metadata pass through unchanged. What is written does not depend on
//! the number of ranks.
//!
//! Memory: one batch of matrices at a time, which is no larger than the largest matrix (or
//! [`SMALLEST_BATCH`] elements). Per element of it every rank holds one gathered byte, and all ranks
//! together some 16 bytes: the shards, their float8 bytes, and what is on its way between them.

mod layout;
mod progress;
mod ranks;
mod source;
mod target;
mod text;

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use gather8_kernels::{Backend, Format};

use crate::seat::Seat;

pub use progress::{Progress, Silent};
pub use ranks::SMALLEST_BATCH;
pub use source::{LONGEST_HEADER, Source};
pub use text::one_line;

use layout::Layout;
use target::Target;

/// What to make.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Ranks to shard over; at least 1.
    pub ranks: u32,
    /// The float8 format.
    pub format: Format,
}

/// What was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Tensors that are float8 now.
    pub converted: usize,
    /// Tensors that passed through.
    pub unchanged: usize,
    /// The input's and the output's size in bytes.
    pub bytes: (u64, u64),
}

/// How long ranks that have opened their inputs wait for each other.
const AGREEMENT: Duration = Duration::from_secs(60);

/// The others wait while rank 0 writes, as slow as its disk may be.
const PATIENCE: Duration = Duration::from_secs(86_400);

/// Converts `input` into `output`, with ranks as threads of this process. The output appears whole
/// or not at all: it is written under a temporary name in the same folder, flushed to the disk and
/// renamed.
///
/// # Errors
/// An input that is missing, no regular file, or no valid safetensors file; a weight with a NaN or
/// an infinity; a tensor whose name is needed for a scale; an output that is the input, or cannot
/// be written. `output` is untouched then.
pub fn export(
    input: &Path,
    output: &Path,
    options: Options,
    progress: &mut (dyn Progress + Send),
) -> Result<Summary> {
    if options.ranks == 0 {
        bail!("a world of 0 ranks holds no weights: ask for at least 1");
    }
    let source = Source::open(input)?;
    let layout = Layout::new(&source, options.format)?;
    let mut target = begin(&source, &layout, output)?;
    progress.begin(source.data_bytes());
    ranks::convert(&source, &layout, &mut target, options, progress)?;
    finish(&source, &layout, target, progress)?;
    Ok(summary(&source, &layout))
}

/// This process's part of the same, as one rank of many; every rank calls it with the same
/// arguments. All read the input, rank 0 writes the output and tells the progress.
///
/// # Errors
/// As [`export`], on every rank; inputs that differ; a rank that is lost.
pub fn export_rank<B: Backend>(
    input: &Path,
    output: &Path,
    format: Format,
    seat: &Seat<B>,
    progress: &mut (dyn Progress + Send),
) -> Result<Summary> {
    let prepare = || {
        let source = Source::open(input)?;
        let layout = Layout::new(&source, format)?;
        let target = if seat.is_first() { Some(begin(&source, &layout, output)?) } else { None };
        let mut lines = source.describe()?;
        lines.push(format!("--format {}", format.name()));
        Ok((source, layout, target, lines))
    };
    let (source, layout, mut target, lines) = seat.agree(prepare(), "export's start", PATIENCE)?;
    gather8::agree(&*seat.communicator, AGREEMENT, &lines)?;
    progress.begin(source.data_bytes());
    let converted = ranks::convert_rank(&source, &layout, target.as_mut(), format, seat, progress);
    converted.inspect_err(|error| seat.announce(&format!("{error:#}")))?;
    let finished = match target {
        Some(target) => finish(&source, &layout, target, progress),
        None => Ok(()),
    };
    seat.agree(finished, "export's end", PATIENCE)?;
    Ok(summary(&source, &layout))
}

fn begin(source: &Source, layout: &Layout, output: &Path) -> Result<Target> {
    let mut target = Target::create(output, source)?;
    target.write_at(0, layout.header())?;
    Ok(target)
}

/// What passes through unchanged, and the end.
fn finish(
    source: &Source,
    layout: &Layout,
    mut target: Target,
    progress: &mut (dyn Progress + Send),
) -> Result<()> {
    for (from, to) in layout.copies() {
        source.read_chunks(from, |offset, chunk| {
            target.write_at(to + offset, chunk)?;
            progress.advance(chunk.len() as u64);
            Ok(())
        })?;
    }
    target.finish(layout.file_bytes())?;
    progress.end();
    Ok(())
}

fn summary(source: &Source, layout: &Layout) -> Summary {
    Summary {
        converted: layout.matrices().len(),
        unchanged: source.tensors().len() - layout.matrices().len(),
        bytes: (source.file_bytes(), layout.file_bytes()),
    }
}

//! What every rank does: shard a batch of matrices, gather it in float8, and, on rank 0, write it.

use std::panic::resume_unwind;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use gather8::collectives::{self, Communicator, LocalWorld};
use gather8::config::Deadline;
use gather8::hooks::Encoding;
use gather8::{Config, Fsdp, Scaling, UnitId, UnitSpec, WeightId, WeightSpec};
use gather8_kernels::cpu::Cpu;
use gather8_kernels::{Backend, Format};

use super::Options;
use super::layout::{Layout, Matrix};
use super::progress::Progress;
use super::source::{Entry, Source};
use super::target::Target;
use crate::seat::Seat;

/// Small matrices are gathered together, so many elements at a time.
pub const SMALLEST_BATCH: u64 = 1 << 20;

/// Matrices in one batch at most.
const LARGEST_BATCH: usize = 256;

/// Where rank 0 leaves what was gathered.
struct Sink<'a> {
    target: &'a mut Target,
    progress: &'a mut (dyn Progress + Send),
}

/// Converts every matrix, with ranks as threads of this process.
pub(super) fn convert(
    source: &Source,
    layout: &Layout,
    target: &mut Target,
    options: Options,
    progress: &mut (dyn Progress + Send),
) -> Result<()> {
    let batches = batches(source, layout, options.ranks)?;
    if batches.is_empty() {
        return Ok(());
    }
    let world = LocalWorld::new(options.ranks);
    let mut sink = Some(Sink { target, progress });
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let mut ranks = Vec::new();
        for rank in 0..options.ranks {
            let (world, batches, sink) = (&world, &batches, sink.take());
            let work = move || {
                let backend = Cpu::builder().name(format!("cpu of rank {rank}")).build();
                let communicator = world.rank(rank, backend.clone())?;
                run(&backend, &communicator, source, batches, options, sink)
            };
            let thread = std::thread::Builder::new().name(format!("rank {rank}"));
            let started = thread.spawn_scoped(scope, work).with_context(|| {
                format!("cannot start a thread for rank {rank}: raise the limit on threads, or use fewer ranks")
            });
            let failed = started.is_err();
            ranks.push(started);
            if failed {
                // Taken and dropped: the ranks that wait for this one see that it has left.
                drop(world.rank(rank, Cpu::new()));
                break;
            }
        }
        let join = |rank: Result<std::thread::ScopedJoinHandle<'_, _>>| match rank {
            Ok(handle) => handle.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(error) => Err(error),
        };
        ranks.into_iter().map(join).collect()
    });
    root_cause(results)
}

/// Converts every matrix, as one rank of many processes; `target` is rank 0's.
pub(super) fn convert_rank<B: Backend>(
    source: &Source,
    layout: &Layout,
    target: Option<&mut Target>,
    format: Format,
    seat: &Seat<B>,
    progress: &mut (dyn Progress + Send),
) -> Result<()> {
    let options = Options { ranks: seat.communicator.world(), format };
    let batches = batches(source, layout, options.ranks)?;
    let sink = target.map(|target| Sink { target, progress });
    run(&seat.backend, &seat.communicator, source, &batches, options, sink)
}

/// The error that came first: not one that only blames another rank.
fn root_cause(results: Vec<Result<()>>) -> Result<()> {
    let mut errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    let own = |error: &anyhow::Error| {
        let error = error.downcast_ref::<gather8::Error>();
        error.is_none_or(|error| error.blamed_rank().is_none())
    };
    let first = errors.iter().position(own).unwrap_or(0);
    if errors.is_empty() { Ok(()) } else { Err(errors.swap_remove(first)) }
}

/// A matrix and its place in the source.
type Item<'a> = (&'a Entry, &'a Matrix);

/// Neighbours together, as long as they are no larger than the largest matrix alone.
fn batches<'a>(source: &'a Source, layout: &'a Layout, ranks: u32) -> Result<Vec<Vec<Item<'a>>>> {
    let cost = |entry: &Entry| {
        let (rows, columns) = entry.rows_and_columns();
        let padded = rows.div_ceil(u64::from(ranks)) * u64::from(ranks);
        padded.checked_mul(columns)
    };
    let mut items = Vec::new();
    for matrix in layout.matrices() {
        let entry = source.tensors().get(matrix.tensor);
        let entry = entry.ok_or_else(|| anyhow!("a matrix without a tensor; report this"))?;
        let cost = cost(entry).ok_or_else(|| {
            anyhow!("`{}` with shape {:?} is too large to shard", entry.name, entry.shape)
        })?;
        items.push(((entry, matrix), cost));
    }
    let limit = items.iter().map(|(_, cost)| *cost).max().unwrap_or(0).max(SMALLEST_BATCH);
    let mut batches: Vec<Vec<Item<'a>>> = Vec::new();
    let mut size = 0;
    for (item, cost) in items {
        match batches.last_mut() {
            Some(batch) if size + cost <= limit && batch.len() < LARGEST_BATCH => {
                size += cost;
                batch.push(item);
            }
            _ => {
                size = cost;
                batches.push(vec![item]);
            }
        }
    }
    Ok(batches)
}

fn config(options: Options) -> Config {
    let mut config = Config::default();
    config.gather.format = options.format;
    config.scaling = Scaling::Dynamic;
    // One batch is gathered at a time, so a second slot would only take memory.
    config.gather.arena_slots = 1;
    config.gather.prefetch = 0;
    config.deadline = Deadline(super::PATIENCE.as_secs_f64());
    config
}

/// One rank's work; every rank makes the same calls. `sink` is rank 0's.
fn run<B: Backend>(
    backend: &B,
    communicator: &Arc<dyn Communicator<B>>,
    source: &Source,
    batches: &[Vec<Item<'_>>],
    options: Options,
    mut sink: Option<Sink<'_>>,
) -> Result<()> {
    let mut bad = Vec::new();
    for batch in batches {
        let fsdp = match shard(backend, communicator, source, batch, options) {
            // All of them are looked for, so that one repair is enough.
            Err(gather8::Error::Collective(collectives::Error::NonFiniteWeights { names })) => {
                let named = |(_, matrix): &&Item<'_>| names.contains(&label(matrix));
                bad.extend(batch.iter().filter(named).map(|(entry, _)| entry.name.clone()));
                continue;
            }
            Ok(_) if !bad.is_empty() => continue,
            other => other?,
        };
        let guard = fsdp.unshard(UnitId(0))?;
        for (number, &(entry, matrix)) in batch.iter().enumerate() {
            let view = guard.weight(WeightId(number))?;
            if !matches!(view.unsharded()?.encoding, Encoding::Float8 { .. }) {
                bail!("`{}` was not gathered in float8; report this", entry.name);
            }
            // Every rank asks, and so waits for its part of the gather.
            let scale = view.scale_inv()?;
            let Some(sink) = &mut sink else { continue };
            let scale = scale.ok_or_else(|| anyhow!("`{}` has no scale; report this", entry.name));
            sink.target.write_at(matrix.scale, &scale?.to_le_bytes())?;
            sink.target.write_at(matrix.codes, &view.to_bytes()?)?;
            sink.progress.advance(entry.range.end - entry.range.start);
        }
        guard.reshard()?;
    }
    if bad.is_empty() { Ok(()) } else { Err(non_finite(&bad)) }
}

/// A runtime that holds one batch as frozen weights, stored as the file stores them.
fn shard<B: Backend>(
    backend: &B,
    communicator: &Arc<dyn Communicator<B>>,
    source: &Source,
    batch: &[Item<'_>],
    options: Options,
) -> gather8::Result<Fsdp<B>> {
    let weights = batch.iter().map(|(entry, matrix)| {
        let (rows, columns) = entry.rows_and_columns();
        WeightSpec::float8(label(matrix), [rows, columns]).stored_as(matrix.dtype).frozen()
    });
    let unit = UnitSpec::new("batch", weights.collect::<Vec<_>>());
    let mut items = batch.iter();
    Fsdp::builder(config(options), backend.clone(), Arc::clone(communicator)).unit(unit).build(
        |spec, rows| {
            // Weights are filled in their order, but ranks without rows are not asked.
            let found = items.find(|(_, matrix)| label(matrix) == spec.name);
            let (entry, matrix) =
                found.ok_or_else(|| anyhow!("it was asked for out of order; report this"))?;
            source.rows(entry, matrix.dtype, rows)
        },
    )
}

/// A matrix's name in the runtime, which takes fewer names than files hold.
fn label(matrix: &Matrix) -> String {
    format!("tensor {}", matrix.tensor)
}

/// Weights that float8 cannot hold, in words that fit a file.
fn non_finite(names: &[String]) -> anyhow::Error {
    let mut list = names.iter().take(5).map(|name| format!("`{name}`")).collect::<Vec<_>>();
    if names.len() > list.len() {
        list.push(format!("{} more", names.len() - list.len()));
    }
    anyhow!(
        "{} {} a NaN or an infinity, for which no float8 scale exists: repair the weights in the input",
        list.join(", "),
        if names.len() == 1 { "holds" } else { "hold" }
    )
}

//! The gather of whole units, next to the same bytes through the communicator alone.
//!
//! Every run of one is followed by a run of the other, on the same ranks, so that both see the same
//! machine. Before each the ranks wait for each other on the device. Bytes are cast already; what
//! is timed is from the moment at which a unit's memory is free to the moment at which its weights
//! may be read. Times are medians of every rank, and the slowest rank counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use gather8::config::GatherType;
use gather8::{Config, Fsdp, UnitId, UnitSpec, WeightId, WeightSpec};
use gather8_collectives::{AmaxTable, Communicator, Op, Reduce, SlotKind, SlotSpec, TableConfig};
use gather8_kernels::{Backend, Format, Memory, Span};
use serde::Serialize;

use super::device::Clock;
use super::measure::median;
use super::model::BLOCK;
use super::report::Figure;
use crate::random::Stream;

const DEADLINE: Duration = Duration::from_secs(120);

/// Runs of everything that do not count.
const WARM_UP: u32 = 3;

/// Units that are gathered one after the other: rows and columns of every weight.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its name.
    pub name: &'static str,
    /// Every unit's weights.
    pub units: Vec<Vec<[u64; 2]>>,
}

impl Shape {
    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        self.units.iter().flatten().map(|[rows, columns]| rows * columns).sum()
    }
}

/// Units of 25 to 436 million parameters, and a model of four; every number of columns divided.
pub fn shapes(divisor: u64) -> Vec<Shape> {
    let block = BLOCK.map(|[rows, columns]| [rows, (columns / divisor).max(1)]);
    let [query, key, value, _, up, ..] = block;
    let shape = |name, units: &[&[[u64; 2]]]| Shape {
        name,
        units: units.iter().map(|unit| unit.to_vec()).collect(),
    };
    vec![
        shape("q, k, v", &[&[query, key, value]]),
        shape("one projection", &[&[up]]),
        shape("one block", &[&block]),
        shape("two blocks as a unit", &[&[block, block].concat()]),
        shape("four blocks", &[&block, &block, &block, &block]),
    ]
}

/// The buffers of one unit: every weight's shard and whole.
type Parts<B> = Vec<(Span<B>, Span<B>)>;

/// One shape in one type.
#[derive(Clone, Debug, Serialize)]
pub struct Gathered {
    /// The shape's name.
    pub shape: &'static str,
    /// Units that are gathered one after the other.
    pub units: usize,
    /// Weights of all units.
    pub weights: usize,
    /// Their elements.
    pub parameters: u64,
    /// `float8` or `bf16`.
    pub dtype: &'static str,
    /// Bytes that lie on every rank afterwards.
    pub bytes: u64,
    /// The communicator's all-gather, a group per unit.
    pub raw_seconds: f64,
    /// The runtime's unshard.
    pub unshard_seconds: f64,
    /// `unshard_seconds / raw_seconds`.
    pub ratio: f64,
    /// Bytes per second over every rank's links, as nccl-tests count: received × (n − 1) / n.
    pub raw_bus_gb_per_s: f64,
    /// Host time of one unit's group.
    pub raw_host_us: f64,
    /// Host time of one unit's unshard.
    pub unshard_host_us: f64,
}

impl Gathered {
    /// The table's head.
    pub fn head() -> String {
        format!(
            "{:<21} {:<6} {:>11} {:>9} {:>10} {:>6} {:>9} {:>12} {:>12}",
            "units",
            "type",
            "parameters",
            "raw ms",
            "unshard ms",
            "ratio",
            "bus GB/s",
            "raw host us",
            "host us"
        )
    }
}

impl std::fmt::Display for Gathered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<21} {:<6} {:>11} {:>9.4} {:>10.4} {:>6.3} {:>9.1} {:>12.1} {:>12.1}",
            self.shape,
            self.dtype,
            self.parameters,
            self.raw_seconds * 1e3,
            self.unshard_seconds * 1e3,
            self.ratio,
            self.raw_bus_gb_per_s,
            self.raw_host_us,
            self.unshard_host_us
        )
    }
}

/// Ranks under measurement.
pub struct Gathers<B: Backend> {
    backend: B,
    communicator: Arc<dyn Communicator<B>>,
    /// Lets the ranks wait for each other on the device.
    align: Arc<dyn Communicator<B>>,
    word: Span<B>,
    stream: B::Stream,
    clock: Arc<dyn Clock<B>>,
    operations: AtomicU64,
}

/// Times on the device, and of the host for one unit.
#[derive(Default)]
struct Times {
    device: Vec<f64>,
    host: Vec<f64>,
}

impl<B: Backend> Gathers<B> {
    /// On a stream and communicators of its own; every rank makes it.
    ///
    /// # Errors
    /// A failure of the device or of a rank.
    pub fn new(
        backend: B,
        communicator: &Arc<dyn Communicator<B>>,
        clock: Arc<dyn Clock<B>>,
    ) -> Result<Self> {
        let child = || {
            let child = communicator.split(Some(0), communicator.rank())?;
            child.ok_or_else(|| anyhow!("a split gave no communicator; report this"))
        };
        Ok(Self {
            communicator: child()?,
            align: child()?,
            word: Span::whole(&backend.alloc(4, Memory::Device)?),
            stream: backend.stream("bench")?,
            backend,
            clock,
            operations: AtomicU64::new(0),
        })
    }

    fn op(&self, name: &'static str) -> Op<'static> {
        let sequence = self.operations.fetch_add(1, Ordering::Relaxed);
        Op { sequence, name, unit: "bench", deadline: DEADLINE }
    }

    /// Times what `work` issues on a stream, once all ranks have come to it.
    fn time(&self, on: &B::Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.align.all_reduce(self.op("all-reduce"), Reduce::MaxU32, &self.word, on)?;
        Ok(self.clock.time(&self.backend, on, work)?.as_secs_f64())
    }

    /// The largest of every rank's numbers.
    fn slowest(&self, own: [f64; 4]) -> Result<[f64; 4]> {
        let all = self.communicator.exchange(self.op("exchange"), bytemuck::bytes_of(&own))?;
        let mut slowest = own;
        for message in &all {
            let theirs: Vec<f64> = bytemuck::pod_collect_to_vec(message);
            for (slow, their) in slowest.iter_mut().zip(theirs) {
                *slow = slow.max(their);
            }
        }
        Ok(slowest)
    }

    /// One shape in float8 and in BF16.
    ///
    /// # Errors
    /// Memory that is not there; a failure of the device or of a rank.
    pub fn measure(
        &self,
        root: &Arc<dyn Communicator<B>>,
        shape: &Shape,
        repeats: u32,
    ) -> Result<[Gathered; 2]> {
        let mut sides = Vec::new();
        for (name, dtype) in [("float8", GatherType::Float8), ("bf16", GatherType::Bf16)] {
            let raw = self.raw(shape, if dtype == GatherType::Float8 { 1 } else { 2 })?;
            let fsdp = unsharded(&self.backend, root, shape, dtype)?;
            sides.push((name, raw, fsdp, Times::default(), Times::default()));
        }
        for repeat in 0..WARM_UP + repeats {
            let counts = repeat >= WARM_UP;
            for (_, raw, fsdp, raw_times, times) in &mut sides {
                self.gather_raw(raw, counts.then_some(raw_times))?;
                self.gather_units(fsdp, shape.units.len(), counts.then_some(times))?;
            }
        }
        let mut results = Vec::new();
        for (dtype, raw, _, raw_times, times) in sides {
            let own = [&raw_times.device, &times.device, &raw_times.host, &times.host];
            let [raw_seconds, unshard_seconds, raw_host, host] =
                self.slowest(own.map(|values| median(values)))?;
            let bytes: u64 = raw.iter().flatten().map(|(_, whole)| whole.len()).sum();
            let world = f64::from(self.communicator.world());
            results.push(Gathered {
                shape: shape.name,
                units: shape.units.len(),
                weights: shape.units.iter().map(Vec::len).sum(),
                parameters: shape.parameters(),
                dtype,
                bytes,
                raw_seconds,
                unshard_seconds,
                ratio: unshard_seconds / raw_seconds,
                raw_bus_gb_per_s: bytes as f64 * (world - 1.0) / world / raw_seconds / 1e9,
                raw_host_us: raw_host * 1e6,
                unshard_host_us: host * 1e6,
            });
        }
        <[Gathered; 2]>::try_from(results).map_err(|_| anyhow!("two types make two results"))
    }

    /// Buffers of every unit's weights, as the runtime has them: shard and whole.
    fn raw(&self, shape: &Shape, size: u64) -> Result<Vec<Parts<B>>> {
        let world = u64::from(self.communicator.world());
        let alloc = |bytes| -> Result<Span<B>> {
            Ok(Span::whole(&self.backend.alloc(bytes, Memory::Device)?))
        };
        let part = |&[rows, columns]: &[u64; 2]| {
            let shard = rows.div_ceil(world) * columns * size;
            Ok((alloc(shard)?, alloc(shard * world)?))
        };
        shape.units.iter().map(|unit| unit.iter().map(part).collect()).collect()
    }

    fn gather_raw(&self, units: &[Parts<B>], times: Option<&mut Times>) -> Result<()> {
        let mut host = Vec::new();
        let seconds = self.time(&self.stream, &mut || {
            for parts in units {
                let start = Instant::now();
                self.communicator.all_gather(self.op("all-gather"), parts, &self.stream)?;
                host.push(start.elapsed().as_secs_f64());
            }
            Ok(())
        })?;
        if let Some(times) = times {
            times.device.push(seconds);
            times.host.append(&mut host);
        }
        Ok(())
    }

    fn gather_units(&self, fsdp: &Fsdp<B>, units: usize, times: Option<&mut Times>) -> Result<()> {
        let mut host = Vec::new();
        // The last run has left its last unit gathered. Its memory is given back in the time that
        // counts, so that the gather cannot begin before.
        let mut resident = UnitId(units - 1);
        let seconds = self.time(fsdp.compute_stream(), &mut || {
            for unit in (0..units).map(UnitId) {
                fsdp.reshard(resident)?;
                let start = Instant::now();
                let guard = fsdp.unshard(unit)?;
                host.push(start.elapsed().as_secs_f64());
                guard.keep();
                resident = unit;
            }
            Ok(())
        })?;
        if let Some(times) = times {
            times.device.push(seconds);
            times.host.append(&mut host);
        }
        Ok(())
    }

    /// A sync of so many weights, each with a slot for its input and its output gradient: the
    /// all-reduce and the update of every scale; and the all-reduce alone.
    ///
    /// # Errors
    /// A failure of the device or of a rank.
    pub fn sync(&self, weights: usize, repeats: u32) -> Result<[Figure; 2]> {
        let mut slots = Vec::new();
        for number in 0..weights {
            for kind in [SlotKind::Weight, SlotKind::Input, SlotKind::Gradient] {
                slots.push(SlotSpec {
                    name: format!("{number}.{kind:?}"),
                    kind,
                    format: Format::E4m3,
                    delayed: true,
                });
            }
        }
        let table = AmaxTable::new(&self.backend, &self.stream, TableConfig::default(), &slots)?;
        let words = slots.len() as u64 * 4;
        let plain = Span::whole(&self.backend.alloc(words, Memory::Device)?);
        let (mut syncs, mut alone) = (Vec::new(), Vec::new());
        for repeat in 0..WARM_UP + repeats {
            let first = table.slot_word(table.recording_bank(), 0)?;
            let start = first.range().start;
            let bank = Span::<B>::new(first.buffer(), start..start + words)?;
            // A touched slot whose amax is 1.498.
            self.backend.fill(&self.stream, &bank, 0xbf)?;
            let sync = self.time(&self.stream, &mut || {
                Ok(table.sync(&*self.communicator, self.op("all-reduce"), 0, &self.stream)?)
            })?;
            let plain = self.time(&self.stream, &mut || {
                let op = self.op("all-reduce");
                Ok(self.communicator.all_reduce(op, Reduce::MaxU32, &plain, &self.stream)?)
            })?;
            if repeat >= WARM_UP {
                syncs.push(sync * 1e6);
                alone.push(plain * 1e6);
            }
        }
        table.check()?;
        let [sync, plain, ..] = self.slowest([median(&syncs), median(&alone), 0.0, 0.0])?;
        Ok([
            Figure::once(format!("sync of {weights} x 3 slots"), "us", sync),
            Figure::once(format!("all-reduce of {} words alone", slots.len()), "us", plain),
        ])
    }
}

/// A runtime with these units as frozen weights, all of them cast, the last one gathered.
fn unsharded<B: Backend>(
    backend: &B,
    communicator: &Arc<dyn Communicator<B>>,
    shape: &Shape,
    dtype: GatherType,
) -> Result<Fsdp<B>> {
    let mut config = Config::default();
    config.gather.dtype = dtype;
    config.gather.arena_slots = 1;
    config.gather.prefetch = 0;
    let units = shape.units.iter().enumerate().map(|(number, weights)| {
        let weights = weights.iter().enumerate().map(|(position, &shape)| {
            WeightSpec::float8(format!("{number}.{position}"), shape).frozen()
        });
        UnitSpec::new(format!("unit.{number}"), weights.collect::<Vec<_>>())
    });
    let values = pattern();
    let fsdp = Fsdp::builder(config, backend.clone(), Arc::clone(communicator))
        .units(units)
        .build(|spec, rows| -> Result<Vec<f32>> {
            let elements = (rows.end - rows.start) * spec.row_elements();
            Ok(values.iter().copied().cycle().take(elements as usize).collect())
        })?;
    let last = shape.units.len().saturating_sub(1);
    for unit in (0..shape.units.len()).map(UnitId) {
        let guard = fsdp.unshard(unit)?;
        if unit.0 == last {
            guard.keep();
        }
    }
    Ok(fsdp)
}

fn pattern() -> Vec<f32> {
    let stream = Stream::new(7, "gather");
    (0..65_521).map(|position| stream.uniform(position, 0.02)).collect()
}

/// Host time of one unit's unshard in this world, in microseconds: with bytes that are cast
/// already, and with the launch of their cast.
///
/// # Errors
/// A failure of the device or of a rank.
pub fn host_of_unshard<B: Backend>(
    backend: &B,
    communicator: &Arc<dyn Communicator<B>>,
    divisor: u64,
    repeats: u32,
) -> Result<[Figure; 2]> {
    let block = BLOCK.map(|[rows, columns]| [rows, (columns / divisor).max(1)]);
    let shape = Shape { name: "one block", units: vec![block.to_vec()] };
    let fsdp = unsharded(backend, communicator, &shape, GatherType::Float8)?;
    let unit = UnitId(0);
    let (mut plain, mut with_cast) = (Vec::new(), Vec::new());
    let unshard = || -> Result<f64> {
        let start = Instant::now();
        let guard = fsdp.unshard(unit)?;
        let micros = start.elapsed().as_secs_f64() * 1e6;
        guard.keep();
        backend.synchronize(fsdp.compute_stream())?;
        fsdp.reshard(unit)?;
        Ok(micros)
    };
    fsdp.reshard(unit)?;
    for repeat in 0..WARM_UP + repeats {
        let cast_before = unshard()?;
        for weight in 0..block.len() {
            fsdp.mark_modified(WeightId(weight))?;
        }
        fsdp.sync_blocking()?;
        let casts = unshard()?;
        if repeat >= WARM_UP {
            plain.push(cast_before);
            with_cast.push(casts);
        }
    }
    Ok([
        Figure::of("host time of one block's unshard, bytes already cast", "us", &plain),
        Figure::of("host time of one block's unshard with its cast", "us", &with_cast),
    ])
}

#[cfg(test)]
mod tests {
    use gather8_collectives::{LocalWorld, Solo};
    use gather8_kernels::cpu::Cpu;

    use super::super::device::HostClock;
    use super::*;

    #[test]
    fn shapes_are_those_that_were_promised() {
        let sizes: Vec<_> = shapes(1).iter().map(Shape::parameters).collect();
        assert_eq!(sizes, [25_165_824, 58_720_256, 218_103_808, 436_207_616, 872_415_232]);
    }

    #[test]
    fn every_shape_is_gathered_on_every_rank() {
        let world = LocalWorld::new(2);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let world = &world;
                scope.spawn(move || {
                    let backend = Cpu::new();
                    let root = world.rank(rank, backend.clone()).unwrap();
                    let gathers = Gathers::new(backend, &root, Arc::new(HostClock)).unwrap();
                    for shape in shapes(1 << 10) {
                        let [float8, bf16] = gathers.measure(&root, &shape, 2).unwrap();
                        assert_eq!((float8.bytes, bf16.bytes), {
                            let parameters = shape.parameters();
                            (parameters, 2 * parameters)
                        });
                        assert!(float8.ratio > 0.0 && bf16.unshard_host_us > 0.0);
                    }
                    let [sync, alone] = gathers.sync(5, 2).unwrap();
                    assert!(sync.value > 0.0 && alone.value > 0.0);
                });
            }
        });
    }

    #[test]
    fn the_host_of_a_world_of_one_is_timed() {
        let cpu = Cpu::new();
        let solo: Arc<dyn Communicator<Cpu>> = Arc::new(Solo::new(cpu.clone()));
        let figures = host_of_unshard(&cpu, &solo, 1 << 10, 3).unwrap();
        assert!(figures.iter().all(|figure| figure.value > 0.0));
    }
}

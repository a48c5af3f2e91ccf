//! From jobs to launches.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys;

use super::core::Core;
use super::driver::Handle;
use super::handles::DeviceMemory;
use super::staging::PIECE;
use super::tables::{
    self, AMAX_TILE_BYTES, AmaxEntry, CAST_ROUND, CAST_ROUNDS, CastEntry, DECODE_ROUND,
    DECODE_ROUNDS, DecodeEntry, IS_E5M2, NARROW_ROUNDS, NARROW_THREADS, NormEntry, OptimizeEntry,
    SQUARE, THREADS, Tiles, TransposeEntry, UNARY_ROUND, UNARY_ROUNDS, UPDATE_THREADS, UnaryEntry,
    UpdateEntry, VECTOR, WIDE_ROUNDS, WIDE_THREADS, first_tiles,
};
use super::{Cuda, staging};
use crate::backend::{Span, Tensor};
use crate::check::check_all;
use crate::error::{Error, Result};
use crate::format::{DType, Format};
use crate::job::{AmaxAlgorithm, Job, Master};
use crate::layout::{GroupRecord, NORM_FINAL_LANES, NORM_TILE, NormRecord};

/// A pass, ready to launch: its tables lie in device memory.
pub struct Plan(pub(super) Arc<PlanInner>);

pub(super) struct PlanInner {
    pub(super) core: Arc<Core>,
    pub(super) launches: Vec<Launch>,
    // What the launches point into.
    _tables: Option<DeviceMemory>,
    _counters: Option<DeviceMemory>,
    _jobs: Vec<Job<Cuda>>,
}

impl Plan {
    /// Kernels that one run launches: one per combination of element types.
    pub fn launches(&self) -> usize {
        self.0.launches.len()
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.0.launches.iter().map(|launch| launch.kernel).collect();
        write!(f, "Plan({})", names.join(", "))
    }
}

/// One kernel and its arguments.
pub(super) struct Launch {
    pub(super) kernel: &'static str,
    pub(super) function: Handle<sys::CUfunction>,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Each argument's bytes, at most 16.
    pub(super) arguments: Vec<[u64; 2]>,
}

/// An argument whose address is known once the tables have been allocated.
enum Argument {
    Table(u64),
    Tiles { first: u64, tensors: u32, size: u32 },
    Value(u64),
}

/// A launch whose addresses are still offsets.
struct Draft {
    kernel: String,
    blocks: u32,
    threads: u32,
    arguments: Vec<Argument>,
}

/// Tensors of one launch.
struct Group {
    entries: Vec<u8>,
    elements: Vec<u64>,
}

/// How a kernel deals out its blocks.
struct Shape {
    threads: u32,
    round: u64,
    rounds: u64,
}

#[derive(Default)]
struct Drafts {
    bytes: Vec<u8>,
    launches: Vec<Draft>,
    groups: BTreeMap<String, Group>,
}

impl Drafts {
    /// Appends to the tables; returns the offset.
    fn table<T: Pod>(&mut self, values: &[T]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let offset = self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytemuck::cast_slice(values));
        offset
    }

    fn entry<T: Pod>(&mut self, kernel: String, elements: u64, entry: &T) {
        let group = self
            .groups
            .entry(kernel)
            .or_insert_with(|| Group { entries: Vec::new(), elements: Vec::new() });
        group.entries.extend_from_slice(bytemuck::bytes_of(entry));
        group.elements.push(elements);
    }

    /// Turns the groups into launches.
    fn launch_groups(
        &mut self,
        pass: &'static str,
        core: &Core,
        shape: impl Fn(&str) -> Shape,
    ) -> Result<()> {
        for (kernel, group) in std::mem::take(&mut self.groups) {
            let Shape { threads, round, rounds } = shape(&kernel);
            let rounds = tables::rounds(&group.elements, round, rounds, core.info.multiprocessors);
            let size = round * rounds;
            let problem = || Error::Job {
                pass,
                problem: "the tensors need more than 2^31 blocks: split the pass".to_owned(),
            };
            let first = first_tiles(&group.elements, size).ok_or_else(problem)?;
            let blocks = first.last().copied().unwrap_or(0);
            let entries = self.table(&group.entries);
            let first = self.table(&first);
            let tensors = u32::try_from(group.elements.len()).map_err(|_| problem())?;
            let size = u32::try_from(size).map_err(|_| problem())?;
            self.launches.push(Draft {
                kernel,
                blocks,
                threads,
                arguments: vec![Argument::Table(entries), Argument::Tiles { first, tensors, size }],
            });
        }
        Ok(())
    }

    fn single(&mut self, kernel: &str, threads: u32, arguments: Vec<Argument>) {
        self.launches.push(Draft { kernel: kernel.to_owned(), blocks: 1, threads, arguments });
    }
}

const fn format_flag(format: Format) -> u32 {
    match format {
        Format::E4m3 => 0,
        Format::E5m2 => IS_E5M2,
    }
}

/// [`VECTOR`] if every address is a multiple of its alignment.
fn vector<const N: usize>(addresses: [(u64, u64); N]) -> u32 {
    let aligned = addresses.iter().all(|&(address, alignment)| address.is_multiple_of(alignment));
    if aligned { VECTOR } else { 0 }
}

fn at(tensor: &Tensor<Cuda>) -> u64 {
    tensor.span.address()
}

fn or_null(span: Option<&Span<Cuda>>) -> u64 {
    span.map_or(0, Span::address)
}

impl PlanInner {
    pub(super) fn new(core: &Arc<Core>, jobs: &[Job<Cuda>]) -> Result<Self> {
        let mut plan = Self {
            core: Arc::clone(core),
            launches: Vec::new(),
            _tables: None,
            _counters: None,
            _jobs: jobs.to_vec(),
        };
        let Some(pass) = check_all(jobs)? else { return Ok(plan) };
        // A word per tensor that counts its finished blocks.
        let counters = if pass == "cast" {
            Some(DeviceMemory::zeroed(core, jobs.len() as u64 * 4)?)
        } else {
            None
        };
        let counter = counters.as_ref().map_or(0, |memory| memory.address);
        let mut drafts = Drafts::default();
        for (number, job) in jobs.iter().enumerate() {
            add(&mut drafts, job, counter + number as u64 * 4);
        }
        drafts.launch_groups(pass, core, shape)?;

        let memory = DeviceMemory::uninitialised(core, drafts.bytes.len() as u64)?;
        staging::upload_now(core, &drafts.bytes, memory.address, PIECE)?;
        for draft in drafts.launches {
            let (kernel, function) = core.function(&draft.kernel)?;
            let arguments = draft.arguments.iter().map(|argument| match *argument {
                Argument::Table(offset) => [memory.address + offset, 0],
                Argument::Value(value) => [value, 0],
                Argument::Tiles { first, tensors, size } => {
                    bytemuck::cast(Tiles { first: memory.address + first, tensors, size })
                }
            });
            plan.launches.push(Launch {
                kernel,
                function,
                blocks: draft.blocks,
                threads: draft.threads,
                arguments: arguments.collect(),
            });
        }
        plan._tables = Some(memory);
        plan._counters = counters;
        Ok(plan)
    }
}

fn shape(kernel: &str) -> Shape {
    let of = |threads, round, rounds| Shape { threads, round, rounds };
    match kernel.split('_').next() {
        Some("amax") => {
            let size = if kernel.ends_with("f32") { 4 } else { 2 };
            of(THREADS, AMAX_TILE_BYTES / size, 1)
        }
        Some("cast") => of(THREADS, CAST_ROUND, CAST_ROUNDS),
        Some("decode") => of(THREADS, DECODE_ROUND, DECODE_ROUNDS),
        Some("norm") => of(THREADS, NORM_TILE, 1),
        Some("transpose") => of(THREADS, 1, 1),
        // The second type is the moments'.
        Some("optimize") if kernel.split('_').nth(2) == Some("f32") => {
            of(WIDE_THREADS, u64::from(WIDE_THREADS) * 8, WIDE_ROUNDS)
        }
        Some("optimize") => of(NARROW_THREADS, u64::from(NARROW_THREADS) * 8, NARROW_ROUNDS),
        _ => of(THREADS, UNARY_ROUND, UNARY_ROUNDS),
    }
}

fn add(drafts: &mut Drafts, job: &Job<Cuda>, counter: u64) {
    match job {
        Job::Amax(j) => {
            let kernel = format!("amax_{}", j.src.dtype.name());
            let entry = AmaxEntry {
                src: at(&j.src),
                slot: j.slot.address(),
                elements: j.src.elements(),
                flags: vector([(at(&j.src), 16)]),
                reserved: 0,
            };
            drafts.entry(kernel, entry.elements, &entry);
        }
        Job::Cast(j) => {
            let extra = if j.saturated.is_some() || j.amax.is_some() { "_extra" } else { "" };
            let kernel = format!("cast_{}{extra}", j.src.dtype.name());
            let entry = CastEntry {
                src: at(&j.src),
                dst: j.dst.address(),
                scales: j.scales.address(),
                record: j.record.address(),
                saturated: or_null(j.saturated.as_ref()),
                amax: or_null(j.amax.as_ref()),
                arrived: counter,
                elements: j.src.elements(),
                flags: vector([(at(&j.src), 16), (j.dst.address(), 8)]) | format_flag(j.format),
                reserved: [0; 3],
            };
            drafts.entry(kernel, entry.elements, &entry);
        }
        Job::Decode(j) => {
            let kernel = format!("decode_{}", j.dst.dtype.name());
            let entry = DecodeEntry {
                src: j.src.address(),
                record: j.record.address(),
                dst: at(&j.dst),
                elements: j.src.len(),
                flags: vector([(j.src.address(), 8), (at(&j.dst), 16)]) | format_flag(j.format),
                reserved: [0; 3],
            };
            drafts.entry(kernel, entry.elements, &entry);
        }
        Job::Transpose(j) => {
            let words = [(j.src.address(), 4), (j.dst.address(), 4), (j.rows, 4), (j.cols, 4)];
            let across = j.cols.div_ceil(SQUARE);
            let entry = TransposeEntry {
                src: j.src.address(),
                dst: j.dst.address(),
                rows: j.rows,
                cols: j.cols,
                squares_across: across.max(1),
                flags: vector(words),
                reserved: 0,
            };
            drafts.entry("transpose".to_owned(), across * j.rows.div_ceil(SQUARE), &entry);
        }
        Job::Divide(j) => {
            let kernel = format!("divide_{}_{}", j.src.dtype.name(), j.dst.dtype.name());
            unary(drafts, kernel, &j.src, &j.dst, j.divisor);
        }
        Job::Accumulate(j) => {
            unary(drafts, format!("accumulate_{}", j.src.dtype.name()), &j.src, &j.dst, 0.0);
        }
        Job::Norm(j) => {
            let size = j.src.dtype.size();
            let entry = NormEntry {
                src: at(&j.src),
                tiles: j.tiles.address(),
                elements: j.src.elements(),
                flags: vector([(at(&j.src), 4 * size)]),
                reserved: 0,
            };
            drafts.entry(format!("norm_{}", j.src.dtype.name()), entry.elements, &entry);
        }
        Job::SumNorms(j) => {
            let count = j.tiles.len() / size_of::<NormRecord>() as u64;
            let values = [j.tiles.address(), count, j.total.address()];
            drafts.single("sum_norms", NORM_FINAL_LANES as u32, values.map(Argument::Value).into());
        }
        Job::Control(j) => {
            let count = j.groups.len() / size_of::<GroupRecord>() as u64;
            let values = [j.total.address(), j.control.address(), j.groups.address(), count];
            drafts.single("control", THREADS, values.map(Argument::Value).into());
        }
        Job::UpdateScales(j) => {
            let entry = drafts.table(&[UpdateEntry {
                slots: j.slots,
                bank: j.bank.address(),
                records: j.records.address(),
                rings: j.rings.address(),
                status: j.status.address(),
                history: j.history,
                most_recent: u32::from(j.algorithm == AmaxAlgorithm::MostRecent),
                margin: j.rule.margin,
                power_of_two: u32::from(j.rule.power_of_two),
                reserved: 0,
            }]);
            drafts.single("update_scales", UPDATE_THREADS, vec![Argument::Table(entry)]);
        }
        Job::Optimize(j) => {
            let (master, suffix) = match &j.master {
                Master::Itself => (0, "itself"),
                Master::Copy(span) => (span.address(), "copy"),
                Master::Remainder(span) => (span.address(), "remainder"),
            };
            let (grad, moments) = (j.grad.dtype.name(), j.exp_avg.dtype.name());
            let emit = j.emit.as_ref();
            let addresses = [
                (at(&j.grad), 16),
                (at(&j.exp_avg), 16),
                (at(&j.exp_avg_sq), 16),
                (at(&j.weight), 16),
                (master, 16),
                (emit.map_or(0, |emit| emit.dst.address()), 8),
            ];
            let entry = OptimizeEntry {
                grad: at(&j.grad),
                exp_avg: at(&j.exp_avg),
                exp_avg_sq: at(&j.exp_avg_sq),
                weight: at(&j.weight),
                master,
                group: j.group.address(),
                control: j.control.address(),
                amax: or_null(j.amax.as_ref()),
                emit: or_null(emit.map(|emit| &emit.dst)),
                scales: or_null(emit.map(|emit| &emit.scales)),
                record: or_null(emit.map(|emit| &emit.record)),
                elements: j.weight.elements(),
                flags: vector(addresses) | emit.map_or(0, |emit| format_flag(emit.format)),
                reserved: [0; 3],
            };
            let kernel = format!("optimize_{grad}_{moments}_{suffix}");
            drafts.entry(kernel, entry.elements, &entry);
        }
    }
}

fn unary(
    drafts: &mut Drafts,
    kernel: String,
    src: &Tensor<Cuda>,
    dst: &Tensor<Cuda>,
    divisor: f32,
) {
    debug_assert!(matches!(src.dtype, DType::Bf16 | DType::F32));
    let entry = UnaryEntry {
        src: at(src),
        dst: at(dst),
        elements: src.elements(),
        flags: vector([(at(src), 16), (at(dst), 16)]),
        divisor,
    };
    drafts.entry(kernel, entry.elements, &entry);
}

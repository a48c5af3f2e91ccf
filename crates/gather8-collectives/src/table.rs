//! One table for every amax of a model: a slot per weight, layer input and output gradient.
//!
//! Passes record amaxes into the words of the *recording* bank. A [`sync`](AmaxTable::sync) takes
//! that bank: one MAX all-reduce over its words, then one pass that turns amaxes into ring entries
//! and scales. Meanwhile passes record into the other bank. The bank's last words carry a digest of
//! what the rank has issued, so that the same all-reduce finds ranks that have gone apart.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::Zeroable;
use gather8_kernels::job::UpdateScales;
use gather8_kernels::layout::{
    self, ORDER_WORDS, SlotRecord, StatusHeader, bank_bytes, slot_flags, status_bytes,
};
use gather8_kernels::{Backend, Job, Memory, Span};

use crate::communicator::{Communicator, Op, Reduce};
use crate::error::{Error, Result};
use crate::host::seat::{DISORDER, STUCK, UNRESOLVED};
use crate::order::{OrderLog, first_difference};

mod spec;

pub use spec::{SlotKind, SlotSpec, TableConfig};

/// Bytes of a slot's record.
const RECORD: u64 = size_of::<SlotRecord>() as u64;
/// Where the flags stand in a slot's record.
const FLAGS: u64 = std::mem::offset_of!(SlotRecord, flags) as u64;

/// A table's records and rings, as a checkpoint keeps them. Equal on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct TableState {
    /// One record per slot.
    pub records: Vec<SlotRecord>,
    /// `history` amaxes per slot, slot by slot.
    pub rings: Vec<f32>,
}

/// What the host has noticed of the status.
#[derive(Default)]
struct Noticed {
    header: StatusHeader,
    error: Option<Error>,
}

/// See the [module](self).
///
/// The table issues on the streams that it is given and records no events of its own. Its caller
/// orders the recorders of a bank before the sync that takes it, and a sync before what reads its
/// scales and before the recorders of that same bank, two syncs later.
pub struct AmaxTable<B: Backend> {
    backend: B,
    config: TableConfig,
    slots: Vec<SlotSpec>,
    banks: [Span<B>; 2],
    plans: [B::Plan; 2],
    records: Span<B>,
    rings: Span<B>,
    status: Span<B>,
    recording: AtomicUsize,
    noticed: Mutex<Noticed>,
}

impl<B: Backend> AmaxTable<B> {
    /// Allocates the table and writes its records in stream order: scales of 1, version 0, rings
    /// empty; slots with delayed scaling are seeded by the first amax.
    ///
    /// # Errors
    /// Settings out of range; [`Error::Table`] for a name that stands twice; what the backend says.
    pub fn new(
        backend: &B,
        stream: &B::Stream,
        config: TableConfig,
        slots: &[SlotSpec],
    ) -> Result<Self> {
        config.check()?;
        let mut names = HashSet::new();
        if let Some(twice) = slots.iter().find(|slot| !names.insert(slot.name.as_str())) {
            return Err(table_error(format!("two slots are called `{}`", twice.name)));
        }
        let count = slots.len() as u64;
        let device =
            |bytes| -> Result<Span<B>> { Ok(Span::whole(&backend.alloc(bytes, Memory::Device)?)) };
        let banks = [device(bank_bytes(count))?, device(bank_bytes(count))?];
        let records = device(count * RECORD)?;
        let rings = device(count * u64::from(config.history) * 4)?;
        let status = Span::whole(&backend.alloc(status_bytes(count), Memory::Host)?);
        let plan = |bank: &Span<B>| {
            backend.plan(&[Job::UpdateScales(UpdateScales {
                slots: count,
                bank: bank.clone(),
                records: records.clone(),
                rings: rings.clone(),
                history: config.history,
                algorithm: config.algorithm,
                rule: config.rule,
                status: status.clone(),
            })])
        };
        let [first, second] = &banks;
        let plans = [plan(first)?, plan(second)?];
        let table = Self {
            backend: backend.clone(),
            config,
            slots: slots.to_vec(),
            banks,
            plans,
            records,
            rings,
            status,
            recording: AtomicUsize::new(0),
            noticed: Mutex::default(),
        };
        let fresh = table.slots.iter().map(fresh_record).collect::<Vec<_>>();
        table.upload(stream, bytemuck::cast_slice(&fresh), &table.records)?;
        Ok(table)
    }

    /// The settings.
    pub fn config(&self) -> TableConfig {
        self.config
    }

    /// The slots, in order.
    pub fn slots(&self) -> &[SlotSpec] {
        &self.slots
    }

    /// The word in a bank (0 or 1) that takes a slot's amax; what an
    /// [`Amax`](gather8_kernels::job::Amax) job calls `slot`.
    ///
    /// # Errors
    /// [`Error::Table`] if there is no such bank or slot.
    pub fn slot_word(&self, bank: usize, slot: usize) -> Result<Span<B>> {
        self.known(slot)?;
        let at = slot as u64 * 4;
        Ok(self.bank(bank)?.sub(at..at + 4)?)
    }

    /// A slot's [`SlotRecord`].
    ///
    /// # Errors
    /// [`Error::Table`] if there is no such slot.
    pub fn slot_record(&self, slot: usize) -> Result<Span<B>> {
        self.known(slot)?;
        let at = slot as u64 * RECORD;
        Ok(self.records.sub(at..at + RECORD)?)
    }

    /// The bank that passes record into now: 0 or 1.
    pub fn recording_bank(&self) -> usize {
        self.recording.load(Ordering::Acquire)
    }

    /// Syncs the recording bank in stream order and makes the other one the recording bank. Every
    /// rank calls it at the same place in its order of operations; `digest` is what its
    /// [`OrderLog::digest`] says of everything before.
    ///
    /// # Errors
    /// As [`check`](Self::check), of an earlier sync; the communicator's or the backend's first
    /// failure.
    pub fn sync(
        &self,
        comm: &dyn Communicator<B>,
        op: Op<'_>,
        digest: u64,
        on: &B::Stream,
    ) -> Result<()> {
        self.check()?;
        let recording = self.recording_bank();
        let bank = self.bank(recording)?;
        let plan = self.plans.get(recording).ok_or_else(|| no_bank(recording))?;

        let halves = [digest as u32, (digest >> 32) as u32];
        let words = [halves, halves.map(|half| !half)];
        let at = bank.len() - ORDER_WORDS * 4;
        self.upload(on, bytemuck::cast_slice(&words), &bank.sub(at..bank.len())?)?;
        comm.all_reduce(op, Reduce::MaxU32, bank, on)?;
        self.backend.run(on, plan).map_err(Error::from_backend)?;
        self.recording.store(1 - recording, Ordering::Release);
        Ok(())
    }

    /// [`sync`](Self::sync), waited for and checked.
    ///
    /// # Errors
    /// As [`sync`](Self::sync) and [`check`](Self::check).
    pub fn sync_blocking(
        &self,
        comm: &dyn Communicator<B>,
        op: Op<'_>,
        digest: u64,
        on: &B::Stream,
    ) -> Result<()> {
        self.sync(comm, op, digest, on)?;
        self.backend.synchronize(on).map_err(Error::from_backend)?;
        self.check()
    }

    /// Makes the slot's next touched sync fill its ring, in stream order: after init, load, or a
    /// change of the weight by the user. The record's other fields stay.
    ///
    /// # Errors
    /// [`Error::Table`] if there is no such slot; what the backend says.
    pub fn seed(&self, slot: usize, on: &B::Stream) -> Result<()> {
        let spec = self.slots.get(slot).ok_or_else(|| self.no_slot(slot))?;
        let flags = spec.flags() | slot_flags::SEED;
        let word = self.slot_record(slot)?.sub(FLAGS..FLAGS + 4)?;
        self.upload(on, &flags.to_le_bytes(), &word)
    }

    /// Looks at what the syncs so far have reported; never waits.
    ///
    /// # Errors
    /// [`Error::NonFiniteWeights`] once a sync was refused, until it is
    /// [acknowledged](Self::acknowledge); [`Error::Disordered`] once the ranks' digests differed,
    /// from then on.
    pub fn check(&self) -> Result<()> {
        let header = self.header()?;
        let mut noticed = self.noticed();
        if header.disordered != noticed.header.disordered {
            noticed.header = header;
            noticed.error = Some(Error::Disordered { difference: UNRESOLVED.to_owned() });
        } else if header.refused != noticed.header.refused {
            let names = self.refused_names()?;
            noticed.header = header;
            noticed.error.get_or_insert(Error::NonFiniteWeights { names });
        }
        noticed.error.clone().map_or(Ok(()), Err)
    }

    /// The syncs that the device has done or refused so far.
    ///
    /// # Errors
    /// What the backend says.
    pub fn syncs(&self) -> Result<u32> {
        Ok(self.header()?.syncs)
    }

    /// Takes note of refused syncs: later calls no longer return
    /// [`Error::NonFiniteWeights`] for them. For a caller that has repaired the weights.
    pub fn acknowledge(&self) {
        let mut noticed = self.noticed();
        if matches!(noticed.error, Some(Error::NonFiniteWeights { .. })) {
            noticed.error = None;
        }
    }

    /// After a sync found the ranks' digests to differ, or ranks were found to wait for each other:
    /// stops what is in flight on every rank, exchanges the logs and returns what they show, which
    /// later calls return too. Every rank calls it; those in an operation get [`Error::Disordered`]
    /// there.
    pub fn resolve_disorder(
        &self,
        comm: &dyn Communicator<B>,
        log: &OrderLog,
        deadline: Duration,
    ) -> Error {
        if let Some(known @ Error::Disordered { difference }) = &self.noticed().error
            && difference != UNRESOLVED
        {
            return known.clone();
        }
        comm.abort_handle().abort(DISORDER);
        let op = Op { sequence: 0, name: "exchange", unit: "order logs", deadline };
        let difference = match comm.exchange(op, &log.to_bytes()) {
            Ok(logs) if logs.windows(2).all(|pair| pair.first() == pair.last()) => STUCK.to_owned(),
            Ok(logs) => first_difference(&logs),
            Err(error) => format!("their logs could not be exchanged ({error})"),
        };
        let error = Error::Disordered { difference };
        self.noticed().error = Some(error.clone());
        error
    }

    /// The error behind an error. A rank that finds a refused or disordered sync stops, which the
    /// others may see first as a lost peer or an aborted operation: what their own table says
    /// comes first. Pass every error of an operation of the group through here.
    pub fn explain(
        &self,
        error: Error,
        comm: &dyn Communicator<B>,
        log: &OrderLog,
        deadline: Duration,
    ) -> Error {
        let behind = self.check().err().unwrap_or(error);
        match &behind {
            Error::Disordered { difference } if [UNRESOLVED, STUCK].contains(&&**difference) => {
                self.resolve_disorder(comm, log, deadline)
            }
            _ => behind,
        }
    }

    /// Records and rings, after everything issued on the stream. What a bank has recorded since its
    /// last sync is not part of it.
    ///
    /// # Errors
    /// What the backend says.
    pub fn snapshot(&self, stream: &B::Stream) -> Result<TableState> {
        let mut rings = vec![0.0_f32; self.slots.len() * self.config.history as usize];
        let records = self.records(stream)?;
        self.download(stream, &self.rings, bytemuck::cast_slice_mut(&mut rings))?;
        Ok(TableState { records, rings })
    }

    /// Puts records and rings back, in stream order.
    ///
    /// # Errors
    /// [`Error::Table`] if the state is of another number of slots or another history, of slots of
    /// another kind, format or scaling, or holds values that no sync writes.
    pub fn restore(&self, stream: &B::Stream, state: &TableState) -> Result<()> {
        self.check_state(state)?;
        self.upload(stream, bytemuck::cast_slice(&state.records), &self.records)?;
        self.upload(stream, bytemuck::cast_slice(&state.rings), &self.rings)
    }

    /// Every slot's record, after everything issued on the stream.
    ///
    /// # Errors
    /// What the backend says.
    pub fn records(&self, stream: &B::Stream) -> Result<Vec<SlotRecord>> {
        let mut records = vec![SlotRecord::zeroed(); self.slots.len()];
        self.download(stream, &self.records, bytemuck::cast_slice_mut(&mut records))?;
        Ok(records)
    }

    fn check_state(&self, state: &TableState) -> Result<()> {
        let history = self.config.history as usize;
        if state.records.len() != self.slots.len()
            || state.rings.len() != self.slots.len() * history
        {
            return Err(table_error(format!(
                "the saved state has {} slots and {} ring entries; this table has {} slots with {history} entries each",
                state.records.len(),
                state.rings.len(),
                self.slots.len()
            )));
        }
        let rings = state.rings.chunks_exact(history);
        for ((spec, record), ring) in self.slots.iter().zip(&state.records).zip(rings) {
            let refuse =
                |what: &str| Err(table_error(format!("the saved slot `{}` {what}", spec.name)));
            if record.flags & !slot_flags::SEED != spec.flags() {
                return refuse("is of another kind, format or scaling");
            }
            let scales = [record.published, record.published_inv, record.cast, record.cast_inv];
            if scales.iter().any(|scale| !scale.is_finite() || *scale <= 0.0) {
                return refuse("has a scale that is not positive and finite");
            }
            if record.position >= self.config.history {
                return refuse("points beyond its ring");
            }
            if ring.iter().any(|amax| !amax.is_finite() || amax.is_sign_negative()) {
                return refuse("has an amax that is negative or not finite");
            }
        }
        Ok(())
    }

    fn header(&self) -> Result<StatusHeader> {
        let bytes = self.peek(0..size_of::<StatusHeader>() as u64)?;
        bytemuck::try_pod_read_unaligned(&bytes)
            .map_err(|_| table_error("the status is too short".to_owned()))
    }

    fn refused_names(&self) -> Result<Vec<String>> {
        let marks = self.peek(size_of::<StatusHeader>() as u64..self.status.len())?;
        let marks = marks.chunks_exact(4).map(|word| word.iter().any(|&byte| byte != 0));
        let named = self.slots.iter().zip(marks).filter(|(_, mark)| *mark);
        Ok(named.map(|(slot, _)| slot.name.clone()).collect())
    }

    fn peek(&self, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
        Ok(self.backend.peek(&self.status.sub(range)?)?)
    }

    fn noticed(&self) -> MutexGuard<'_, Noticed> {
        self.noticed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bank(&self, bank: usize) -> Result<&Span<B>> {
        self.banks.get(bank).ok_or_else(|| no_bank(bank))
    }

    fn known(&self, slot: usize) -> Result<()> {
        if slot < self.slots.len() { Ok(()) } else { Err(self.no_slot(slot)) }
    }

    fn no_slot(&self, slot: usize) -> Error {
        table_error(format!("there is no slot {slot} among {}", self.slots.len()))
    }

    fn upload(&self, on: &B::Stream, bytes: &[u8], to: &Span<B>) -> Result<()> {
        self.backend.upload(on, bytes, to).map_err(Error::from_backend)
    }

    fn download(&self, on: &B::Stream, from: &Span<B>, bytes: &mut [u8]) -> Result<()> {
        self.backend.download(on, from, bytes).map_err(Error::from_backend)
    }
}

fn fresh_record(slot: &SlotSpec) -> SlotRecord {
    let seed = if slot.delayed { slot_flags::SEED } else { 0 };
    SlotRecord {
        published: 1.0,
        published_inv: 1.0,
        cast: 1.0,
        cast_inv: 1.0,
        flags: slot.flags() | seed,
        ..layout::SlotRecord::zeroed()
    }
}

fn no_bank(bank: usize) -> Error {
    table_error(format!("there is no bank {bank}, only 0 and 1"))
}

fn table_error(problem: String) -> Error {
    Error::Table { problem }
}

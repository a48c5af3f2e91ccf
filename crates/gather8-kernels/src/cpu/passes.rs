//! Every kind of job, done.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::Span;
use crate::error::Result;
use crate::fast;
use crate::job::{
    Accumulate, Amax, Cast, Control, Decode, Divide, Job, Master, Norm, Optimize, SumNorms,
    Transpose, UpdateScales,
};
use crate::layout::{BytesRecord, ControlRecord, GroupRecord, NormRecord, SlotRecord};
use crate::scalar::{Adam, EmitMut, MasterMut, Shard, control, sum_norms, update_scales};

use super::Cpu;
use super::access::same_bytes;
use super::failure::Source;
use super::operands::{Outputs, Pass};
use super::tasks::{Tasks, Tiles};
use super::views::{self, Written};

/// Does a pass.
///
/// # Safety
/// The caller is an operation that the order checker has admitted with what
/// [`of_jobs`](super::access::of_jobs) lists for these jobs, and that list is free of overlaps but
/// for reads and accumulations.
pub(super) unsafe fn run(jobs: &[Job<Cpu>], threads: usize) -> std::result::Result<(), Source> {
    let mut outputs: Vec<Vec<(&Span<Cpu>, Written<'_>)>> = jobs
        .iter()
        // SAFETY: by this function's contract; every span is opened once.
        .map(|job| job.writes().into_iter().map(|s| (s, unsafe { views::write(s) })).collect())
        .collect();
    let mut tasks = Tasks::default();
    for (job, outputs) in jobs.iter().zip(&mut outputs) {
        let pass = Pass { name: job.pass() };
        let outputs = Outputs::new(pass, outputs);
        // SAFETY: by this function's contract.
        unsafe { pass.push(job, outputs, &mut tasks) }.map_err(|e| -> Source { Arc::new(e) })?;
    }
    tasks.run(threads);
    for (_, written) in outputs.into_iter().flatten() {
        written.commit();
    }
    Ok(())
}

/// One function per kind of job. All are called by [`run`] alone, under its contract.
impl Pass {
    unsafe fn push<'t, 'a: 't>(
        self,
        job: &'a Job<Cpu>,
        out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        unsafe {
            match job {
                Job::Amax(j) => self.amax(j, tasks),
                Job::Cast(j) => self.cast(j, out, tasks),
                Job::Decode(j) => self.decode(j, out, tasks),
                Job::Transpose(j) => self.transpose(j, out, tasks),
                Job::UpdateScales(j) => self.update_scales(j, out),
                Job::Divide(j) => self.divide(j, out, tasks),
                Job::Accumulate(j) => self.accumulate(j, out, tasks),
                Job::Norm(j) => self.norm(j, out, tasks),
                Job::SumNorms(j) => self.sum_norms(j, out),
                Job::Control(j) => self.control(j, out),
                Job::Optimize(j) => self.optimize(j, out, tasks),
            }
        }
    }

    unsafe fn amax<'t, 'a: 't>(self, j: &'a Amax<Cpu>, tasks: &mut Tasks<'t>) -> Result<()> {
        // SAFETY: by the contract above.
        let (src, slot) = unsafe { (self.elements(&j.src)?, self.word(&j.slot)?) };
        tasks.push_pieces(src, move |src| {
            slot.fetch_max(fast::amax_word(src), Ordering::Relaxed);
        });
        Ok(())
    }

    unsafe fn cast<'t, 'a: 't>(
        self,
        j: &'a Cast<Cpu>,
        mut out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let (src, slot, saturated, amax) = unsafe {
            (
                self.elements(&j.src)?,
                self.record::<SlotRecord>(&j.scales)?,
                self.optional_word(&j.saturated)?,
                self.optional_word(&j.amax)?,
            )
        };
        let dst = out.take(&j.dst)?;
        let record = out.take_record::<BytesRecord>(&j.record)?;
        if record.scale.to_bits() == slot.cast.to_bits() && record.version == slot.version {
            return Ok(());
        }
        *record = BytesRecord {
            scale: slot.cast,
            scale_inv: slot.cast_inv,
            version: slot.version,
            reserved: 0,
        };
        let scale = slot.cast;
        tasks.push_pieces((src, dst), move |(src, dst)| {
            let count = fast::cast(src, scale, j.format, dst);
            if let Some(counter) = saturated {
                counter.fetch_add(count, Ordering::Relaxed);
            }
            if let Some(slot) = amax {
                slot.fetch_max(fast::amax_word(src), Ordering::Relaxed);
            }
        });
        Ok(())
    }

    unsafe fn decode<'t, 'a: 't>(
        self,
        j: &'a Decode<Cpu>,
        mut out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let (src, record) =
            unsafe { (self.read_as::<u8>(&j.src)?, self.record::<BytesRecord>(&j.record)?) };
        let dst = out.take_elements(&j.dst)?;
        tasks.push_pieces((src, dst), move |(src, dst)| {
            fast::decode(src, j.format, record.scale_inv, dst);
        });
        Ok(())
    }

    unsafe fn transpose<'t, 'a: 't>(
        self,
        j: &'a Transpose<Cpu>,
        mut out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let src = unsafe { self.read_as::<u8>(&j.src)? };
        let dst = out.take(&j.dst)?;
        // Both fit, unless the matrix is empty; then any number does.
        let side = |length: u64| usize::try_from(length).map_err(|e| self.error(e));
        if !src.is_empty() {
            let (rows, cols) = (side(j.rows)?, side(j.cols)?);
            tasks.push(src.len(), move || fast::transpose(src, dst, rows, cols));
        }
        Ok(())
    }

    fn update_scales<'t, 'a: 't>(
        self,
        j: &'a UpdateScales<Cpu>,
        mut out: Outputs<'t, 'a>,
    ) -> Result<()> {
        update_scales(
            j.slots,
            out.take_as(&j.bank)?,
            out.take_as(&j.records)?,
            out.take_as(&j.rings)?,
            j.history,
            j.algorithm,
            j.rule,
            out.take_as(&j.status)?,
        );
        Ok(())
    }

    unsafe fn divide<'t, 'a: 't>(
        self,
        j: &'a Divide<Cpu>,
        mut out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        let dst = out.take_elements(&j.dst)?;
        if same_bytes(&j.src.span, &j.dst.span) {
            tasks.push_pieces(dst, |values| fast::divide_in_place(values, j.divisor));
            return Ok(());
        }
        // SAFETY: by the contract above; the spans are not the same, so the source is listed as
        // read.
        let src = unsafe { self.elements(&j.src)? };
        tasks.push_pieces((src, dst), |(src, dst)| fast::divide(src, j.divisor, dst));
        Ok(())
    }

    unsafe fn accumulate<'t, 'a: 't>(
        self,
        j: &'a Accumulate<Cpu>,
        mut out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let src = unsafe { self.elements(&j.src)? };
        let dst = out.take_as::<f32>(&j.dst.span)?;
        tasks.push_pieces((src, dst), |(src, dst)| fast::accumulate(src, dst));
        Ok(())
    }

    unsafe fn norm<'t, 'a: 't>(
        self,
        j: &'a Norm<Cpu>,
        mut out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let src = unsafe { self.elements(&j.src)? };
        let tiles = out.take_as::<NormRecord>(&j.tiles)?;
        tasks.push_pieces((src, Tiles(tiles)), |(src, Tiles(tiles))| fast::norm(src, tiles));
        Ok(())
    }

    unsafe fn sum_norms<'t, 'a: 't>(
        self,
        j: &'a SumNorms<Cpu>,
        mut out: Outputs<'t, 'a>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let tiles = unsafe { self.read_as::<NormRecord>(&j.tiles)? };
        *out.take_record(&j.total)? = sum_norms(tiles);
        Ok(())
    }

    unsafe fn control<'t, 'a: 't>(
        self,
        j: &'a Control<Cpu>,
        mut out: Outputs<'t, 'a>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let total = unsafe { self.record::<NormRecord>(&j.total)? };
        control(total, out.take_record(&j.control)?, out.take_as(&j.groups)?);
        Ok(())
    }

    unsafe fn optimize<'t, 'a: 't>(
        self,
        j: &'a Optimize<Cpu>,
        mut out: Outputs<'t, 'a>,
        tasks: &mut Tasks<'t>,
    ) -> Result<()> {
        // SAFETY: by the contract above.
        let (grad, group, control, amax) = unsafe {
            (
                self.elements(&j.grad)?,
                self.record::<GroupRecord>(&j.group)?,
                self.record::<ControlRecord>(&j.control)?,
                self.optional_word(&j.amax)?,
            )
        };
        if control.found_inf != 0 {
            return Ok(());
        }
        let master = match &j.master {
            Master::Itself => MasterMut::Itself,
            Master::Copy(span) => MasterMut::Copy(out.take_as(span)?),
            Master::Remainder(span) => MasterMut::Remainder(out.take_as(span)?),
        };
        let emit = match &j.emit {
            None => None,
            Some(emit) => {
                // SAFETY: by the contract above.
                let slot = unsafe { self.record::<SlotRecord>(&emit.scales)? };
                *out.take_record(&emit.record)? = BytesRecord {
                    scale: slot.published,
                    scale_inv: slot.published_inv,
                    version: slot.version.wrapping_add(1),
                    reserved: 0,
                };
                let dst = out.take(&emit.dst)?;
                Some(EmitMut { dst, scale: slot.published, format: emit.format })
            }
        };
        let shard = Shard {
            grad,
            exp_avg: out.take_elements(&j.exp_avg)?,
            exp_avg_sq: out.take_elements(&j.exp_avg_sq)?,
            weight: out.take_elements(&j.weight)?,
            master,
            emit,
        };
        let adam = Adam::new(group, control);
        tasks.push_pieces(shard, move |shard| {
            let word = fast::optimize(&adam, shard);
            if let Some(slot) = amax {
                slot.fetch_max(word, Ordering::Relaxed);
            }
        });
        Ok(())
    }
}

//! Every kind of job, done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::{AnyBitPattern, NoUninit};

use crate::backend::{Span, Tensor};
use crate::error::{Error, Result};
use crate::fast;
use crate::format::DType;
use crate::job::{
    Accumulate, Amax, Cast, Control, Decode, Divide, Job, Master, Norm, Optimize, SumNorms,
    Transpose, UpdateScales,
};
use crate::layout::{BytesRecord, ControlRecord, GroupRecord, NORM_TILE, NormRecord, SlotRecord};
use crate::scalar::{
    Adam, Elements, ElementsMut, EmitMut, MasterMut, Shard, control, sum_norms, update_scales,
};

use super::Cpu;
use super::access::same_bytes;
use super::failure::Source;
use super::tasks::{PIECE, Tasks};
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
        let outputs = Outputs {
            pass,
            list: outputs.iter_mut().map(|(span, written)| (*span, written.bytes_mut())).collect(),
        };
        // SAFETY: by this function's contract.
        unsafe { pass.push(job, outputs, &mut tasks) }.map_err(|e| -> Source { Arc::new(e) })?;
    }
    tasks.run(threads);
    for (_, written) in outputs.into_iter().flatten() {
        written.commit();
    }
    Ok(())
}

/// What a job writes, to be taken once each, by the field of the job that names it.
struct Outputs<'t, 'a> {
    pass: Pass,
    list: Vec<(&'a Span<Cpu>, &'t mut [u8])>,
}

impl<'t> Outputs<'t, '_> {
    fn take(&mut self, span: &Span<Cpu>) -> Result<&'t mut [u8]> {
        let at = self.list.iter().position(|(field, _)| std::ptr::eq(*field, span));
        at.map(|at| self.list.swap_remove(at).1)
            .ok_or_else(|| self.pass.error("a span is not listed among what the job writes"))
    }

    fn take_as<T: NoUninit + AnyBitPattern>(&mut self, span: &Span<Cpu>) -> Result<&'t mut [T]> {
        let pass = self.pass;
        bytemuck::try_cast_slice_mut(self.take(span)?).map_err(|e| pass.error(e))
    }

    fn take_record<T: NoUninit + AnyBitPattern>(&mut self, span: &Span<Cpu>) -> Result<&'t mut T> {
        let pass = self.pass;
        self.take_as(span)?.first_mut().ok_or_else(|| pass.error("a record is missing"))
    }

    fn take_elements(&mut self, tensor: &Tensor<Cpu>) -> Result<ElementsMut<'t>> {
        Ok(match tensor.dtype {
            DType::Bf16 => ElementsMut::Bf16(self.take_as(&tensor.span)?),
            DType::F16 => ElementsMut::F16(self.take_as(&tensor.span)?),
            DType::F32 => ElementsMut::F32(self.take_as(&tensor.span)?),
        })
    }
}

#[derive(Clone, Copy)]
struct Pass {
    name: &'static str,
}

/// All functions here are called by [`run`] alone, under its contract: what they read has been
/// admitted, and does not overlap what is written.
#[allow(clippy::missing_safety_doc, reason = "stated once, above")]
impl Pass {
    fn error(self, problem: impl std::fmt::Display) -> Error {
        Error::Job { pass: self.name, problem: problem.to_string() }
    }

    unsafe fn read_as<'a, T: AnyBitPattern>(self, span: &'a Span<Cpu>) -> Result<&'a [T]> {
        // SAFETY: by the contract above.
        bytemuck::try_cast_slice(unsafe { views::read(span) }).map_err(|e| self.error(e))
    }

    unsafe fn record<'a, T: AnyBitPattern>(self, span: &'a Span<Cpu>) -> Result<&'a T> {
        // SAFETY: by the contract above.
        unsafe { self.read_as(span) }?.first().ok_or_else(|| self.error("a record is missing"))
    }

    unsafe fn elements<'a>(self, tensor: &'a Tensor<Cpu>) -> Result<Elements<'a>> {
        // SAFETY: by the contract above.
        Ok(unsafe {
            match tensor.dtype {
                DType::Bf16 => Elements::Bf16(self.read_as(&tensor.span)?),
                DType::F16 => Elements::F16(self.read_as(&tensor.span)?),
                DType::F32 => Elements::F32(self.read_as(&tensor.span)?),
            }
        })
    }

    unsafe fn word<'a>(self, span: &'a Span<Cpu>) -> Result<&'a AtomicU32> {
        // SAFETY: by the contract above: the span is listed as accumulated.
        unsafe { span.buffer().word(span.range().start) }
            .ok_or_else(|| self.error("an accumulated word is not aligned"))
    }

    unsafe fn optional_word<'a>(
        self,
        span: &'a Option<Span<Cpu>>,
    ) -> Result<Option<&'a AtomicU32>> {
        // SAFETY: by the contract above.
        span.as_ref().map(|span| unsafe { self.word(span) }).transpose()
    }

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
        pieces(src, Elements::len, Elements::split_at, |piece| {
            tasks.push(piece.len(), move || {
                slot.fetch_max(fast::amax_word(piece), Ordering::Relaxed);
            });
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
        pieces(
            (src, dst),
            |(src, _)| src.len(),
            split_pair,
            |(src, dst)| {
                tasks.push(src.len(), move || {
                    let count = fast::cast(src, scale, j.format, dst);
                    if let Some(counter) = saturated {
                        counter.fetch_add(count, Ordering::Relaxed);
                    }
                    if let Some(slot) = amax {
                        slot.fetch_max(fast::amax_word(src), Ordering::Relaxed);
                    }
                });
            },
        );
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
        let split = |(src, dst): (&'a [u8], ElementsMut<'t>), mid| {
            let ((a, b), (c, d)) = (src.split_at(mid), dst.split_at(mid));
            ((a, c), (b, d))
        };
        pieces(
            (src, dst),
            |(src, _)| src.len(),
            split,
            |(src, dst)| {
                tasks.push(src.len(), move || fast::decode(src, j.format, record.scale_inv, dst));
            },
        );
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
            pieces(dst, ElementsMut::len, ElementsMut::split_at, |piece| {
                tasks.push(piece.len(), move || fast::divide_in_place(piece, j.divisor));
            });
            return Ok(());
        }
        // SAFETY: by the contract above; the spans are not the same, so the source is listed as
        // read.
        let src = unsafe { self.elements(&j.src)? };
        let split = |(src, dst): (Elements<'a>, ElementsMut<'t>), mid| {
            let ((a, b), (c, d)) = (src.split_at(mid), dst.split_at(mid));
            ((a, c), (b, d))
        };
        pieces(
            (src, dst),
            |(src, _)| src.len(),
            split,
            |(src, dst)| {
                tasks.push(src.len(), move || fast::divide(src, j.divisor, dst));
            },
        );
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
        pieces(
            (src, dst),
            |(src, _)| src.len(),
            split_pair,
            |(src, dst)| {
                tasks.push(src.len(), move || fast::accumulate(src, dst));
            },
        );
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
        let split = |(src, tiles): (Elements<'a>, &'t mut [NormRecord]), mid: usize| {
            let ((a, b), (c, d)) =
                (src.split_at(mid), tiles.split_at_mut(mid / NORM_TILE as usize));
            ((a, c), (b, d))
        };
        pieces(
            (src, tiles),
            |(src, _)| src.len(),
            split,
            |(src, tiles)| {
                tasks.push(src.len(), move || fast::norm(src, tiles));
            },
        );
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
        pieces(shard, Shard::len, Shard::split_at, |piece| {
            tasks.push(piece.len(), move || {
                let word = fast::optimize(&adam, piece);
                if let Some(slot) = amax {
                    slot.fetch_max(word, Ordering::Relaxed);
                }
            });
        });
        Ok(())
    }
}

/// Cuts something into pieces of [`PIECE`] elements and a rest; an empty thing is one piece, since
/// an empty tensor touches its slot all the same.
fn pieces<T>(
    whole: T,
    len: impl Fn(&T) -> usize,
    split: impl Fn(T, usize) -> (T, T),
    mut each: impl FnMut(T),
) {
    let mut rest = whole;
    while len(&rest) > PIECE {
        let (piece, after) = split(rest, PIECE);
        each(piece);
        rest = after;
    }
    each(rest);
}

fn split_pair<'s, 'd, T>(
    (src, dst): (Elements<'s>, &'d mut [T]),
    mid: usize,
) -> ((Elements<'s>, &'d mut [T]), (Elements<'s>, &'d mut [T])) {
    let ((a, b), (c, d)) = (src.split_at(mid), dst.split_at_mut(mid));
    ((a, c), (b, d))
}

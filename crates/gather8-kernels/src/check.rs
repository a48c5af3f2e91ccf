//! Do a job's spans fit each other? Asked once, when a pass is planned, by every backend.

use std::sync::Arc;

use crate::backend::{Backend, Span, Tensor};
use crate::error::{Error, Result};
use crate::format::DType;
use crate::job::{
    Accumulate, Amax, Cast, Control, Decode, Divide, Emit, Job, Master, Norm, Optimize, SumNorms,
    Transpose, UpdateScales,
};
use crate::layout::{
    BytesRecord, ControlRecord, GroupRecord, NormRecord, ORDER_WORDS, SlotRecord, bank_bytes,
    norm_tiles, status_bytes,
};

/// Bytes of a word: a slot, a counter.
const WORD: u64 = 4;
/// Records begin at multiples of this.
const RECORD_ALIGNMENT: u64 = 8;
/// The longest ring.
const MAX_HISTORY: u32 = 1024;
/// Slots are numbered in 32 bits on devices, and a table of this many is a mistake anyhow.
const MAX_SLOTS: u64 = 1 << 24;

const RECORD: u64 = size_of::<SlotRecord>() as u64;
const BYTES_RECORD: u64 = size_of::<BytesRecord>() as u64;
const NORM_RECORD: u64 = size_of::<NormRecord>() as u64;
const GROUP_RECORD: u64 = size_of::<GroupRecord>() as u64;
const CONTROL_RECORD: u64 = size_of::<ControlRecord>() as u64;

/// Checks every job of a pass, that all are of one kind, and that no two touch the same bytes
/// other than by reading them or by accumulating into them: jobs of a pass run in any order, also
/// at once. Returns the pass's name, or `None` for an empty list.
///
/// # Errors
/// [`Error::Job`] and [`Error::OutOfRange`], for the first rule that is broken.
pub fn check_all<B: Backend>(jobs: &[Job<B>]) -> Result<Option<&'static str>> {
    let Some(pass) = jobs.first().map(Job::pass) else { return Ok(None) };
    for job in jobs {
        if job.pass() != pass {
            return Err(Error::Job {
                pass,
                problem: format!(
                    "a pass holds jobs of one kind, but there is a {} job among these: plan it as a pass of its own",
                    job.pass()
                ),
            });
        }
        job.check_spans()?;
    }
    check_overlaps(pass, jobs)?;
    Ok(Some(pass))
}

impl<B: Backend> Job<B> {
    /// Checks every length, type, alignment and range of this job, and that what it writes
    /// overlaps nothing else that it touches.
    ///
    /// # Errors
    /// [`Error::Job`] and [`Error::OutOfRange`], for the first rule that is broken.
    pub fn check(&self) -> Result<()> {
        check_all(std::slice::from_ref(self)).map(|_| ())
    }

    fn check_spans(&self) -> Result<()> {
        let rules = Rules { pass: self.pass() };
        match self {
            Self::Amax(j) => rules.amax(j),
            Self::Cast(j) => rules.cast(j),
            Self::Decode(j) => rules.decode(j),
            Self::Transpose(j) => rules.transpose(j),
            Self::UpdateScales(j) => rules.update_scales(j),
            Self::Divide(j) => rules.divide(j),
            Self::Accumulate(j) => rules.accumulate(j),
            Self::Norm(j) => rules.norm(j),
            Self::SumNorms(j) => rules.sum_norms(j),
            Self::Control(j) => rules.control(j),
            Self::Optimize(j) => rules.optimize(j),
        }
    }
}

/// The rules of one pass.
#[derive(Clone, Copy)]
struct Rules {
    pass: &'static str,
}

impl Rules {
    fn refuse(self, problem: String) -> Result<()> {
        Err(Error::Job { pass: self.pass, problem })
    }

    /// The span holds exactly so many bytes and begins at a multiple of `alignment`.
    fn bytes<B: Backend>(
        self,
        what: &str,
        span: &Span<B>,
        bytes: u64,
        alignment: u64,
    ) -> Result<()> {
        if span.len() != bytes {
            return self.refuse(format!("{what} must hold {bytes} bytes, not {}", span.len()));
        }
        self.aligned(what, span, alignment)
    }

    fn aligned<B: Backend>(self, what: &str, span: &Span<B>, alignment: u64) -> Result<()> {
        let start = span.range().start;
        if !start.is_multiple_of(alignment) {
            return self.refuse(format!(
                "{what} must begin at a multiple of {alignment} bytes in its buffer, not at {start}"
            ));
        }
        Ok(())
    }

    fn word<B: Backend>(self, what: &str, span: &Span<B>) -> Result<()> {
        self.bytes(what, span, WORD, WORD)
    }

    fn record<B: Backend>(self, what: &str, span: &Span<B>, bytes: u64) -> Result<()> {
        self.bytes(what, span, bytes, RECORD_ALIGNMENT)
    }

    /// Any number of records.
    fn records<B: Backend>(self, what: &str, span: &Span<B>, bytes: u64) -> Result<()> {
        if !span.len().is_multiple_of(bytes) {
            return self.refuse(format!(
                "{what} must hold whole records of {bytes} bytes, not {} bytes",
                span.len()
            ));
        }
        self.aligned(what, span, RECORD_ALIGNMENT)
    }

    /// Whole, aligned elements of one of the types. [`Tensor::new`] has seen to the former, but
    /// its fields are public.
    fn tensor<B: Backend>(self, what: &str, tensor: &Tensor<B>, allowed: &[DType]) -> Result<()> {
        if !allowed.contains(&tensor.dtype) {
            let names: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
            return self.refuse(format!(
                "{what} must be {}, not {}",
                names.join(" or "),
                tensor.dtype.name()
            ));
        }
        let size = tensor.dtype.size();
        if !tensor.span.len().is_multiple_of(size) {
            return self.refuse(format!(
                "{what} has {} bytes, which is no whole number of {} elements",
                tensor.span.len(),
                tensor.dtype.name()
            ));
        }
        self.aligned(what, &tensor.span, size)
    }

    fn elements(self, what: &str, found: u64, of: &str, wanted: u64) -> Result<()> {
        if found != wanted {
            return self.refuse(format!("{found} elements in {what}, but {wanted} in {of}"));
        }
        Ok(())
    }

    fn amax<B: Backend>(self, j: &Amax<B>) -> Result<()> {
        self.tensor("the tensor", &j.src, &[DType::Bf16, DType::F16, DType::F32])?;
        self.word("the slot", &j.slot)
    }

    fn cast<B: Backend>(self, j: &Cast<B>) -> Result<()> {
        self.tensor("the tensor", &j.src, &[DType::Bf16, DType::F16, DType::F32])?;
        self.elements("the float8 bytes", j.dst.len(), "the tensor", j.src.elements())?;
        self.record("the slot record", &j.scales, RECORD)?;
        self.record("the bytes' record", &j.record, BYTES_RECORD)?;
        if let Some(counter) = &j.saturated {
            self.word("the counter of saturated values", counter)?;
        }
        if let Some(slot) = &j.amax {
            self.word("the amax slot", slot)?;
        }
        Ok(())
    }

    fn decode<B: Backend>(self, j: &Decode<B>) -> Result<()> {
        self.tensor("the destination", &j.dst, &[DType::Bf16, DType::F32])?;
        self.elements("the float8 bytes", j.src.len(), "the destination", j.dst.elements())?;
        self.record("the bytes' record", &j.record, BYTES_RECORD)
    }

    fn transpose<B: Backend>(self, j: &Transpose<B>) -> Result<()> {
        let Some(bytes) = j.rows.checked_mul(j.cols) else {
            return self.refuse(format!("{} x {} is no possible matrix", j.rows, j.cols));
        };
        self.bytes("the matrix", &j.src, bytes, 1)?;
        self.bytes("the transpose", &j.dst, bytes, 1)
    }

    fn update_scales<B: Backend>(self, j: &UpdateScales<B>) -> Result<()> {
        j.rule.check()?;
        if j.history == 0 || j.history > MAX_HISTORY {
            return Err(Error::OutOfRange {
                name: "history",
                range: "1 to 1024",
                value: j.history.to_string(),
            });
        }
        if j.slots > MAX_SLOTS {
            return self.refuse(format!("{} slots are more than {MAX_SLOTS}", j.slots));
        }
        if j.bank.len() != bank_bytes(j.slots) {
            return self.refuse(format!(
                "the bank must hold {} slots and {ORDER_WORDS} order words, {} bytes, not {}",
                j.slots,
                bank_bytes(j.slots),
                j.bank.len()
            ));
        }
        self.aligned("the bank", &j.bank, WORD)?;
        self.record("the slot records", &j.records, j.slots * RECORD)?;
        self.bytes("the rings", &j.rings, j.slots * u64::from(j.history) * WORD, WORD)?;
        self.bytes("the status", &j.status, status_bytes(j.slots), WORD)
    }

    fn divide<B: Backend>(self, j: &Divide<B>) -> Result<()> {
        self.tensor("the source", &j.src, &[DType::Bf16, DType::F32])?;
        self.tensor("the destination", &j.dst, &[DType::Bf16, DType::F32])?;
        self.elements("the source", j.src.elements(), "the destination", j.dst.elements())?;
        if !(j.divisor.is_finite() && j.divisor > 0.0) {
            return Err(Error::OutOfRange {
                name: "the divisor of gradients",
                range: "the finite numbers above 0",
                value: j.divisor.to_string(),
            });
        }
        Ok(())
    }

    fn accumulate<B: Backend>(self, j: &Accumulate<B>) -> Result<()> {
        self.tensor("the source", &j.src, &[DType::Bf16, DType::F32])?;
        self.tensor("the destination", &j.dst, &[DType::F32])?;
        self.elements("the source", j.src.elements(), "the destination", j.dst.elements())
    }

    fn norm<B: Backend>(self, j: &Norm<B>) -> Result<()> {
        self.tensor("the gradient", &j.src, &[DType::Bf16, DType::F32])?;
        let tiles = norm_tiles(j.src.elements());
        if j.tiles.len() != tiles * NORM_RECORD {
            return self.refuse(format!(
                "{} elements make {tiles} tiles of {NORM_RECORD} bytes each, but the tiles' span has {} bytes",
                j.src.elements(),
                j.tiles.len()
            ));
        }
        self.aligned("the tiles", &j.tiles, RECORD_ALIGNMENT)
    }

    fn sum_norms<B: Backend>(self, j: &SumNorms<B>) -> Result<()> {
        self.records("the tiles", &j.tiles, NORM_RECORD)?;
        self.record("the total", &j.total, NORM_RECORD)
    }

    fn control<B: Backend>(self, j: &Control<B>) -> Result<()> {
        self.record("the total", &j.total, NORM_RECORD)?;
        self.record("the control record", &j.control, CONTROL_RECORD)?;
        self.records("the group records", &j.groups, GROUP_RECORD)
    }

    fn optimize<B: Backend>(self, j: &Optimize<B>) -> Result<()> {
        let elements = j.weight.elements();
        let stored = [DType::Bf16, DType::F32];
        self.tensor("the weight", &j.weight, &stored)?;
        for (what, tensor) in
            [("the gradient", &j.grad), ("exp_avg", &j.exp_avg), ("exp_avg_sq", &j.exp_avg_sq)]
        {
            self.tensor(what, tensor, &stored)?;
            self.elements(what, tensor.elements(), "the weight", elements)?;
        }
        if j.exp_avg.dtype != j.exp_avg_sq.dtype {
            return self.refuse(format!(
                "exp_avg and exp_avg_sq must be of one type, not {} and {}",
                j.exp_avg.dtype.name(),
                j.exp_avg_sq.dtype.name()
            ));
        }
        match (&j.master, j.weight.dtype) {
            (Master::Itself, DType::F32) => {}
            (Master::Itself, other) => {
                return self.refuse(format!(
                    "a weight that is its own master must be f32, not {}: give it a copy or remainders",
                    other.name()
                ));
            }
            (Master::Copy(_) | Master::Remainder(_), other) if other != DType::Bf16 => {
                return self.refuse(format!(
                    "a weight with a master beside it must be bf16, not {}",
                    other.name()
                ));
            }
            (Master::Copy(span), _) => self.bytes("the master copy", span, elements * 4, 4)?,
            (Master::Remainder(span), _) => self.bytes("the remainders", span, elements * 2, 2)?,
        }
        self.record("the group record", &j.group, GROUP_RECORD)?;
        self.record("the control record", &j.control, CONTROL_RECORD)?;
        if let Some(slot) = &j.amax {
            self.word("the amax slot", slot)?;
        }
        if let Some(Emit { dst, scales, record, .. }) = &j.emit {
            self.elements("the float8 bytes", dst.len(), "the weight", elements)?;
            self.record("the slot record", scales, RECORD)?;
            self.record("the bytes' record", record, BYTES_RECORD)?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Access {
    Read,
    Accumulate,
    Write,
}

/// Sweeps over all spans of a pass in order of address; two that share bytes must both be reads or
/// both accumulations. Dividing in place is allowed: that job's source is its destination.
fn check_overlaps<B: Backend>(pass: &'static str, jobs: &[Job<B>]) -> Result<()> {
    let mut touched = Vec::new();
    for job in jobs {
        let writes = job.writes();
        let in_place = match job {
            Job::Divide(j)
                if Arc::ptr_eq(j.src.span.buffer(), j.dst.span.buffer())
                    && j.src.span.range() == j.dst.span.range()
                    && j.src.dtype == j.dst.dtype =>
            {
                Some(&j.src.span)
            }
            _ => None,
        };
        // A span that is read and written stands in both lists as the same field of the job.
        let reads = job.reads().into_iter().filter(|read| {
            !writes.iter().chain(&in_place).any(|write| std::ptr::eq(*read, *write))
        });
        let mut push = |span: &Span<B>, access| {
            if !span.is_empty() {
                let buffer = Arc::as_ptr(span.buffer()).cast::<()>();
                touched.push((buffer, span.range().start, span.range().end, access));
            }
        };
        reads.for_each(|span| push(span, Access::Read));
        writes.iter().for_each(|span| push(span, Access::Write));
        job.accumulates().into_iter().for_each(|span| push(span, Access::Accumulate));
    }
    touched.sort_unstable();

    let mut here = std::ptr::null();
    let (mut read_to, mut accumulated_to, mut written_to) = (0, 0, 0);
    for (buffer, start, end, access) in touched {
        if !std::ptr::eq(buffer, here) {
            here = buffer;
            (read_to, accumulated_to, written_to) = (0, 0, 0);
        }
        let (blocked_to, own) = match access {
            Access::Read => (accumulated_to.max(written_to), &mut read_to),
            Access::Accumulate => (read_to.max(written_to), &mut accumulated_to),
            Access::Write => (read_to.max(accumulated_to).max(written_to), &mut written_to),
        };
        if start < blocked_to {
            return Err(Error::Job {
                pass,
                problem: format!(
                    "bytes {start}..{} of a buffer are written here and touched again in the same pass: \
                     give every output memory of its own, or use two passes",
                    end.min(blocked_to)
                ),
            });
        }
        *own = end.max(*own);
    }
    Ok(())
}

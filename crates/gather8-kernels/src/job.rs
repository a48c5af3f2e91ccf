//! The passes, described: what is read, what is written, with which numbers. A pass is a list of
//! jobs of one kind; a backend launches it at once, whatever the number of tensors.
//!
//! Every job names its spans ([`Job::reads`], [`Job::writes`]), which is what the order checker of
//! the CPU backend goes by; a span that is read and written is in both.

use crate::backend::{Backend, Span, Tensor};
use crate::format::Format;
use crate::scale::ScaleRule;

/// One tensor's share of a pass (or, for tables and norms, the pass itself).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Job<B: Backend> {
    /// See [`Amax`].
    Amax(Amax<B>),
    /// See [`Cast`].
    Cast(Cast<B>),
    /// See [`Decode`].
    Decode(Decode<B>),
    /// See [`Transpose`].
    Transpose(Transpose<B>),
    /// See [`UpdateScales`].
    UpdateScales(UpdateScales<B>),
    /// See [`Divide`].
    Divide(Divide<B>),
    /// See [`Accumulate`].
    Accumulate(Accumulate<B>),
    /// See [`Norm`].
    Norm(Norm<B>),
    /// See [`SumNorms`].
    SumNorms(SumNorms<B>),
    /// See [`Control`].
    Control(Control<B>),
    /// See [`Optimize`].
    Optimize(Optimize<B>),
}

/// The largest magnitude of a tensor, accumulated into a slot of the amax table by unsigned MAX:
/// `0x8000_0000 | bits`. An empty tensor touches its slot with 0.
#[derive(Clone, Debug)]
pub struct Amax<B: Backend> {
    /// The unpadded shard, in its stored type.
    pub src: Tensor<B>,
    /// The slot's word in a bank (4 bytes).
    pub slot: Span<B>,
}

/// Float8 bytes from a tensor: `f32(x) * scale`, saturated, nearest even.
#[derive(Clone, Debug)]
pub struct Cast<B: Backend> {
    /// The unpadded shard.
    pub src: Tensor<B>,
    /// One byte per element.
    pub dst: Span<B>,
    /// The bytes' format.
    pub format: Format,
    /// The slot's [`SlotRecord`](crate::layout::SlotRecord): `cast` and `version` are read.
    pub scales: Span<B>,
    /// The bytes' [`BytesRecord`](crate::layout::BytesRecord), written with them. If it already
    /// holds the slot's scale (same bits) and version, nothing is done: the optimizer has emitted
    /// these bytes, or a skipped step has left them right.
    pub record: Span<B>,
    /// Where saturated values are counted (a u32, added to), on request.
    pub saturated: Option<Span<B>>,
    /// A slot's word that takes the tensor's amax in the same pass, on request.
    pub amax: Option<Span<B>>,
}

/// Values from float8 bytes: `f32(code) * scale_inv`, to nearest even in BF16.
#[derive(Clone, Debug)]
pub struct Decode<B: Backend> {
    /// The codes.
    pub src: Span<B>,
    /// Their format.
    pub format: Format,
    /// Their [`BytesRecord`](crate::layout::BytesRecord): `scale_inv` is read.
    pub record: Span<B>,
    /// BF16 or F32, one element per byte.
    pub dst: Tensor<B>,
}

/// The transpose of a matrix of float8 bytes; Hopper's float8 products want both layouts.
#[derive(Clone, Debug)]
pub struct Transpose<B: Backend> {
    /// `rows * cols` bytes, row-major.
    pub src: Span<B>,
    /// Rows of `src`.
    pub rows: u64,
    /// Columns of `src`.
    pub cols: u64,
    /// `cols * rows` bytes, row-major.
    pub dst: Span<B>,
}

/// How a delayed scale comes from a ring of past amaxes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum AmaxAlgorithm {
    /// The largest entry.
    #[default]
    Max,
    /// The newest entry.
    MostRecent,
}

/// Amaxes to ring entries and scales, for a whole table at once, after the all-reduce of a bank.
///
/// If the order words are not complementary, or a weight's slot holds a non-finite amax, scales and
/// rings stay as they are and the status says so. Either way the bank is zeroed. Else, for every
/// touched slot: non-finite (inputs, gradients): counted, nothing else. Finite: it replaces the
/// ring's oldest entry, or fills the ring if [`SEED`](crate::layout::slot_flags::SEED) is set (the
/// flag is then cleared) or every entry was 0; `new` is the scale of the ring (delayed) or of the
/// amax (dynamic); `cast` becomes the old `published` under delayed scaling unless the ring was
/// filled, else `new`; `published` becomes `new`; `version` counts up.
#[derive(Clone, Debug)]
pub struct UpdateScales<B: Backend> {
    /// Slots in the table.
    pub slots: u64,
    /// One word per slot and the order words ([`bank_bytes`](crate::layout::bank_bytes)).
    pub bank: Span<B>,
    /// `slots` [`SlotRecord`](crate::layout::SlotRecord)s.
    pub records: Span<B>,
    /// `slots * history` amaxes (f32), slot by slot.
    pub rings: Span<B>,
    /// Entries in a ring, 1 to 1024.
    pub history: u32,
    /// Max over the ring, or its newest entry.
    pub algorithm: AmaxAlgorithm,
    /// Margin and power-of-two option.
    pub rule: ScaleRule,
    /// Host memory, [`status_bytes`](crate::layout::status_bytes).
    pub status: Span<B>,
}

/// `dst = f32(src) / divisor`, an IEEE division; in place allowed.
#[derive(Clone, Debug)]
pub struct Divide<B: Backend> {
    /// BF16 or F32.
    pub src: Tensor<B>,
    /// BF16 (nearest even) or F32, as many elements.
    pub dst: Tensor<B>,
    /// World × microbatches.
    pub divisor: f32,
}

/// `dst = dst + f32(src)` in f32.
#[derive(Clone, Debug)]
pub struct Accumulate<B: Backend> {
    /// BF16 or F32.
    pub src: Tensor<B>,
    /// F32, as many elements.
    pub dst: Tensor<B>,
}

/// A gradient's sum of squares in f64 and its count of non-finite elements, tile by tile in the
/// fixed order of [`NORM_TILE`](crate::layout::NORM_TILE).
#[derive(Clone, Debug)]
pub struct Norm<B: Backend> {
    /// BF16 or F32.
    pub src: Tensor<B>,
    /// One [`NormRecord`](crate::layout::NormRecord) per tile.
    pub tiles: Span<B>,
}

/// Adds the tiles' records of all tensors in the fixed order of
/// [`NORM_FINAL_LANES`](crate::layout::NORM_FINAL_LANES).
#[derive(Clone, Debug)]
pub struct SumNorms<B: Backend> {
    /// Any number of [`NormRecord`](crate::layout::NormRecord)s.
    pub tiles: Span<B>,
    /// One record.
    pub total: Span<B>,
}

/// Decides the step, on the device: norm, clipping factor, found-inf, step count, bias corrections.
///
/// `norm = sqrt(sum) * inverse_loss_scale`; `factor = inverse_loss_scale *
/// min(1, max_norm / (norm + 1e-6))` as in torch's `clip_grad_norm_`, in f64, rounded once;
/// found-inf if any element was non-finite and skipping is on: then step and corrections stay.
#[derive(Clone, Debug)]
pub struct Control<B: Backend> {
    /// The global [`NormRecord`](crate::layout::NormRecord), after its all-reduce.
    pub total: Span<B>,
    /// The [`ControlRecord`](crate::layout::ControlRecord).
    pub control: Span<B>,
    /// Every [`GroupRecord`](crate::layout::GroupRecord).
    pub groups: Span<B>,
}

/// How a weight's shard keeps its full-precision master.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Master<B: Backend> {
    /// The shard itself is F32.
    Itself,
    /// A BF16 shard with an F32 copy beside it; the shard is the copy split (half away from zero).
    Copy(Span<B>),
    /// A BF16 shard with a 16-bit remainder beside it.
    Remainder(Span<B>),
}

/// Float8 bytes that the optimizer writes along, with the scale that is already known.
#[derive(Clone, Debug)]
pub struct Emit<B: Backend> {
    /// One byte per element.
    pub dst: Span<B>,
    /// Their format.
    pub format: Format,
    /// The slot's [`SlotRecord`](crate::layout::SlotRecord): `published` and `version + 1` go into
    /// the bytes' record.
    pub scales: Span<B>,
    /// The bytes' [`BytesRecord`](crate::layout::BytesRecord).
    pub record: Span<B>,
}

/// One tensor's AdamW step; everything is left bit-identical if the control record says found-inf.
#[derive(Clone, Debug)]
pub struct Optimize<B: Backend> {
    /// BF16 or F32.
    pub grad: Tensor<B>,
    /// First moment, BF16 or F32.
    pub exp_avg: Tensor<B>,
    /// Second moment, BF16 or F32 as the first.
    pub exp_avg_sq: Tensor<B>,
    /// The shard, BF16 or F32.
    pub weight: Tensor<B>,
    /// Its master.
    pub master: Master<B>,
    /// Its parameter group's [`GroupRecord`](crate::layout::GroupRecord).
    pub group: Span<B>,
    /// The [`ControlRecord`](crate::layout::ControlRecord).
    pub control: Span<B>,
    /// The word of the weight's slot: takes the amax of the updated shard.
    pub amax: Option<Span<B>>,
    /// Float8 bytes of the updated shard, under delayed scaling.
    pub emit: Option<Emit<B>>,
}

impl<B: Backend> Job<B> {
    /// The pass's name in errors and traces.
    pub fn pass(&self) -> &'static str {
        match self {
            Self::Amax(_) => "amax",
            Self::Cast(_) => "cast",
            Self::Decode(_) => "decode",
            Self::Transpose(_) => "transpose",
            Self::UpdateScales(_) => "update-scales",
            Self::Divide(_) => "divide",
            Self::Accumulate(_) => "accumulate",
            Self::Norm(_) => "norm",
            Self::SumNorms(_) => "sum-norms",
            Self::Control(_) => "control",
            Self::Optimize(_) => "optimize",
        }
    }

    /// Every span that the job reads.
    pub fn reads(&self) -> Vec<&Span<B>> {
        match self {
            Self::Amax(j) => vec![&j.src.span],
            Self::Cast(j) => vec![&j.src.span, &j.scales, &j.record],
            Self::Decode(j) => vec![&j.src, &j.record],
            Self::Transpose(j) => vec![&j.src],
            Self::UpdateScales(j) => vec![&j.bank, &j.records, &j.rings],
            Self::Divide(j) => vec![&j.src.span],
            Self::Accumulate(j) => vec![&j.src.span, &j.dst.span],
            Self::Norm(j) => vec![&j.src.span],
            Self::SumNorms(j) => vec![&j.tiles],
            Self::Control(j) => vec![&j.total, &j.control, &j.groups],
            Self::Optimize(j) => {
                let mut spans = vec![
                    &j.grad.span,
                    &j.exp_avg.span,
                    &j.exp_avg_sq.span,
                    &j.weight.span,
                    &j.group,
                    &j.control,
                ];
                match &j.master {
                    Master::Itself => {}
                    Master::Copy(span) | Master::Remainder(span) => spans.push(span),
                }
                spans.extend(j.emit.iter().map(|emit| &emit.scales));
                spans
            }
        }
    }

    /// Every span that the job writes. Amax words are listed under
    /// [`accumulates`](Self::accumulates) instead.
    pub fn writes(&self) -> Vec<&Span<B>> {
        match self {
            Self::Amax(_) => vec![],
            Self::Cast(j) => vec![&j.dst, &j.record],
            Self::Decode(j) => vec![&j.dst.span],
            Self::Transpose(j) => vec![&j.dst],
            Self::UpdateScales(j) => vec![&j.bank, &j.records, &j.rings, &j.status],
            Self::Divide(j) => vec![&j.dst.span],
            Self::Accumulate(j) => vec![&j.dst.span],
            Self::Norm(j) => vec![&j.tiles],
            Self::SumNorms(j) => vec![&j.total],
            Self::Control(j) => vec![&j.control, &j.groups],
            Self::Optimize(j) => {
                let mut spans = vec![&j.exp_avg.span, &j.exp_avg_sq.span, &j.weight.span];
                match &j.master {
                    Master::Itself => {}
                    Master::Copy(span) | Master::Remainder(span) => spans.push(span),
                }
                spans.extend(j.emit.iter().flat_map(|emit| [&emit.dst, &emit.record]));
                spans
            }
        }
    }

    /// Spans that the job updates by atomic MAX or addition: any number of passes may do so at
    /// once, but reads and writes of them must be ordered.
    pub fn accumulates(&self) -> Vec<&Span<B>> {
        match self {
            Self::Amax(j) => vec![&j.slot],
            Self::Cast(j) => j.saturated.iter().chain(&j.amax).collect(),
            Self::Optimize(j) => j.amax.iter().collect(),
            _ => vec![],
        }
    }
}

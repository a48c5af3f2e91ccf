//! AdamW and Adam with L2 regularisation, on a BF16 weight with its master beside it.

use super::amax::abs_bits;
use super::elements::{Elements, ElementsMut, canonical};
use super::split::{join, split, weight_abs_bits};
use crate::format::Format;
use crate::layout::{ControlRecord, GroupRecord, TOUCHED};

/// The numbers of one step, as the element's formula takes them: all in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// What every gradient is multiplied with first.
    pub factor: f32,
    /// Learning rate.
    pub lr: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Added to the root of the corrected second moment.
    pub eps: f32,
    /// Adam with L2 regularisation instead of AdamW.
    pub l2: bool,
    /// b1.
    pub b1: f32,
    /// 1 − b1.
    pub one_minus_b1: f32,
    /// b2.
    pub b2: f32,
    /// 1 − b2.
    pub one_minus_b2: f32,
    /// 1 − b1^step.
    pub correction1: f32,
    /// 1 − b2^step.
    pub correction2: f32,
}

impl Adam {
    /// The step's numbers from the two records on the device.
    pub const fn new(group: &GroupRecord, control: &ControlRecord) -> Self {
        Self {
            factor: control.factor,
            lr: group.lr,
            weight_decay: group.weight_decay,
            eps: group.eps,
            l2: group.mode == 1,
            b1: group.b1,
            one_minus_b1: group.one_minus_b1,
            b2: group.b2,
            one_minus_b2: group.one_minus_b2,
            correction1: group.correction1,
            correction2: group.correction2,
        }
    }
}

/// One element's step: the new first moment, second moment and master.
///
/// Kingma and Ba's Adam (arXiv 1412.6980) with the decoupled decay of Loshchilov and Hutter (arXiv
/// 1711.05101). Every operation is one IEEE f32 operation, in this order:
///
/// ```text
/// g = grad * factor                     L2: g = g + wd * p
/// m = b1 * m + (1 - b1) * g
/// v = b2 * v + ((1 - b2) * g) * g
/// d = (m / bc1) / (sqrt(v / bc2) + eps)     AdamW: d = d + wd * p
/// p = p - lr * d
/// ```
///
/// The moments that enter `d` are not rounded to their stored type.
#[inline(always)]
pub fn adam_element(adam: &Adam, grad: f32, m: f32, v: f32, p: f32) -> (f32, f32, f32) {
    let mut g = grad * adam.factor;
    if adam.l2 {
        g += adam.weight_decay * p;
    }
    let m = adam.b1 * m + adam.one_minus_b1 * g;
    let v = adam.b2 * v + (adam.one_minus_b2 * g) * g;
    let mut d = (m / adam.correction1) / ((v / adam.correction2).sqrt() + adam.eps);
    if !adam.l2 {
        d += adam.weight_decay * p;
    }
    (m, v, p - adam.lr * d)
}

/// How a shard keeps its full-precision master.
#[derive(Debug)]
pub enum MasterMut<'a> {
    /// The shard is F32 and its own master.
    Itself,
    /// A BF16 shard; the f32 copy is the master, the shard its [`split`].
    Copy(&'a mut [f32]),
    /// A BF16 shard and the remainders that [`join`] it to its master.
    Remainder(&'a mut [u16]),
}

/// Float8 codes that are written along.
#[derive(Debug)]
pub struct EmitMut<'a> {
    /// One code per element.
    pub dst: &'a mut [u8],
    /// What the updated weight is multiplied with.
    pub scale: f32,
    /// The codes' format.
    pub format: Format,
}

/// One shard with everything that its step reads and writes.
#[derive(Debug)]
pub struct Shard<'a> {
    /// BF16 or F32.
    pub grad: Elements<'a>,
    /// First moment, BF16 or F32.
    pub exp_avg: ElementsMut<'a>,
    /// Second moment, as the first.
    pub exp_avg_sq: ElementsMut<'a>,
    /// BF16, or F32 with [`MasterMut::Itself`].
    pub weight: ElementsMut<'a>,
    /// The master.
    pub master: MasterMut<'a>,
    /// Float8 codes of the updated weight, on request.
    pub emit: Option<EmitMut<'a>>,
}

impl Shard<'_> {
    /// Elements in the shard.
    pub const fn len(&self) -> usize {
        self.weight.len()
    }

    /// True without elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `mid` elements of everything, and the rest.
    ///
    /// # Panics
    /// If there are fewer than `mid`.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        let (grad, grad2) = self.grad.split_at(mid);
        let (exp_avg, exp_avg2) = self.exp_avg.split_at(mid);
        let (exp_avg_sq, exp_avg_sq2) = self.exp_avg_sq.split_at(mid);
        let (weight, weight2) = self.weight.split_at(mid);
        let (master, master2) = match self.master {
            MasterMut::Itself => (MasterMut::Itself, MasterMut::Itself),
            MasterMut::Copy(values) => {
                let (a, b) = values.split_at_mut(mid);
                (MasterMut::Copy(a), MasterMut::Copy(b))
            }
            MasterMut::Remainder(bits) => {
                let (a, b) = bits.split_at_mut(mid);
                (MasterMut::Remainder(a), MasterMut::Remainder(b))
            }
        };
        let (emit, emit2) = match self.emit {
            None => (None, None),
            Some(EmitMut { dst, scale, format }) => {
                let (a, b) = dst.split_at_mut(mid);
                (Some(EmitMut { dst: a, scale, format }), Some(EmitMut { dst: b, scale, format }))
            }
        };
        (
            Self { grad, exp_avg, exp_avg_sq, weight, master, emit },
            Self {
                grad: grad2,
                exp_avg: exp_avg2,
                exp_avg_sq: exp_avg_sq2,
                weight: weight2,
                master: master2,
                emit: emit2,
            },
        )
    }

    /// Asserts that everything has as many elements as the weight.
    pub(crate) fn assert_lengths(&self) {
        let len = self.len();
        assert_eq!(self.grad.len(), len, "optimize: a gradient per weight");
        assert_eq!(self.exp_avg.len(), len, "optimize: a first moment per weight");
        assert_eq!(self.exp_avg_sq.len(), len, "optimize: a second moment per weight");
        match &self.master {
            MasterMut::Itself => {}
            MasterMut::Copy(values) => assert_eq!(values.len(), len, "optimize: a master each"),
            MasterMut::Remainder(bits) => assert_eq!(bits.len(), len, "optimize: a remainder each"),
        }
        if let Some(emit) = &self.emit {
            assert_eq!(emit.dst.len(), len, "optimize: a code per weight");
        }
    }
}

/// Steps every element of a shard and returns the amax word of the updated weight. With a master
/// beside the shard the new weight is [`split`] from it (a NaN becomes the canonical pair), and
/// the codes are cast from that weight, not from the master: they are what a later cast makes.
///
/// # Panics
/// If lengths differ.
#[allow(clippy::indexing_slicing, reason = "lengths are asserted; one index for all arrays")]
pub fn optimize(adam: &Adam, shard: Shard<'_>) -> u32 {
    shard.assert_lengths();
    let Shard { grad, mut exp_avg, mut exp_avg_sq, mut weight, mut master, mut emit } = shard;
    let mut amax = 0;
    for i in 0..weight.len() {
        let p = match (&master, &weight) {
            (MasterMut::Remainder(bits), ElementsMut::Bf16(weights)) => join(weights[i], bits[i]),
            (MasterMut::Copy(values), _) => values[i],
            _ => weight.get(i),
        };
        let (m, v, p) = adam_element(adam, grad.get(i), exp_avg.get(i), exp_avg_sq.get(i), p);
        exp_avg.set(i, m);
        exp_avg_sq.set(i, v);
        match (&mut master, &mut weight) {
            (MasterMut::Remainder(bits), ElementsMut::Bf16(weights)) => {
                (weights[i], bits[i]) = split(p);
                amax = amax.max(weight_abs_bits(weights[i]));
            }
            (MasterMut::Copy(values), ElementsMut::Bf16(weights)) => {
                values[i] = canonical(p);
                weights[i] = split(p).0;
                amax = amax.max(weight_abs_bits(weights[i]));
            }
            (_, weight) => {
                weight.set(i, p);
                amax = amax.max(abs_bits(weight.get(i)));
            }
        }
        if let Some(emit) = &mut emit {
            emit.dst[i] = emit.format.encode(weight.get(i) * emit.scale);
        }
    }
    TOUCHED | amax
}

//! The optimizer's step: one loop for each combination of types, so that no value is stored twice.

use super::Level;
use super::block::{BLOCK, Bf16, F32, Stored};
use super::cast::cast_block;
use crate::format::Format;
use crate::layout::TOUCHED;
use crate::scalar::{
    self, Adam, Elements, ElementsMut, EmitMut, MasterMut, Shard, abs_bits, adam_element,
    canonical, join, split,
};

/// Where the full-precision master of an element is.
trait Keeping {
    /// The weight's type.
    type Weight: Stored;
    /// What stands beside it.
    type Master: Copy;

    fn load(weight: Bits<Self::Weight>, master: Self::Master) -> f32;
    fn store(p: f32) -> (Bits<Self::Weight>, Self::Master);
}

type Bits<T> = <T as Stored>::Bits;

/// An F32 weight is its own master.
struct Itself;
/// A BF16 weight with an F32 copy.
struct Copied;
/// A BF16 weight with a remainder.
struct Split;

impl Keeping for Itself {
    type Weight = F32;
    type Master = ();

    #[inline(always)]
    fn load(weight: f32, (): ()) -> f32 {
        weight
    }

    #[inline(always)]
    fn store(p: f32) -> (f32, ()) {
        (canonical(p), ())
    }
}

impl Keeping for Copied {
    type Weight = Bf16;
    type Master = f32;

    #[inline(always)]
    fn load(_: u16, master: f32) -> f32 {
        master
    }

    #[inline(always)]
    fn store(p: f32) -> (u16, f32) {
        (split(p).0, canonical(p))
    }
}

impl Keeping for Split {
    type Weight = Bf16;
    type Master = u16;

    #[inline(always)]
    fn load(weight: u16, remainder: u16) -> f32 {
        join(weight, remainder)
    }

    #[inline(always)]
    fn store(p: f32) -> (u16, u16) {
        split(p)
    }
}

/// Codes to write along: scale and format.
type Emit = Option<(f32, Format)>;

leveled! {
    fn largest_after<G: Stored, M: Stored, K: Keeping>(
        adam: &Adam,
        grad: &[G::Bits],
        exp_avg: &mut [M::Bits],
        exp_avg_sq: &mut [M::Bits],
        weight: &mut [Bits<K::Weight>],
        master: &mut [K::Master],
        emit: Emit,
        codes: &mut [u8]
    ) -> u32 = step;
}

/// [`scalar::optimize`](crate::scalar::optimize), bit for bit.
///
/// # Panics
/// If lengths differ.
pub fn optimize(level: Level, adam: &Adam, shard: Shard<'_>) -> u32 {
    shard.assert_lengths();
    macro_rules! with_loops {
        ($($grad:ident, $moments:ident);+) => {
            match shard {
                $(
                    Shard {
                        grad: Elements::$grad(grad),
                        exp_avg: ElementsMut::$moments(exp_avg),
                        exp_avg_sq: ElementsMut::$moments(exp_avg_sq),
                        weight: ElementsMut::F32(weight),
                        master: MasterMut::Itself,
                        emit,
                    } => {
                        // No memory: the unit type has no size.
                        let mut none = vec![(); weight.len()];
                        let (emit, codes) = taken_apart(emit);
                        largest_after::<$grad, $moments, Itself>(
                            level, adam, grad, exp_avg, exp_avg_sq, weight, &mut none, emit, codes,
                        )
                    }
                    Shard {
                        grad: Elements::$grad(grad),
                        exp_avg: ElementsMut::$moments(exp_avg),
                        exp_avg_sq: ElementsMut::$moments(exp_avg_sq),
                        weight: ElementsMut::Bf16(weight),
                        master: MasterMut::Copy(master),
                        emit,
                    } => {
                        let (emit, codes) = taken_apart(emit);
                        largest_after::<$grad, $moments, Copied>(
                            level, adam, grad, exp_avg, exp_avg_sq, weight, master, emit, codes,
                        )
                    }
                    Shard {
                        grad: Elements::$grad(grad),
                        exp_avg: ElementsMut::$moments(exp_avg),
                        exp_avg_sq: ElementsMut::$moments(exp_avg_sq),
                        weight: ElementsMut::Bf16(weight),
                        master: MasterMut::Remainder(master),
                        emit,
                    } => {
                        let (emit, codes) = taken_apart(emit);
                        largest_after::<$grad, $moments, Split>(
                            level, adam, grad, exp_avg, exp_avg_sq, weight, master, emit, codes,
                        )
                    }
                )+
                // No job has these types.
                shard => return scalar::optimize(adam, shard),
            }
        };
    }
    let largest = with_loops!(Bf16, Bf16; Bf16, F32; F32, Bf16; F32, F32);
    TOUCHED | abs_bits(f32::from_bits(largest))
}

fn taken_apart(emit: Option<EmitMut<'_>>) -> (Emit, &mut [u8]) {
    match emit {
        Some(EmitMut { dst, scale, format }) => (Some((scale, format)), dst),
        None => (None, &mut []),
    }
}

#[allow(clippy::too_many_arguments, reason = "a shard, taken apart")]
#[inline(always)]
fn step<G: Stored, M: Stored, K: Keeping>(
    adam: &Adam,
    grad: &[G::Bits],
    exp_avg: &mut [M::Bits],
    exp_avg_sq: &mut [M::Bits],
    weight: &mut [Bits<K::Weight>],
    master: &mut [K::Master],
    emit: Emit,
    codes: &mut [u8],
) -> u32 {
    let Some((scale, format)) = emit else {
        return arithmetic::<G, M, K>(adam, grad, exp_avg, exp_avg_sq, weight, master);
    };
    let mut largest = 0;
    let blocks = grad
        .chunks(BLOCK)
        .zip(exp_avg.chunks_mut(BLOCK))
        .zip(exp_avg_sq.chunks_mut(BLOCK))
        .zip(weight.chunks_mut(BLOCK))
        .zip(master.chunks_mut(BLOCK))
        .zip(codes.chunks_mut(BLOCK));
    for (((((g, m), v), w), p), codes) in blocks {
        largest = largest.max(arithmetic::<G, M, K>(adam, g, m, v, w, p));
        // From the weight as stored, not from its master: these are the codes of a later cast.
        cast_block::<K::Weight>(w, scale, format, codes);
    }
    largest
}

#[inline(always)]
fn arithmetic<G: Stored, M: Stored, K: Keeping>(
    adam: &Adam,
    grad: &[G::Bits],
    exp_avg: &mut [M::Bits],
    exp_avg_sq: &mut [M::Bits],
    weight: &mut [Bits<K::Weight>],
    master: &mut [K::Master],
) -> u32 {
    // Two loops, neither with a branch in it.
    if adam.l2 {
        let adam = Adam { l2: true, ..*adam };
        elements::<G, M, K>(&adam, grad, exp_avg, exp_avg_sq, weight, master)
    } else {
        let adam = Adam { l2: false, ..*adam };
        elements::<G, M, K>(&adam, grad, exp_avg, exp_avg_sq, weight, master)
    }
}

/// Steps every element and returns the largest magnitude of the new weight as bits.
#[inline(always)]
fn elements<G: Stored, M: Stored, K: Keeping>(
    adam: &Adam,
    grad: &[G::Bits],
    exp_avg: &mut [M::Bits],
    exp_avg_sq: &mut [M::Bits],
    weight: &mut [Bits<K::Weight>],
    master: &mut [K::Master],
) -> u32 {
    let mut largest = 0;
    for ((((g, m), v), w), p) in grad.iter().zip(exp_avg).zip(exp_avg_sq).zip(weight).zip(master) {
        let (new_m, new_v, new_p) =
            adam_element(adam, G::widen(*g), M::widen(*m), M::widen(*v), K::load(*w, *p));
        *m = M::narrow(new_m);
        *v = M::narrow(new_v);
        (*w, *p) = K::store(new_p);
        largest = (K::Weight::widen(*w).to_bits() & 0x7fff_ffff).max(largest);
    }
    largest
}

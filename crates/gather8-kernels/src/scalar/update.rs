//! Amaxes to ring entries and scales.

use crate::format::Format;
use crate::job::AmaxAlgorithm;
use crate::layout::{ORDER_WORDS, SlotRecord, TOUCHED, slot_flags};
use crate::scale::ScaleRule;

/// The words of a [`StatusHeader`](crate::layout::StatusHeader).
const STATUS_HEADER_WORDS: usize = 4;
/// The smallest bits of |x| that are no finite value.
const INFINITY: u32 = 0x7f80_0000;

/// The update of a table after the all-reduce of a bank, as
/// [`UpdateScales`](crate::job::UpdateScales) states it. Of what that leaves open:
///
/// - The order words `d0, d1, e0, e1` are complementary if `e0 == !d0` and `e1 == !d1`; words that
///   nobody wrote (zero) are not.
/// - A bank that is both disordered and non-finite counts as disordered only.
/// - The ring is filled (under [`SEED`](slot_flags::SEED), or if every entry was 0) under dynamic
///   scaling too. A filled ring starts at position 0; else the entry at `position` is replaced and
///   `position` becomes `(position + 1) % history`.
/// - Under [`AmaxAlgorithm::MostRecent`] the scale comes from the amax at hand.
/// - Counters wrap.
/// - The bank is zeroed in every case, its order words too. The slots' status words are written
///   (1 or 0, all of them) whenever non-finite weights refuse a sync, else left.
///
/// # Panics
/// If `bank` does not hold `slots + 4` words, `records` not `slots`, `rings` not
/// `slots * history`, or `status` not `4 + slots` words; if `history` is 0.
#[allow(clippy::too_many_arguments, reason = "the fields of the job, in their order")]
pub fn update_scales(
    slots: u64,
    bank: &mut [u32],
    records: &mut [SlotRecord],
    rings: &mut [f32],
    history: u32,
    algorithm: AmaxAlgorithm,
    rule: ScaleRule,
    status: &mut [u32],
) {
    let slots = slots as usize;
    let ring_length = history as usize;
    assert_eq!(bank.len(), slots + ORDER_WORDS as usize, "update: a word per slot, 4 for order");
    assert_eq!(records.len(), slots, "update: a record per slot");
    assert_eq!(rings.len(), slots * ring_length, "update: a ring per slot");
    assert_eq!(status.len(), STATUS_HEADER_WORDS + slots, "update: a status word per slot");
    assert!(history > 0, "update: a ring holds an entry at least");

    let (words, order) = bank.split_at_mut(slots);
    let (header, fatal) = status.split_at_mut(STATUS_HEADER_WORDS);
    let mut refused = false;
    let disordered = !complementary(order);
    if !disordered {
        refused = words.iter().zip(&*records).any(|(&word, record)| is_fatal(word, record));
        if refused {
            for ((&word, record), mark) in words.iter().zip(&*records).zip(fatal) {
                *mark = is_fatal(word, record) as u32;
            }
        } else {
            let rings = rings.chunks_exact_mut(ring_length);
            for ((&word, record), ring) in words.iter().zip(records).zip(rings) {
                update_slot(word, record, ring, algorithm, rule);
            }
        }
    }
    words.fill(0);
    order.fill(0);
    for (counter, up) in header.iter_mut().zip([true, refused, disordered]) {
        *counter = counter.wrapping_add(up as u32);
    }
}

fn complementary(order: &[u32]) -> bool {
    matches!(*order, [d0, d1, e0, e1] if e0 == !d0 && e1 == !d1)
}

const fn amax_bits(word: u32) -> u32 {
    word & !TOUCHED
}

/// A touched weight slot whose amax is no finite value.
const fn is_fatal(word: u32, record: &SlotRecord) -> bool {
    word & TOUCHED != 0
        && amax_bits(word) >= INFINITY
        && record.flags & (slot_flags::INPUT | slot_flags::GRADIENT) == 0
}

fn update_slot(
    word: u32,
    record: &mut SlotRecord,
    ring: &mut [f32],
    algorithm: AmaxAlgorithm,
    rule: ScaleRule,
) {
    if word & TOUCHED == 0 {
        return;
    }
    if amax_bits(word) >= INFINITY {
        record.non_finite = record.non_finite.wrapping_add(1);
        return;
    }
    let amax = f32::from_bits(amax_bits(word));
    let delayed = record.flags & slot_flags::DELAYED != 0;
    let format = if record.flags & slot_flags::E5M2 != 0 { Format::E5m2 } else { Format::E4m3 };

    let fill =
        record.flags & slot_flags::SEED != 0 || ring.iter().all(|entry| entry.to_bits() == 0);
    if fill {
        ring.fill(amax);
        record.position = 0;
        record.flags &= !slot_flags::SEED;
    } else {
        let position = record.position as usize % ring.len();
        if let Some(oldest) = ring.get_mut(position) {
            *oldest = amax;
        }
        record.position = ((position + 1) % ring.len()) as u32;
    }
    let basis = match algorithm {
        AmaxAlgorithm::Max if delayed => ring.iter().copied().fold(0.0, f32::max),
        _ => amax,
    };
    let new = rule.scale_of_finite(format, basis);
    record.cast = if delayed && !fill { record.published } else { new };
    record.cast_inv = if delayed && !fill { record.published_inv } else { 1.0 / new };
    record.published = new;
    record.published_inv = 1.0 / new;
    record.version = record.version.wrapping_add(1);
}

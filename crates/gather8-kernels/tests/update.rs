//! Rings, scales and refusals of the update of a table.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

use gather8_kernels::Format;
use gather8_kernels::job::AmaxAlgorithm;
use gather8_kernels::layout::slot_flags::{DELAYED, E5M2, GRADIENT, INPUT, SEED};
use gather8_kernels::layout::{SlotRecord, TOUCHED};
use gather8_kernels::scalar::update_scales;
use gather8_kernels::scale::ScaleRule;

const RULE: ScaleRule = ScaleRule { margin: 0, power_of_two: false };

/// A table on the host.
#[derive(Clone, Debug, PartialEq)]
struct Table {
    bank: Vec<u32>,
    records: Vec<SlotRecord>,
    rings: Vec<f32>,
    history: u32,
    algorithm: AmaxAlgorithm,
    rule: ScaleRule,
    status: Vec<u32>,
}

impl Table {
    fn new(flags: &[u32], history: u32) -> Self {
        let slots = flags.len();
        let record = |&flags| SlotRecord { flags, ..SlotRecord::default() };
        let mut table = Self {
            bank: vec![0; slots + 4],
            records: flags.iter().map(record).collect(),
            rings: vec![0.0; slots * history as usize],
            history,
            algorithm: AmaxAlgorithm::Max,
            rule: RULE,
            status: vec![0; slots + 4],
        };
        table.order([1, 2]);
        table
    }

    fn order(&mut self, digest: [u32; 2]) {
        let slots = self.records.len();
        self.bank[slots..].copy_from_slice(&[digest[0], digest[1], !digest[0], !digest[1]]);
    }

    fn touch(&mut self, slot: usize, amax: f32) {
        self.bank[slot] = self.bank[slot].max(TOUCHED | amax.abs().to_bits());
    }

    /// The update; then the bank must be clean, and the order words are written anew.
    fn sync(&mut self) {
        update_scales(
            self.records.len() as u64,
            &mut self.bank,
            &mut self.records,
            &mut self.rings,
            self.history,
            self.algorithm,
            self.rule,
            &mut self.status,
        );
        assert!(self.bank.iter().all(|&word| word == 0), "the bank was not zeroed");
        self.order([7, 8]);
    }

    fn step(&mut self, amaxes: &[f32]) {
        for (slot, &amax) in amaxes.iter().enumerate() {
            self.touch(slot, amax);
        }
        self.sync();
    }

    fn ring(&self, slot: usize) -> &[f32] {
        let history = self.history as usize;
        &self.rings[slot * history..][..history]
    }
}

fn scale(amax: f32) -> f32 {
    RULE.scale(Format::E4m3, amax).unwrap()
}

#[test]
fn a_spike_holds_the_scale_down_for_exactly_history_syncs() {
    for history in [1, 2, 16, 1024] {
        let mut table = Table::new(&[DELAYED], history);
        for _ in 0..history + 3 {
            table.step(&[1.0]);
            assert_eq!(table.records[0].published, scale(1.0));
        }
        table.step(&[10.0]);
        let mut held = 0;
        while table.records[0].published == scale(10.0) {
            held += 1;
            table.step(&[1.0]);
        }
        assert_eq!(held, history);
        assert_eq!(table.records[0].published, scale(1.0));
        assert_eq!(table.records[0].published_inv, 1.0 / scale(1.0));
    }
}

#[test]
fn a_version_is_cast_with_the_scale_published_before_it() {
    let mut table = Table::new(&[DELAYED, DELAYED | E5M2, 0, E5M2], 4);
    let mut published = [0.0; 4];
    for (step, amax) in [1.0_f32, 2.0, 4.0, 3.0, 8.0].into_iter().enumerate() {
        table.step(&[amax; 4]);
        for (slot, record) in table.records.iter().enumerate() {
            let format = if slot % 2 == 1 { Format::E5m2 } else { Format::E4m3 };
            let own = RULE.scale(format, amax).unwrap();
            let delayed = slot < 2;
            let expected = if delayed && step > 0 { published[slot] } else { own };
            assert_eq!(record.cast, expected, "slot {slot}, step {step}");
            assert_eq!(record.cast_inv, 1.0 / expected);
            assert_eq!(record.version as usize, step + 1);
            // After 4 comes 3, which the ring's largest entry still covers.
            let basis = if delayed && amax == 3.0 { 4.0 } else { amax };
            published[slot] = RULE.scale(format, basis).unwrap();
            assert_eq!(record.published, published[slot], "slot {slot}, step {step}");
        }
    }
}

#[test]
fn the_newest_entry_replaces_the_oldest() {
    let mut table = Table::new(&[DELAYED], 3);
    table.step(&[1.0]);
    assert_eq!((table.ring(0), table.records[0].position), (&[1.0; 3][..], 0));
    table.step(&[2.0]);
    assert_eq!((table.ring(0), table.records[0].position), (&[2.0, 1.0, 1.0][..], 1));
    table.step(&[3.0]);
    table.step(&[4.0]);
    assert_eq!((table.ring(0), table.records[0].position), (&[2.0, 3.0, 4.0][..], 0));
    table.step(&[5.0]);
    assert_eq!((table.ring(0), table.records[0].position), (&[5.0, 3.0, 4.0][..], 1));
}

#[test]
fn most_recent_looks_at_the_newest_entry_only() {
    let mut table = Table::new(&[DELAYED], 16);
    table.algorithm = AmaxAlgorithm::MostRecent;
    table.step(&[10.0]);
    table.step(&[1.0]);
    assert_eq!(table.records[0].published, scale(1.0));
    assert_eq!(table.records[0].cast, scale(10.0));
}

#[test]
fn an_untouched_slot_does_not_move() {
    let mut table = Table::new(&[DELAYED, DELAYED, 0], 4);
    table.step(&[1.0, 2.0, 3.0]);
    let before = table.clone();
    table.touch(0, 9.0);
    table.sync();
    assert_eq!(table.records[1..], before.records[1..]);
    assert_eq!(table.rings[4..], before.rings[4..]);
    assert_eq!(table.records[0].version, 2);
    // Touched with 0 is touched.
    table.step(&[0.0]);
    assert_eq!(table.records[0].version, 3);
    assert_eq!(table.ring(0), [9.0, 0.0, 1.0, 1.0]);
}

#[test]
fn two_accumulations_between_syncs_keep_the_larger() {
    let mut table = Table::new(&[DELAYED], 4);
    table.touch(0, 3.0);
    table.touch(0, 2.0);
    table.sync();
    assert_eq!(table.ring(0), [3.0; 4]);
}

#[test]
fn a_seed_fills_the_ring_and_is_cast_with_its_own_scale() {
    let mut table = Table::new(&[DELAYED, INPUT], 4);
    table.step(&[1.0, 1.0]);
    table.step(&[2.0, 1.0]);
    table.records[0].flags |= SEED;
    table.records[1].flags |= SEED;
    table.step(&[200.0, 50.0]);
    assert_eq!(table.ring(0), [200.0; 4]);
    assert_eq!((table.records[0].cast, table.records[0].published), (scale(200.0), scale(200.0)));
    assert_eq!((table.records[0].flags, table.records[0].position), (DELAYED, 0));
    assert_eq!(table.ring(1), [50.0; 4]);
    assert_eq!(table.records[1].flags, INPUT);
    // An untouched slot keeps its flag for the sync that touches it.
    table.records[0].flags |= SEED;
    table.sync();
    assert_eq!(table.records[0].flags, DELAYED | SEED);
}

#[test]
fn a_ring_of_zeros_is_filled() {
    let mut table = Table::new(&[DELAYED], 4);
    table.step(&[0.0]);
    table.step(&[0.0]);
    assert_eq!(table.records[0].published, scale(0.0));
    table.step(&[2.0]);
    assert_eq!(table.ring(0), [2.0; 4]);
    assert_eq!(table.records[0].cast, scale(2.0));
}

#[test]
fn one_non_finite_weight_refuses_the_whole_sync() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut table = Table::new(&[DELAYED, 0, INPUT | DELAYED, DELAYED], 4);
        table.step(&[1.0, 2.0, 3.0, 4.0]);
        let before = table.clone();
        table.step(&[9.0, bad, f32::NAN, bad]);
        assert_eq!(table.records, before.records);
        assert_eq!(table.rings, before.rings);
        assert_eq!(table.status, [2, 1, 0, 0, 0, 1, 0, 1]);
        // The marks are those of the last refusal, and training can go on.
        table.step(&[bad, 1.0, 1.0, 1.0]);
        assert_eq!(table.status, [3, 2, 0, 0, 1, 0, 0, 0]);
        table.step(&[1.0, 1.0, 1.0, 1.0]);
        assert_eq!(table.status, [4, 2, 0, 0, 1, 0, 0, 0]);
        assert_eq!(table.records[0].version, 2);
    }
}

#[test]
fn non_finite_inputs_and_gradients_are_counted_and_kept_out() {
    let mut table = Table::new(&[DELAYED, INPUT | DELAYED, GRADIENT | E5M2], 4);
    table.step(&[1.0, 2.0, 3.0]);
    let before = table.clone();
    table.step(&[5.0, f32::INFINITY, f32::NAN]);
    for slot in [1, 2] {
        let expected = SlotRecord { non_finite: 1, ..before.records[slot] };
        assert_eq!(table.records[slot], expected);
        assert_eq!(table.ring(slot), before.ring(slot));
    }
    assert_eq!(table.records[0].version, 2);
    assert_eq!(table.status[..4], [2, 0, 0, 0]);
}

#[test]
fn order_words_that_are_not_complementary_refuse_the_sync() {
    let start = {
        let mut table = Table::new(&[DELAYED, 0], 4);
        table.step(&[1.0, 2.0]);
        table
    };
    // The MAX of two ranks that issued different operations.
    let digests = [[5, 6_u32], [5, 7]];
    let words = digests.map(|[a, b]| [a, b, !a, !b]);
    let reduced = std::array::from_fn::<u32, 4, _>(|i| words[0][i].max(words[1][i]));
    for order in [reduced, [0; 4], [1, 2, !1, 2], [1, 2, 1, !2]] {
        let mut table = start.clone();
        table.touch(0, f32::NAN);
        table.touch(1, 1.0);
        table.bank[2..].copy_from_slice(&order);
        table.sync();
        assert_eq!((&table.records, &table.rings), (&start.records, &start.rings));
        // Disordered only, although a weight is non-finite too; no slot is marked.
        assert_eq!(table.status, [2, 0, 1, 0, 0, 0], "{order:?}");
    }
    let mut same = start.clone();
    same.touch(0, 1.0);
    same.order([u32::MAX, 0]);
    same.sync();
    assert_eq!(same.status[..4], [2, 0, 0, 0]);
}

#[test]
fn margin_and_powers_of_two_reach_the_scales() {
    let mut table = Table::new(&[DELAYED], 2);
    table.rule = ScaleRule { margin: 3, power_of_two: true };
    table.step(&[1.0]);
    assert_eq!(table.records[0].published, 32.0);
    assert_eq!(table.records[0].published_inv, 1.0 / 32.0);
}

#[test]
fn a_table_without_slots_still_checks_the_order() {
    let mut table = Table::new(&[], 16);
    table.sync();
    table.bank[1] = 0;
    table.sync();
    assert_eq!(table.status, [2, 0, 1, 0]);
}

//! The amax table across ranks: what a sync keeps, refuses and finds.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod common;

use std::time::Duration;

use common::{Rank, on_ranks, op};
use gather8_collectives::{
    AmaxTable, Error, Op, OrderLog, SlotKind, SlotSpec, Solo, TableConfig, TableState,
};
use gather8_kernels::cpu::Cpu;
use gather8_kernels::job::{Amax, AmaxAlgorithm};
use gather8_kernels::layout::{SlotRecord, slot_flags};
use gather8_kernels::{Backend, DType, Format, Job, Tensor};

const DEADLINE: Duration = Duration::from_secs(30);

fn slot(name: &str, kind: SlotKind, delayed: bool) -> SlotSpec {
    SlotSpec { name: name.to_owned(), kind, format: Format::E4m3, delayed }
}

fn slots() -> Vec<SlotSpec> {
    vec![
        slot("block.0.weight", SlotKind::Weight, true),
        slot("block.1.weight", SlotKind::Weight, false),
        slot("block.0.input", SlotKind::Input, true),
        SlotSpec { format: Format::E5m2, ..slot("block.0.gradient", SlotKind::Gradient, true) },
    ]
}

fn config(history: u32) -> TableConfig {
    let mut config = TableConfig::default();
    config.history = history;
    config
}

/// Records the amax of some values into a slot of the recording bank.
fn record(r: &Rank, table: &AmaxTable<Cpu>, slot: usize, values: &[f32]) {
    let src = Tensor::new(r.span_of(bytemuck::cast_slice(values)), DType::F32).unwrap();
    let word = table.slot_word(table.recording_bank(), slot).unwrap();
    let plan = r.cpu.plan(&[Job::Amax(Amax { src, slot: word })]).unwrap();
    r.cpu.run(&r.stream, &plan).unwrap();
}

fn sync(r: &Rank, table: &AmaxTable<Cpu>, step: u64) -> Result<(), Error> {
    table.sync_blocking(&*r.comm, Op { unit: "amax table", ..op(step, "sync") }, 7, &r.stream)
}

/// What `max / amax` is in f32: the scale without margin.
fn scale(format: Format, amax: f32) -> f32 {
    (f64::from(format.max()) / f64::from(amax)) as f32
}

#[test]
fn the_largest_of_all_ranks_makes_the_scale_of_all() {
    for world in [2, 3, 4] {
        let results = on_ranks(world, |r| {
            let table = AmaxTable::new(&r.cpu, &r.stream, config(4), &slots()).unwrap();
            record(&r, &table, 0, &[-(r.rank as f32 + 1.0), 0.5]);
            if r.rank == 1 {
                // Touched by one rank alone.
                record(&r, &table, 3, &[8.0]);
            }
            sync(&r, &table, 0).unwrap();
            table.snapshot(&r.stream).unwrap()
        });
        let states = results.into_iter().map(Option::unwrap).collect::<Vec<_>>();
        assert!(states.iter().all(|state| *state == states[0]));
        let records = &states[0].records;
        let expected = scale(Format::E4m3, world as f32);
        assert_eq!((records[0].published, records[0].cast), (expected, expected));
        assert_eq!(records[0].published_inv, 1.0 / expected);
        assert_eq!((records[0].version, records[0].flags), (1, slot_flags::DELAYED));
        assert_eq!(states[0].rings[..4], [world as f32; 4]);
        assert_eq!(records[3].published, scale(Format::E5m2, 8.0));
        // Untouched: as made.
        for untouched in [1, 2] {
            assert_eq!((records[untouched].version, records[untouched].published), (0, 1.0));
        }
    }
}

#[test]
fn accumulations_keep_the_larger_and_banks_take_turns() {
    let results = on_ranks(2, |r| {
        let table = AmaxTable::new(&r.cpu, &r.stream, config(2), &slots()).unwrap();
        let mut seen = Vec::new();
        for (step, pair) in [[3.0, 2.0], [1.0, 5.0], [4.0, 0.0]].into_iter().enumerate() {
            assert_eq!(table.recording_bank(), step % 2);
            pair.iter().for_each(|&amax| record(&r, &table, 1, &[amax]));
            table.sync(&*r.comm, op(step as u64, "sync"), 7, &r.stream).unwrap();
            // What is recorded now belongs to the next sync.
            record(&r, &table, 2, &[step as f32 + 1.0]);
            let records = table.records(&r.stream).unwrap();
            seen.push((records[1].cast, records[2].version));
        }
        seen
    });
    for seen in results.into_iter().map(Option::unwrap) {
        let expected = [3.0, 5.0, 4.0].map(|amax| scale(Format::E4m3, amax));
        assert_eq!(seen, [(expected[0], 0), (expected[1], 1), (expected[2], 2)]);
    }
}

#[test]
fn a_nan_on_one_rank_is_the_same_error_on_all_and_changes_nothing() {
    for (bad, culprit) in [(f32::NAN, 0), (f32::INFINITY, 2), (-f32::INFINITY, 1)] {
        let results = on_ranks(3, |r| {
            let table = AmaxTable::new(&r.cpu, &r.stream, config(4), &slots()).unwrap();
            (0..4).for_each(|slot| record(&r, &table, slot, &[2.0]));
            sync(&r, &table, 0).unwrap();
            let before = table.snapshot(&r.stream).unwrap();
            for slot in [0, 1, 2] {
                record(&r, &table, slot, &[if r.rank == culprit && slot != 0 { bad } else { 9.0 }]);
            }
            let error = sync(&r, &table, 1).unwrap_err();
            assert!(
                matches!(&error, Error::NonFiniteWeights { names } if names == &["block.1.weight"])
            );
            assert_eq!(table.snapshot(&r.stream).unwrap(), before);
            // It stays until it is acknowledged; then the discarded bank is empty.
            assert_eq!(sync(&r, &table, 2).unwrap_err().to_string(), error.to_string());
            table.acknowledge();
            record(&r, &table, 1, &[4.0]);
            sync(&r, &table, 3).unwrap();
            let after = table.snapshot(&r.stream).unwrap();
            assert_eq!(after.records[1].version, 2);
            assert_eq!(after.records[0], before.records[0]);
            error.to_string()
        });
        let texts = results.into_iter().map(Option::unwrap).collect::<Vec<_>>();
        assert!(texts.iter().all(|text| *text == texts[0] && text.contains("`block.1.weight`")));
    }
}

#[test]
fn non_finite_inputs_and_gradients_are_counted_and_kept_out() {
    let results = on_ranks(2, |r| {
        let table = AmaxTable::new(&r.cpu, &r.stream, config(4), &slots()).unwrap();
        (0..4).for_each(|slot| record(&r, &table, slot, &[2.0]));
        sync(&r, &table, 0).unwrap();
        let before = table.snapshot(&r.stream).unwrap();
        if r.rank == 1 {
            record(&r, &table, 2, &[f32::INFINITY, 1.0]);
            record(&r, &table, 3, &[f32::NAN]);
        }
        record(&r, &table, 0, &[1.0]);
        sync(&r, &table, 1).unwrap();
        let after = table.snapshot(&r.stream).unwrap();
        for slot in [2, 3] {
            let counted = SlotRecord { non_finite: 1, ..before.records[slot] };
            assert_eq!(after.records[slot], counted);
        }
        assert_eq!(after.rings[8..], before.rings[8..]);
        assert_eq!(after.records[0].version, 2);
    });
    assert!(results.iter().all(Option::is_some));
}

#[test]
fn swapped_gathers_of_equal_size_are_named_on_both_ranks() {
    let results = on_ranks(2, |r| {
        let table = AmaxTable::new(&r.cpu, &r.stream, config(4), &slots()).unwrap();
        let mut log = OrderLog::new();
        let mut units = ["block.1", "block.2"];
        let parts = [(r.span_of(&[r.rank as u8; 8]), r.zeros(16))];
        for step in 0..3_u64 {
            if step == 2 && r.rank == 1 {
                units.reverse();
            }
            for unit in units {
                log.note("all-gather", unit, 16);
                let op = Op { unit, ..op(step, "all-gather") };
                r.comm.all_gather(op, &parts, &r.stream).unwrap();
            }
            (0..2).for_each(|slot| record(&r, &table, slot, &[step as f32 + 1.0]));
            let (digest, position) = (log.digest(), log.position());
            let result = table.sync_blocking(&*r.comm, op(step, "sync"), digest, &r.stream);
            if step < 2 {
                result.unwrap();
                log.agree(position);
                continue;
            }
            let versions = table.records(&r.stream).unwrap();
            assert_eq!(versions[0].version, 2, "a disordered sync changes nothing");
            if r.rank == 1 {
                // The other rank finds out first, and this one is stopped in its next operation.
                std::thread::sleep(Duration::from_millis(100));
            }
            let error = table.explain(result.unwrap_err(), &*r.comm, &log, DEADLINE);
            assert_eq!(table.check().unwrap_err().to_string(), error.to_string());
            return error.to_string();
        }
        unreachable!()
    });
    for result in results {
        assert_eq!(
            result.unwrap(),
            "the ranks have issued different operations: operation 4: \
             rank 0 all-gather of `block.1` (16 bytes), rank 1 all-gather of `block.2` (16 bytes)"
        );
    }
}

#[test]
fn a_rank_that_is_stuck_in_an_operation_learns_of_the_disorder() {
    let results = on_ranks(2, |r| {
        let table = AmaxTable::new(&r.cpu, &r.stream, config(4), &slots()).unwrap();
        let mut log = OrderLog::new();
        log.note("all-gather", if r.rank == 0 { "a" } else { "b" }, 4);
        table.sync(&*r.comm, op(0, "sync"), log.digest(), &r.stream).unwrap();
        let error = if r.rank == 0 {
            // Issues on without looking, and waits for a rank that does not come.
            r.comm.barrier(op(1, "barrier")).unwrap_err()
        } else {
            r.cpu.synchronize(&r.stream).unwrap();
            table.check().unwrap_err()
        };
        table.explain(error, &*r.comm, &log, DEADLINE).to_string()
    });
    for result in results {
        let text = result.unwrap();
        assert!(
            text.contains("rank 0 all-gather of `a` (4 bytes), rank 1 all-gather of `b`"),
            "{text}"
        );
    }
}

#[test]
fn a_rank_that_sees_a_lost_peer_first_still_names_the_weight() {
    let results = on_ranks(2, |r| {
        let table = AmaxTable::new(&r.cpu, &r.stream, config(4), &slots()).unwrap();
        let log = OrderLog::new();
        record(&r, &table, 0, &[if r.rank == 0 { f32::NAN } else { 1.0 }]);
        table.sync(&*r.comm, op(0, "sync"), log.digest(), &r.stream).unwrap();
        if r.rank == 0 {
            // Finds the refusal and stops.
            r.cpu.synchronize(&r.stream).unwrap();
            return table.check().unwrap_err().to_string();
        }
        let parts = [(r.zeros(4), r.zeros(8))];
        r.comm.all_gather(op(1, "all-gather"), &parts, &r.stream).unwrap();
        let error = Error::from_backend(r.cpu.synchronize(&r.stream).unwrap_err());
        assert_eq!(error.blamed_rank(), Some(0), "{error}");
        table.explain(error, &*r.comm, &log, DEADLINE).to_string()
    });
    let texts = results.into_iter().map(Option::unwrap).collect::<Vec<_>>();
    assert_eq!(texts[0], texts[1]);
    assert!(texts[0].contains("`block.0.weight`"), "{}", texts[0]);
}

fn alone() -> (Cpu, <Cpu as Backend>::Stream, Solo<Cpu>, AmaxTable<Cpu>) {
    let cpu = Cpu::new();
    let stream = cpu.stream("main").unwrap();
    let table = AmaxTable::new(&cpu, &stream, config(3), &slots()).unwrap();
    (cpu.clone(), stream, Solo::new(cpu), table)
}

fn step(
    cpu: &Cpu,
    stream: &<Cpu as Backend>::Stream,
    comm: &Solo<Cpu>,
    table: &AmaxTable<Cpu>,
    amax: f32,
) {
    let word = table.slot_word(table.recording_bank(), 0).unwrap();
    cpu.upload(stream, &(0x8000_0000 | amax.to_bits()).to_le_bytes(), &word).unwrap();
    table.sync_blocking(comm, op(0, "sync"), 1, stream).unwrap();
}

#[test]
fn seeding_fills_the_ring_and_leaves_the_other_fields() {
    let (cpu, stream, comm, table) = alone();
    [2.0, 4.0].iter().for_each(|&amax| step(&cpu, &stream, &comm, &table, amax));
    let before = table.records(&stream).unwrap();
    table.seed(0, &stream).unwrap();
    let after = table.records(&stream).unwrap();
    assert_eq!(after[0], SlotRecord { flags: before[0].flags | slot_flags::SEED, ..before[0] });
    assert_eq!(after[1..], before[1..]);

    // 100 times larger: the cast of this version does not saturate.
    step(&cpu, &stream, &comm, &table, 400.0);
    let state = table.snapshot(&stream).unwrap();
    assert_eq!(state.records[0].cast, scale(Format::E4m3, 400.0));
    assert_eq!(state.rings[..3], [400.0; 3]);
    assert_eq!(state.records[0].flags & slot_flags::SEED, 0);
    assert!(matches!(table.seed(4, &stream), Err(Error::Table { .. })));
}

#[test]
fn a_spike_holds_the_scale_for_as_many_syncs_as_the_ring_is_long() {
    let (cpu, stream, comm, table) = alone();
    let mut published = Vec::new();
    for amax in [1.0, 1.0, 10.0, 1.0, 1.0, 1.0, 1.0] {
        step(&cpu, &stream, &comm, &table, amax);
        published.push(table.records(&stream).unwrap()[0].published);
    }
    let (low, high) = (scale(Format::E4m3, 10.0), scale(Format::E4m3, 1.0));
    assert_eq!(published, [high, high, low, low, low, high, high]);
}

#[test]
fn a_saved_table_goes_on_as_if_nothing_had_been() {
    let (cpu, stream, comm, table) = alone();
    [2.0, 4.0, 1.0].iter().for_each(|&amax| step(&cpu, &stream, &comm, &table, amax));
    let saved = table.snapshot(&stream).unwrap();
    step(&cpu, &stream, &comm, &table, 3.0);
    let expected = table.snapshot(&stream).unwrap();

    let (cpu, stream, comm, table) = alone();
    table.restore(&stream, &saved).unwrap();
    step(&cpu, &stream, &comm, &table, 3.0);
    assert_eq!(table.snapshot(&stream).unwrap(), expected);
}

#[test]
fn a_garbled_state_is_refused() {
    let (_cpu, stream, _comm, table) = alone();
    let good = table.snapshot(&stream).unwrap();
    let spoil = |change: &dyn Fn(&mut TableState)| {
        let mut state = good.clone();
        change(&mut state);
        table.restore(&stream, &state).unwrap_err().to_string()
    };
    assert!(spoil(&|state| state.records.truncate(3)).contains("3 slots"));
    assert!(spoil(&|state| state.rings.push(0.0)).contains("13 ring entries"));
    assert!(
        spoil(&|state| state.records[1].flags ^= slot_flags::E5M2).contains("`block.1.weight`")
    );
    assert!(spoil(&|state| state.records[0].position = 3).contains("beyond its ring"));
    assert!(spoil(&|state| state.records[2].cast = f32::NAN).contains("not positive"));
    assert!(spoil(&|state| state.records[2].published_inv = 0.0).contains("not positive"));
    assert!(spoil(&|state| state.rings[4] = f32::INFINITY).contains("not finite"));
    assert!(spoil(&|state| state.rings[4] = -1.0).contains("negative"));
    table.restore(&stream, &good).unwrap();
}

#[test]
fn names_are_unique_and_slots_exist() {
    let (cpu, stream, _comm, table) = alone();
    let twice = [slot("w", SlotKind::Weight, true), slot("w", SlotKind::Input, true)];
    let error = AmaxTable::new(&cpu, &stream, config(3), &twice).err().unwrap();
    assert_eq!(error.to_string(), "amax table: two slots are called `w`");
    assert!(table.slot_word(2, 0).is_err() && table.slot_word(0, 4).is_err());
    assert!(table.slot_record(4).is_err());
    assert!(AmaxTable::new(&cpu, &stream, config(0), &slots()).is_err());
    // A table of no slots still finds disorder.
    let empty = AmaxTable::new(&cpu, &stream, config(1), &[]).unwrap();
    empty.sync_blocking(&Solo::new(cpu), op(0, "sync"), 5, &stream).unwrap();
}

#[test]
fn settings_are_parsed_strictly() {
    let parse = |text: &str| toml::from_str::<TableConfig>(text).map_err(|e| e.to_string());
    let full = parse(
        "history = 8\nalgorithm = \"most_recent\"\nrule = { margin = 2, power_of_two = true }",
    );
    let full = full.unwrap();
    assert_eq!((full.history, full.algorithm, full.rule.margin), (8, AmaxAlgorithm::MostRecent, 2));
    assert_eq!(parse("").unwrap(), TableConfig::default());
    assert!(parse("history = 0").unwrap_err().contains("history must lie in 1 to 1024, not 0"));
    assert!(parse("history = 1025").unwrap_err().contains("1 to 1024"));
    assert!(parse("[rule]\nmargin = 33").unwrap_err().contains("margin must lie in 0 to 32"));
    assert!(parse("histroy = 3").unwrap_err().contains("unknown field"));
    let text = toml::to_string(&full).unwrap();
    assert_eq!(parse(&text).unwrap(), full);
}

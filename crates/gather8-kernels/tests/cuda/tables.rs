//! The update of an amax table: rings, scales, refusals, status.

use gather8_kernels::job::{AmaxAlgorithm, UpdateScales};
use gather8_kernels::layout::{SlotRecord, slot_flags, status_bytes};
use gather8_kernels::scale::ScaleRule;
use gather8_kernels::{Backend, Job, Memory, Span};

use crate::support::Random;
use crate::{Desk, Results, same};

const KINDS: [u32; 3] = [0, slot_flags::INPUT, slot_flags::GRADIENT];

#[test]
#[ignore = "needs a GPU"]
fn updates() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(11);
        let mut results = Results::new();
        for (slots, history) in
            [(0, 16), (1, 1), (5, 3), (37, 16), (1500, 16), (1025, 1), (60, 1024)]
        {
            for algorithm in [AmaxAlgorithm::Max, AmaxAlgorithm::MostRecent] {
                let rule = ScaleRule {
                    margin: random.below(4) as u32,
                    power_of_two: random.below(2) == 0,
                };
                let records: Vec<_> = (0..slots)
                    .map(|_| SlotRecord {
                        published: 3.0,
                        published_inv: 1.0 / 3.0,
                        cast: 2.0,
                        cast_inv: 0.5,
                        version: random.below(5) as u32,
                        position: random.below(history) as u32,
                        flags: KINDS[random.below(3)] | (random.below(8) as u32 * slot_flags::E5M2),
                        non_finite: 0,
                    })
                    .collect();
                let rings: Vec<f32> = (0..slots * history)
                    .map(|i| if i / history % 4 == 0 { 0.0 } else { random.ordinary().abs() })
                    .collect();
                let (records, rings) = (desk.put(&records, 0), desk.put(&rings, 0));
                let bank = desk.put(&vec![0_u32; slots + 4], 0);
                let status = desk.backend.alloc(status_bytes(slots as u64), Memory::Host).unwrap();
                let status = Span::whole(&status);
                let job = Job::UpdateScales(UpdateScales {
                    slots: slots as u64,
                    bank: bank.clone(),
                    records: records.clone(),
                    rings: rings.clone(),
                    history: history as u32,
                    algorithm,
                    rule,
                    status: status.clone(),
                });
                let plan = desk.backend.plan(&[job]).unwrap();
                for round in 0..12 {
                    // Most rounds are in order and finite, so that rings turn.
                    let (fatal, order) = (round % 5 == 3, round % 7 != 5);
                    let mut words: Vec<u32> = (0..slots)
                        .map(|slot| {
                            if random.below(4) == 0 {
                                return 0;
                            }
                            let flags = desk.get_as::<SlotRecord>(&records)[slot].flags;
                            let weight = flags & (slot_flags::INPUT | slot_flags::GRADIENT) == 0;
                            let special = random.below(6) == 0 && (!weight || fatal);
                            let bits = if special {
                                [0x7f80_0000, 0x7fc0_0000][random.below(2)]
                            } else {
                                random.ordinary().abs().to_bits()
                            };
                            0x8000_0000 | bits
                        })
                        .collect();
                    let (a, b) = (random.word(), random.word());
                    words.extend([a, b, !a, if order { !b } else { b }]);
                    desk.backend.upload(&desk.stream, bytemuck::cast_slice(&words), &bank).unwrap();
                    desk.backend.run(&desk.stream, &plan).unwrap();
                    let name = format!(
                        "{slots} slots, history {history}, {algorithm:?} {rule:?}, round {round}"
                    );
                    for (part, span) in [
                        ("bank", &bank),
                        ("records", &records),
                        ("rings", &rings),
                        ("status", &status),
                    ] {
                        results.push((format!("{name}: {part}"), desk.get(span)));
                    }
                    assert_eq!(desk.backend.peek(&status).unwrap(), desk.get(&status));
                }
            }
        }
        results
    }
    same!(case);
}

//! The passes on small and middling tensors, where the cost of a call counts:
//! `cargo bench -p gather8-kernels`. The example `bench` measures large ones against a memcpy.
#![allow(missing_docs, reason = "divan's entry points")]

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use gather8_kernels::layout::{ControlRecord, GroupRecord};
use gather8_kernels::scalar::{Adam, Elements, ElementsMut, MasterMut, Shard};
use gather8_kernels::{Format, fast};

const LENGTHS: [usize; 3] = [256, 16_384, 1_048_576];

fn main() {
    divan::main();
}

/// BF16 values between 0.5 and 2, of either sign.
fn values(elements: usize) -> Vec<u16> {
    (0..elements as u32).map(|i| 0x3f00 + (i * 77 % 256) as u16 + ((i % 2) << 15) as u16).collect()
}

#[divan::bench(args = LENGTHS)]
fn amax(bencher: Bencher<'_, '_>, elements: usize) {
    let src = values(elements);
    bencher
        .counter(BytesCount::new(2 * elements))
        .bench_local(|| fast::amax_word(Elements::Bf16(black_box(&src))));
}

#[divan::bench(args = LENGTHS)]
fn cast_e4m3(bencher: Bencher<'_, '_>, elements: usize) {
    let src = values(elements);
    let mut dst = vec![0; elements];
    bencher.counter(BytesCount::new(3 * elements)).bench_local(|| {
        fast::cast(Elements::Bf16(black_box(&src)), 100.0, Format::E4m3, black_box(&mut dst))
    });
}

#[divan::bench(args = LENGTHS)]
fn decode_e4m3(bencher: Bencher<'_, '_>, elements: usize) {
    let src: Vec<u8> = (0..elements).map(|i| (i % 127) as u8).collect();
    let mut dst = vec![0.0; elements];
    bencher.counter(BytesCount::new(5 * elements)).bench_local(|| {
        let dst = ElementsMut::F32(black_box(&mut dst));
        fast::decode(black_box(&src), Format::E4m3, 0.01, dst);
    });
}

#[divan::bench(args = LENGTHS)]
fn adamw_remainder(bencher: Bencher<'_, '_>, elements: usize) {
    let group = GroupRecord {
        lr: 1e-4,
        weight_decay: 0.1,
        eps: 1e-8,
        b1: 0.9,
        one_minus_b1: 0.1,
        b2: 0.95,
        one_minus_b2: 0.05,
        correction1: 0.5,
        correction2: 0.5,
        ..GroupRecord::default()
    };
    let control = ControlRecord { factor: 1.0, ..ControlRecord::default() };
    let adam = Adam::new(&group, &control);
    let grad = values(elements);
    let (mut weight, mut remainder) = (values(elements), vec![0; elements]);
    let (mut m, mut v) = (vec![0.1; elements], vec![0.1; elements]);
    bencher.counter(BytesCount::new(26 * elements)).bench_local(|| {
        fast::optimize(
            &adam,
            Shard {
                grad: Elements::Bf16(black_box(&grad)),
                exp_avg: ElementsMut::F32(&mut m),
                exp_avg_sq: ElementsMut::F32(&mut v),
                weight: ElementsMut::Bf16(&mut weight),
                master: MasterMut::Remainder(&mut remainder),
                emit: None,
            },
        )
    });
}

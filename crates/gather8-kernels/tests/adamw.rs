//! AdamW against an f64 oracle and against torch's f32 AdamW (golden file made by
//! `golden/make.py`), and what the remainders, the BF16 moments and the NaNs must do.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod support;

use gather8_kernels::Format;
use gather8_kernels::layout::{ControlRecord, GroupRecord, NormRecord, TOUCHED};
use gather8_kernels::scalar::{
    Adam, Elements, ElementsMut, EmitMut, MasterMut, Shard, adam_element, amax_word, bf16_to_f32,
    cast, control, f32_to_bf16, join_all, optimize, split, split_all,
};
use support::{Random, mix, unit};

const ELEMENTS: usize = 512;
const STEPS: u64 = 100;
const B1: f64 = 0.9;
const WEIGHT_DECAY: f64 = 0.01;
const EPS: f64 = 1e-8;

/// A case of `golden/make.py`.
struct Case {
    weight_decay: f64,
    lr: f64,
    b2: f64,
    bf16: bool,
}

/// In the order of `golden/make.py`.
fn cases() -> Vec<Case> {
    let mut cases = vec![];
    for weight_decay in [WEIGHT_DECAY, 0.0] {
        for lr in [1e-3, 1e-2] {
            for b2 in [0.95, 0.999] {
                for bf16 in [false, true] {
                    cases.push(Case { weight_decay, lr, b2, bf16 });
                }
            }
        }
    }
    cases
}

fn uniform(step: u64) -> Vec<f32> {
    (0..ELEMENTS as u64).map(|i| unit(mix(i + step * ELEMENTS as u64))).collect()
}

fn gradient(step: u64, bf16: bool) -> Vec<f32> {
    let noise = uniform(step);
    let mean = uniform(1000);
    let g = noise.iter().zip(&mean).map(|(&noise, &mean)| (noise + mean * 0.5) * 0.0078125);
    g.map(|g| if bf16 { bf16_to_f32(f32_to_bf16(g)) } else { g }).collect()
}

fn group(lr: f64, b1: f64, b2: f64, weight_decay: f64, mode: u32) -> GroupRecord {
    GroupRecord {
        beta1: b1,
        beta2: b2,
        lr: lr as f32,
        weight_decay: weight_decay as f32,
        eps: EPS as f32,
        mode,
        b1: b1 as f32,
        one_minus_b1: (1.0 - b1) as f32,
        b2: b2 as f32,
        one_minus_b2: (1.0 - b2) as f32,
        ..GroupRecord::default()
    }
}

fn unclipped() -> ControlRecord {
    ControlRecord { inverse_loss_scale: 1.0, skip_on_found_inf: 1, ..ControlRecord::default() }
}

/// The same formula in f64.
fn oracle(lr: f64, b2: f64, weight_decay: f64, l2: bool, bf16: bool) -> Vec<f64> {
    let mut p: Vec<f64> = uniform(0).into_iter().map(f64::from).collect();
    let mut m = vec![0.0; ELEMENTS];
    let mut v = vec![0.0; ELEMENTS];
    for step in 1..=STEPS {
        let bc1 = 1.0 - B1.powi(step as i32);
        let bc2 = 1.0 - b2.powi(step as i32);
        for (i, g) in gradient(step, bf16).into_iter().enumerate() {
            let mut g = f64::from(g);
            if l2 {
                g += weight_decay * p[i];
            }
            m[i] = B1 * m[i] + (1.0 - B1) * g;
            v[i] = b2 * v[i] + (1.0 - b2) * g * g;
            let mut d = m[i] / bc1 / ((v[i] / bc2).sqrt() + EPS);
            if !l2 {
                d += weight_decay * p[i];
            }
            p[i] -= lr * d;
        }
    }
    p
}

/// A hundred steps with a remainder: the masters that weight and remainder join to.
fn trained(record: GroupRecord, bf16_gradients: bool) -> Vec<f32> {
    let (mut weight, mut remainder) = (vec![0; ELEMENTS], vec![0; ELEMENTS]);
    split_all(&uniform(0), &mut weight, &mut remainder);
    let (mut m, mut v) = (vec![0.0; ELEMENTS], vec![0.0; ELEMENTS]);
    let mut state = unclipped();
    let mut groups = [record];
    for step in 1..=STEPS {
        control(&NormRecord::default(), &mut state, &mut groups);
        let grad = gradient(step, bf16_gradients);
        let bits: Vec<u16> = grad.iter().map(|&g| f32_to_bf16(g)).collect();
        optimize(
            &Adam::new(&groups[0], &state),
            Shard {
                grad: if bf16_gradients { Elements::Bf16(&bits) } else { Elements::F32(&grad) },
                exp_avg: ElementsMut::F32(&mut m),
                exp_avg_sq: ElementsMut::F32(&mut v),
                weight: ElementsMut::Bf16(&mut weight),
                master: MasterMut::Remainder(&mut remainder),
                emit: None,
            },
        );
    }
    let mut masters = vec![0.0; ELEMENTS];
    join_all(&weight, &remainder, &mut masters);
    masters
}

fn mean_error(found: &[f32], exact: &[f64]) -> f64 {
    let sum: f64 = found.iter().zip(exact).map(|(&a, &b)| (f64::from(a) - b).abs()).sum();
    sum / exact.len() as f64
}

/// With torch's default decay its error is mostly that of `p * (1 - lr * wd)`, whose factor lies so
/// near 1 that f32 holds few digits of the decay; ours subtracts the decay. Without decay both are
/// alike.
#[test]
fn a_hundred_steps_are_at_most_half_as_far_from_f64_as_those_of_torch() {
    let golden = include_bytes!("golden/adamw.bin");
    let torch: Vec<f32> =
        golden.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(torch.len(), cases().len() * ELEMENTS);
    for (case, torch) in cases().into_iter().zip(torch.chunks_exact(ELEMENTS)) {
        let Case { weight_decay, lr, b2, bf16 } = case;
        let exact = oracle(lr, b2, weight_decay, false, bf16);
        let ours = mean_error(&trained(group(lr, B1, b2, weight_decay, 0), bf16), &exact);
        let theirs = mean_error(torch, &exact);
        let what = format!("decay {weight_decay} lr {lr} b2 {b2} bf16 gradients {bf16}");
        println!("{what}: {ours:.3e}, torch {theirs:.3e}");
        // Torch starts where the oracle does and walks the same way.
        assert!(theirs < 1e-5, "{what}: {theirs}");
        if weight_decay > 0.0 {
            assert!(ours * 2.0 <= theirs, "{what}: {ours:e}, torch {theirs:e}");
        } else {
            assert!(ours <= theirs * 1.5, "{what}: {ours:e}, torch {theirs:e}");
        }
    }
}

#[test]
fn adam_with_l2_follows_its_f64_oracle() {
    for (lr, b2) in [(1e-3, 0.95), (1e-2, 0.999)] {
        let exact = oracle(lr, b2, WEIGHT_DECAY, true, false);
        let l2 = trained(group(lr, B1, b2, WEIGHT_DECAY, 1), false);
        let error = mean_error(&l2, &exact);
        // A hundred roundings of numbers below 1, each of at most 2^-25: 3e-6 at the very worst.
        assert!(error < 3e-7, "{error:e}");
        // And it is another optimizer than AdamW.
        let adamw = trained(group(lr, B1, b2, WEIGHT_DECAY, 0), false);
        assert!(mean_error(&adamw, &exact) > 100.0 * error);
    }
}

/// The formula once more, one operation a line: what is rounded when is part of the contract, and
/// another order (a fused multiply-add, `(1 - b2) * (g * g)`) shows in the last bit.
#[test]
fn every_operation_is_one_rounding_in_the_stated_order() {
    for l2 in [false, true] {
        let mut forms = Forms::random(11_000_000, false, l2);
        // A complement that was rounded once from f64 is not the complement of the rounded beta.
        forms.adam.one_minus_b1 = (1.0 - B1) as f32;
        assert_ne!(forms.adam.one_minus_b1, 1.0 - forms.adam.b1);
        forms.adam.factor = 0.37;
        let a = forms.adam;
        for i in 0..forms.p.len() {
            let p = forms.p[i];
            let decay = a.weight_decay * p;
            let mut g = forms.grad[i] * a.factor;
            if l2 {
                g += decay;
            }
            let old_m = a.b1 * forms.m[i];
            let new_m = a.one_minus_b1 * g;
            let m = old_m + new_m;
            let old_v = a.b2 * forms.v[i];
            let weighted = a.one_minus_b2 * g;
            let new_v = weighted * g;
            let v = old_v + new_v;
            let mean = m / a.correction1;
            let square = v / a.correction2;
            let root = square.sqrt();
            let below = root + a.eps;
            let mut d = mean / below;
            if !l2 {
                d += decay;
            }
            let change = a.lr * d;
            let expected = [m, v, p - change].map(f32::to_bits);
            let (m, v, p) = adam_element(&a, forms.grad[i], forms.m[i], forms.v[i], p);
            assert_eq!([m, v, p].map(f32::to_bits), expected, "{i}");
        }
    }
}

/// A random shard in every form, and its step in each of them.
struct Forms {
    adam: Adam,
    grad: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    p: Vec<f32>,
}

impl Forms {
    fn random(seed: u64, wild: bool, l2: bool) -> Self {
        let mut random = Random(seed);
        let mut state = unclipped();
        let mut groups = [group(1e-2, B1, 0.95, 0.1, l2 as u32)];
        control(&NormRecord::default(), &mut state, &mut groups);
        let mut some = |square: bool| -> Vec<f32> {
            let one = |_| match (wild, square) {
                (true, _) => random.any_f32(),
                (false, true) => random.ordinary().abs(),
                (false, false) => random.ordinary(),
            };
            (0..2000).map(one).collect()
        };
        Self {
            adam: Adam::new(&groups[0], &state),
            grad: some(false),
            m: some(false),
            v: some(true),
            p: some(false),
        }
    }

    /// Weights, remainders, masters and moments after one step with remainders.
    fn with_remainder(&self) -> (u32, Vec<u16>, Vec<u16>, Vec<f32>, Vec<f32>) {
        let (mut weight, mut remainder) = (vec![0; self.p.len()], vec![0; self.p.len()]);
        split_all(&self.p, &mut weight, &mut remainder);
        let (mut m, mut v) = (self.m.clone(), self.v.clone());
        let word = optimize(
            &self.adam,
            Shard {
                grad: Elements::F32(&self.grad),
                exp_avg: ElementsMut::F32(&mut m),
                exp_avg_sq: ElementsMut::F32(&mut v),
                weight: ElementsMut::Bf16(&mut weight),
                master: MasterMut::Remainder(&mut remainder),
                emit: None,
            },
        );
        (word, weight, remainder, m, v)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn remainder_copy_and_f32_weight_give_the_same_master_bits() {
    for (seed, wild, l2) in [(5, false, false), (6, false, true), (7, true, false), (8, true, true)]
    {
        let forms = Forms::random(seed * 1_000_000, wild, l2);
        let (word, weight, remainder, m, v) = forms.with_remainder();

        let mut copy = forms.p.clone();
        let mut copy_weight = vec![0; copy.len()];
        let (mut m2, mut v2) = (forms.m.clone(), forms.v.clone());
        let copy_word = optimize(
            &forms.adam,
            Shard {
                grad: Elements::F32(&forms.grad),
                exp_avg: ElementsMut::F32(&mut m2),
                exp_avg_sq: ElementsMut::F32(&mut v2),
                weight: ElementsMut::Bf16(&mut copy_weight),
                master: MasterMut::Copy(&mut copy),
                emit: None,
            },
        );
        assert_eq!(copy_word, word);
        assert_eq!(word, amax_word(Elements::Bf16(&weight)));
        assert_eq!(copy_weight, weight);
        let mut joined = vec![0.0; copy.len()];
        join_all(&weight, &remainder, &mut joined);
        assert_eq!(bits(&joined), bits(&copy));
        assert_eq!((bits(&m2), bits(&v2)), (bits(&m), bits(&v)));

        let mut own = forms.p.clone();
        let (mut m3, mut v3) = (forms.m.clone(), forms.v.clone());
        let own_word = optimize(
            &forms.adam,
            Shard {
                grad: Elements::F32(&forms.grad),
                exp_avg: ElementsMut::F32(&mut m3),
                exp_avg_sq: ElementsMut::F32(&mut v3),
                weight: ElementsMut::F32(&mut own),
                master: MasterMut::Itself,
                emit: None,
            },
        );
        assert_eq!(bits(&own), bits(&copy));
        assert_eq!(own_word, amax_word(Elements::F32(&own)));

        // Element by element, as the formula says.
        for (i, found) in copy.iter().enumerate() {
            let (_, _, p) =
                adam_element(&forms.adam, forms.grad[i], forms.m[i], forms.v[i], forms.p[i]);
            assert_eq!(found.to_bits(), support::canonical_bits(p));
        }
    }
}

#[test]
fn emitted_bytes_are_those_that_a_later_cast_makes() {
    for format in [Format::E4m3, Format::E5m2] {
        let forms = Forms::random(9_000_000, false, false);
        let (mut weight, mut remainder) = (vec![0; forms.p.len()], vec![0; forms.p.len()]);
        split_all(&forms.p, &mut weight, &mut remainder);
        let mut codes = vec![0; forms.p.len()];
        optimize(
            &forms.adam,
            Shard {
                grad: Elements::F32(&forms.grad),
                exp_avg: ElementsMut::F32(&mut forms.m.clone()),
                exp_avg_sq: ElementsMut::F32(&mut forms.v.clone()),
                weight: ElementsMut::Bf16(&mut weight),
                master: MasterMut::Remainder(&mut remainder),
                emit: Some(EmitMut { dst: &mut codes, scale: 3.7, format }),
            },
        );
        let mut later = vec![0; codes.len()];
        cast(Elements::Bf16(&weight), 3.7, format, &mut later);
        assert_eq!(codes, later);
    }
}

#[test]
fn every_nan_ends_canonical() {
    let mut record = group(1e-2, B1, 0.95, 0.1, 0);
    record.eps = 0.0;
    let mut groups = [record];
    let mut state = unclipped();
    control(&NormRecord::default(), &mut state, &mut groups);
    let adam = Adam::new(&groups[0], &state);

    // 0/0; inf - inf; a NaN of another kind in the gradient; a NaN master.
    let odd = f32::from_bits(0xff80_0123);
    let grad = [0.0, 1.0, odd, 0.0];
    let start = [1.0, f32::INFINITY, 1.0, odd];
    let (mut m, mut v) = ([0.0; 4], [0.0; 4]);
    let (mut weight, mut remainder) = ([0; 4], [0; 4]);
    split_all(&start, &mut weight, &mut remainder);
    // As if a device had stored it raw.
    weight[3] = 0xffff;
    remainder[3] = 0xffff;
    let word = optimize(
        &adam,
        Shard {
            grad: Elements::F32(&grad),
            exp_avg: ElementsMut::F32(&mut m),
            exp_avg_sq: ElementsMut::F32(&mut v),
            weight: ElementsMut::Bf16(&mut weight),
            master: MasterMut::Remainder(&mut remainder),
            emit: None,
        },
    );
    assert_eq!(weight, [0x7fc0; 4]);
    assert_eq!(remainder, [0; 4]);
    assert_eq!((m[2].to_bits(), v[2].to_bits()), (0x7fc0_0000, 0x7fc0_0000));
    assert_eq!(word, TOUCHED | 0x7fc0_0000);

    let (mut m, mut v) = ([0x7f81, 0, 0xffff], [0, 0x7f90, 0]);
    let mut weight = [f32::from_bits(0x7f80_0001), 1.0, 1.0];
    optimize(
        &adam,
        Shard {
            grad: Elements::Bf16(&[0, 0, 0xff81]),
            exp_avg: ElementsMut::Bf16(&mut m),
            exp_avg_sq: ElementsMut::Bf16(&mut v),
            weight: ElementsMut::F32(&mut weight),
            master: MasterMut::Itself,
            emit: None,
        },
    );
    assert_eq!((m, v), ([0x7fc0, 0, 0x7fc0], [0, 0x7fc0, 0x7fc0]));
    assert_eq!(bits(&weight), [0x7fc0_0000; 3]);
}

/// One step without a gradient from a second moment of every mantissa.
fn decayed(b2: f64) -> Vec<(u16, u16)> {
    let mut groups = [group(1e-3, B1, b2, 0.0, 0)];
    let mut state = unclipped();
    control(&NormRecord::default(), &mut state, &mut groups);
    let before: Vec<u16> = (0x3f80..0x4000).collect();
    let mut v = before.clone();
    optimize(
        &Adam::new(&groups[0], &state),
        Shard {
            grad: Elements::F32(&vec![0.0; v.len()]),
            exp_avg: ElementsMut::Bf16(&mut vec![0; before.len()]),
            exp_avg_sq: ElementsMut::Bf16(&mut v),
            weight: ElementsMut::F32(&mut vec![1.0; before.len()]),
            master: MasterMut::Itself,
            emit: None,
        },
    );
    before.into_iter().zip(v).collect()
}

#[test]
fn a_bf16_second_moment_stalls_above_0_995() {
    assert!(decayed(0.95).iter().all(|(before, after)| after < before));
    assert!(decayed(0.995).iter().all(|(before, after)| after < before));
    // At 0.999 it never decays, whatever it is: a spike would damp its weight for ever.
    assert!(decayed(0.999).iter().all(|(before, after)| after == before));
}

#[test]
fn bf16_moments_round_to_nearest_even_and_the_step_uses_the_unrounded() {
    let forms = Forms::random(10_000_000, false, false);
    let n = forms.p.len();
    let mut m: Vec<u16> = forms.m.iter().map(|&x| f32_to_bf16(x)).collect();
    let mut v: Vec<u16> = forms.v.iter().map(|&x| f32_to_bf16(x)).collect();
    let grad: Vec<u16> = forms.grad.iter().map(|&x| f32_to_bf16(x)).collect();
    let (m0, v0) = (m.clone(), v.clone());
    let mut copy = forms.p.clone();
    let mut weight = vec![0; n];
    optimize(
        &forms.adam,
        Shard {
            grad: Elements::Bf16(&grad),
            exp_avg: ElementsMut::Bf16(&mut m),
            exp_avg_sq: ElementsMut::Bf16(&mut v),
            weight: ElementsMut::Bf16(&mut weight),
            master: MasterMut::Copy(&mut copy),
            emit: None,
        },
    );
    for i in 0..n {
        let wide = |x: u16| bf16_to_f32(x);
        let (em, ev, ep) =
            adam_element(&forms.adam, wide(grad[i]), wide(m0[i]), wide(v0[i]), forms.p[i]);
        assert_eq!((m[i], v[i]), (f32_to_bf16(em), f32_to_bf16(ev)));
        assert_eq!(copy[i].to_bits(), ep.to_bits());
        assert_eq!(weight[i], split(ep).0);
    }
}

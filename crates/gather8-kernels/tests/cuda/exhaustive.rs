//! Everything that can be tried out entirely: every input of the casts, every pair of the remainder.

use gather8_kernels::job::{Cast, Decode, Master, Optimize};
use gather8_kernels::layout::{BytesRecord, ControlRecord, GroupRecord, SlotRecord};
use gather8_kernels::{Backend, DType, Format, Job, Memory, Span, Tensor, scalar};

use crate::{Desk, cuda};

/// Calls `work` with pieces of a slice on every core.
fn in_parallel<T: Send>(out: &mut [T], work: impl Fn(usize, &mut [T]) + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let piece = out.len().div_ceil(cores).max(1);
    std::thread::scope(|scope| {
        for (number, out) in out.chunks_mut(piece).enumerate() {
            let work = &work;
            scope.spawn(move || work(number * piece, out));
        }
    });
}

fn cast_all(dtype: DType, scale: f32) {
    let desk = Desk::new(cuda());
    let size = dtype.size();
    let total: u64 = if size == 2 { 1 << 16 } else { 1 << 32 };
    let chunk = total.min(1 << 27);
    let alloc = |bytes| Span::whole(&desk.backend.alloc(bytes, Memory::Device).unwrap());
    let src = Tensor::new(alloc(chunk * size), dtype).unwrap();
    let slot = SlotRecord { cast: scale, cast_inv: 1.0 / scale, version: 1, ..Default::default() };
    let scales = desk.put(&[slot], 0);
    let (dst, record) = (alloc(chunk), alloc(size_of::<BytesRecord>() as u64));
    let plans = [Format::E4m3, Format::E5m2].map(|format| {
        let job = Cast {
            src: src.clone(),
            dst: dst.clone(),
            format,
            scales: scales.clone(),
            record: record.clone(),
            saturated: None,
            amax: None,
        };
        (format, desk.backend.plan(&[Job::Cast(job)]).unwrap())
    });
    let mut input = vec![0_u8; (chunk * size) as usize];
    let mut expected = vec![0_u8; chunk as usize];
    for from in (0..total).step_by(chunk as usize) {
        in_parallel(&mut input, |at, out| {
            let first = from + at as u64 / size;
            for (i, bytes) in out.chunks_exact_mut(size as usize).enumerate() {
                bytes.copy_from_slice(&((first + i as u64) as u32).to_le_bytes()[..size as usize]);
            }
        });
        desk.backend.upload(&desk.stream, &input, &src.span).unwrap();
        for (format, plan) in &plans {
            desk.backend.fill(&desk.stream, &record, 0).unwrap();
            desk.backend.run(&desk.stream, plan).unwrap();
            let found = desk.get(&dst);
            in_parallel(&mut expected, |at, out| {
                for (i, code) in out.iter_mut().enumerate() {
                    let bits = (from + (at + i) as u64) as u32;
                    let x = match dtype {
                        DType::Bf16 => scalar::bf16_to_f32(bits as u16),
                        DType::F16 => scalar::f16_to_f32(bits as u16),
                        _ => f32::from_bits(bits),
                    };
                    *code = format.encode(x * scale);
                }
            });
            if let Some(at) = found.iter().zip(&expected).position(|(a, b)| a != b) {
                panic!(
                    "{dtype:?} {:#x} * {scale} to {format:?}: the CPU has {:#04x}, the GPU {:#04x}",
                    from + at as u64,
                    expected[at],
                    found[at]
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_16_bit_value_through_both_casts() {
    for dtype in [DType::Bf16, DType::F16] {
        for scale in [1.0, 0.37, 448.0, 1e-6, 3e38, f32::MIN_POSITIVE] {
            cast_all(dtype, scale);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_f32_through_both_casts() {
    cast_all(DType::F32, 1.0);
}

#[test]
#[ignore = "needs a GPU"]
fn every_code_back() {
    let desk = Desk::new(cuda());
    let codes: Vec<u8> = (0..=255).collect();
    for format in [Format::E4m3, Format::E5m2] {
        for scale_inv in [1.0_f32, 0.3, 1e-40, 1e38, f32::INFINITY, 0.0] {
            let record = desk.put(&[BytesRecord { scale_inv, ..Default::default() }], 0);
            let dst = desk.tensor(&[0_u32; 256], DType::F32, 0);
            let span = dst.span.clone();
            desk.run(&[Job::Decode(Decode { src: desk.put(&codes, 0), format, record, dst })]);
            let found: Vec<u32> = desk.get_as(&span);
            for (code, found) in (0..=255_u8).zip(found) {
                let expected = scalar::canonical(format.decode(code) * scale_inv).to_bits();
                assert_eq!(found, expected, "{format:?} {code:#x} * {scale_inv}");
            }
        }
    }
}

/// A step with learning rate 0 joins each pair and splits it again: all 2^32 pairs go through the
/// kernel's join and split.
#[test]
#[ignore = "needs a GPU"]
fn every_pair_of_weight_and_remainder() {
    const CHUNK: u64 = 1 << 28;
    let desk = Desk::new(cuda());
    let zeros = |bytes| Span::whole(&desk.backend.alloc(bytes, Memory::Device).unwrap());
    let tensor = |span: &Span<_>, dtype| Tensor::new(span.clone(), dtype).unwrap();
    let (grad, moments) = (zeros(2 * CHUNK), [zeros(4 * CHUNK), zeros(4 * CHUNK)]);
    let (weight, remainder) = (zeros(2 * CHUNK), zeros(2 * CHUNK));
    let group = GroupRecord { eps: 1.0, correction1: 1.0, correction2: 1.0, ..Default::default() };
    let job = Optimize {
        grad: tensor(&grad, DType::Bf16),
        exp_avg: tensor(&moments[0], DType::F32),
        exp_avg_sq: tensor(&moments[1], DType::F32),
        weight: tensor(&weight, DType::Bf16),
        master: Master::Remainder(remainder.clone()),
        group: desk.put(&[group], 0),
        control: desk.put(&[ControlRecord { factor: 1.0, ..Default::default() }], 0),
        amax: None,
        emit: None,
    };
    let plan = desk.backend.plan(&[Job::Optimize(job)]).unwrap();
    let adam = scalar::Adam::new(&group, &ControlRecord { factor: 1.0, ..Default::default() });
    let mut low = vec![0_u16; CHUNK as usize];
    in_parallel(&mut low, |at, out| {
        out.iter_mut().enumerate().for_each(|(i, low)| *low = (at + i) as u16)
    });
    let mut high = vec![0_u16; CHUNK as usize];
    let mut wrong = vec![0_u8; CHUNK as usize];
    let mut round_trips = 0_u64;
    for from in (0..1_u64 << 32).step_by(CHUNK as usize) {
        in_parallel(&mut high, |at, out| {
            out.iter_mut()
                .enumerate()
                .for_each(|(i, high)| *high = ((from + (at + i) as u64) >> 16) as u16);
        });
        desk.backend.upload(&desk.stream, bytemuck::cast_slice(&high), &weight).unwrap();
        desk.backend.upload(&desk.stream, bytemuck::cast_slice(&low), &remainder).unwrap();
        desk.backend.run(&desk.stream, &plan).unwrap();
        let found_high: Vec<u16> = desk.get_as(&weight);
        let found_low: Vec<u16> = desk.get_as(&remainder);
        // 1: differs from the CPU; 2: a finite master came back.
        in_parallel(&mut wrong, |at, out| {
            for (i, mark) in out.iter_mut().enumerate() {
                let (h, l) = (high[at + i], low[at + i]);
                let (_, _, p) = scalar::adam_element(&adam, 0.0, 0.0, 0.0, scalar::join(h, l));
                let found = (found_high[at + i], found_low[at + i]);
                let back = scalar::join(h, l).is_finite() && found == (h, l);
                *mark = u8::from(found != scalar::split(p)) | u8::from(back) << 1;
            }
        });
        if let Some(at) = wrong.iter().position(|mark| mark & 1 != 0) {
            panic!(
                "pair {:#x}: the GPU has {:#x} {:#x}",
                from + at as u64,
                found_high[at],
                found_low[at]
            );
        }
        round_trips += wrong.iter().filter(|&&mark| mark & 2 != 0).count() as u64;
    }
    // Every finite f32 is the master of exactly one pair that split makes, and comes back as that.
    assert_eq!(round_trips, (1 << 32) - (1 << 24));
}

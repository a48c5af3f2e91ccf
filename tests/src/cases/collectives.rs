//! What a communicator does with bytes, whatever moves them.

use std::any::TypeId;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use gather8_collectives::{Error, Op, Reduce};
use gather8_kernels::cpu::Cpu;
use gather8_kernels::{Backend, Memory, Span};

use crate::Context;

fn op(sequence: u64, name: &'static str) -> Op<'static> {
    Op { sequence, name, unit: "case", deadline: Duration::from_secs(20) }
}

/// A rank's memory and stream.
struct Hand<'a, B: Backend> {
    cx: &'a Context<B>,
    stream: B::Stream,
}

impl<'a, B: Backend> Hand<'a, B> {
    fn new(cx: &'a Context<B>) -> anyhow::Result<Self> {
        Ok(Self { cx, stream: cx.backend.stream("case")? })
    }

    fn zeros(&self, bytes: u64) -> anyhow::Result<Span<B>> {
        Ok(Span::whole(&self.cx.backend.alloc(bytes, Memory::Device)?))
    }

    fn span_of(&self, bytes: &[u8]) -> anyhow::Result<Span<B>> {
        let span = self.zeros(bytes.len() as u64)?;
        self.cx.backend.upload(&self.stream, bytes, &span)?;
        Ok(span)
    }

    fn bytes(&self, span: &Span<B>) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; span.len() as usize];
        self.cx.backend.download(&self.stream, span, &mut bytes)?;
        Ok(bytes)
    }
}

/// Bytes that tell rank and part apart.
fn content(rank: u32, part: u64, len: u64) -> Vec<u8> {
    (0..len).map(|i| (u64::from(rank) * 31 + part * 7 + i) as u8).collect()
}

/// Groups of parts of several sizes, empty ones among them, out of place and in place.
pub fn gathers_land_in_rank_order<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let hand = Hand::new(cx)?;
    let world = u64::from(cx.world());
    // Large enough to be cut on its way.
    let lengths = [16, 0, 5, 300_000, 1];
    for step in 0..3 {
        let mut parts = Vec::new();
        for (part, &len) in (0..).zip(&lengths) {
            let bytes = content(cx.rank(), part + step, len);
            let destination = hand.zeros(len * world)?;
            let source = if step == 2 {
                let at = u64::from(cx.rank()) * len;
                let source = destination.sub(at..at + len)?;
                cx.backend.upload(&hand.stream, &bytes, &source)?;
                source
            } else {
                hand.span_of(&bytes)?
            };
            parts.push((source, destination));
        }
        cx.communicator.all_gather(op(step, "all-gather"), &parts, &hand.stream)?;
        for ((part, &len), (_, destination)) in (0..).zip(&lengths).zip(&parts) {
            let expected = (0..cx.world()).flat_map(|rank| content(rank, part + step, len));
            ensure!(
                hand.bytes(destination)? == expected.collect::<Vec<_>>(),
                "part {part} of step {step}"
            );
        }
    }
    Ok(())
}

/// How late a rank comes where others must wait for it, and what a clock may miss of that.
const LATE: Duration = Duration::from_millis(300);
const SLACK: Duration = Duration::from_millis(50);

/// An event that is recorded behind a gather passes when the bytes are there, not when the gather has
/// been issued: not before the last rank has come.
pub fn an_event_after_a_gather_waits_for_all<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    late_gather(cx, |_| {
        std::thread::sleep(LATE);
        Ok(())
    })
}

/// A gather for which the last rank comes late, by what `linger` does to it or to its stream; the
/// others see their events after it.
pub fn late_gather<B: Backend>(
    cx: &Context<B>,
    linger: impl Fn(&B::Stream) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let hand = Hand::new(cx)?;
    let reader = cx.backend.stream("reader")?;
    let (world, late) = (u64::from(cx.world()), cx.world() - 1);
    let lengths = [70_000, 3];
    // The first gather of a communicator also connects its ranks.
    for step in 0..3 {
        let mut parts = Vec::new();
        for (part, &len) in (0..).zip(&lengths) {
            let source = hand.span_of(&content(cx.rank(), part + step, len))?;
            parts.push((source, hand.zeros(len * world)?));
        }
        let copies = [hand.zeros(lengths[0] * world)?, hand.zeros(lengths[1] * world)?];
        cx.backend.synchronize(&hand.stream)?;
        cx.communicator.barrier(op(step, "barrier"))?;
        let start = std::time::Instant::now();
        if step > 0 && cx.rank() == late {
            linger(&hand.stream)?;
        }
        cx.communicator.all_gather(op(step, "all-gather"), &parts, &hand.stream)?;
        let gathered = cx.backend.record(&hand.stream)?;
        cx.backend.wait(&reader, &gathered, "case-gather")?;
        for ((_, destination), copy) in parts.iter().zip(&copies) {
            cx.backend.copy(&reader, destination, copy)?;
        }
        cx.backend.wait_host(&gathered)?;
        let waited = start.elapsed();
        ensure!(
            step == 0 || world == 1 || waited >= LATE - SLACK,
            "the event passed after {waited:?}, but rank {late} came {LATE:?} late"
        );
        for ((part, &len), copy) in (0..).zip(&lengths).zip(&copies) {
            let expected = (0..cx.world()).flat_map(|rank| content(rank, part + step, len));
            let mut bytes = vec![0; copy.len() as usize];
            cx.backend.download(&reader, copy, &mut bytes)?;
            ensure!(bytes == expected.collect::<Vec<_>>(), "part {part} of step {step}");
        }
    }
    Ok(())
}

/// On integers every order of addition gives the same; MAX keeps NaN above all.
pub fn reductions_are_exact_on_integers<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let hand = Hand::new(cx)?;
    let (world, rank) = (cx.world() as usize, cx.rank());
    let sum_of_ranks = (0..cx.world()).sum::<u32>();

    let n = 1500;
    let values = (0..n * world).map(|i| (i % 97) as f32 + rank as f32).collect::<Vec<_>>();
    let parts = [(hand.span_of(&f32_bytes(&values))?, hand.zeros(4 * n as u64)?)];
    let communicator = &cx.communicator;
    communicator.reduce_scatter(op(0, "reduce-scatter"), Reduce::SumF32, &parts, &hand.stream)?;
    let mine = rank as usize * n..(rank as usize + 1) * n;
    let expected = mine.map(|i| ((i % 97) * world) as f32 + sum_of_ranks as f32);
    ensure!(hand.bytes(&parts[0].1)? == f32_bytes(&expected.collect::<Vec<_>>()), "f32 pieces");

    let halves = [1.0_f32, 2.0, -3.0].map(|x| ((x * (rank + 1) as f32).to_bits() >> 16) as u16);
    let halves = halves.map(u16::to_le_bytes).concat();
    let span = hand.span_of(&halves)?;
    communicator.all_reduce(op(1, "all-reduce"), Reduce::SumBf16, &span, &hand.stream)?;
    let total = (sum_of_ranks + cx.world()) as f32;
    let expected = [1.0, 2.0, -3.0].map(|x: f32| ((x * total).to_bits() >> 16) as u16);
    ensure!(hand.bytes(&span)? == expected.map(u16::to_le_bytes).concat(), "bf16");

    let span = hand.span_of(&[f64::from(rank), 0.5].map(f64::to_le_bytes).concat())?;
    communicator.all_reduce(op(2, "all-reduce"), Reduce::SumF64, &span, &hand.stream)?;
    let expected = [f64::from(sum_of_ranks), 0.5 * f64::from(cx.world())];
    ensure!(hand.bytes(&span)? == expected.map(f64::to_le_bytes).concat(), "f64");

    let nan = if rank == cx.world() - 1 { 0xffc0_0000 } else { 0xff80_0000_u32 };
    let words = [nan, 0x8000_0000 | rank, if rank == 0 { 0x8000_0007 } else { 0 }];
    let span = hand.span_of(&words.map(u32::to_le_bytes).concat())?;
    communicator.all_reduce(op(3, "all-reduce"), Reduce::MaxU32, &span, &hand.stream)?;
    let expected = [0xffc0_0000, 0x8000_0000 | (cx.world() - 1), 0x8000_0007];
    ensure!(hand.bytes(&span)? == expected.map(u32::to_le_bytes).concat(), "MAX");
    Ok(())
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Broadcasts from every root, messages of differing lengths, barriers.
pub fn broadcasts_and_messages<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let hand = Hand::new(cx)?;
    for root in 0..cx.world() {
        let span = hand.span_of(&content(cx.rank(), 1, 50))?;
        let sequence = u64::from(root);
        cx.communicator.broadcast(op(sequence, "broadcast"), root, &span, &hand.stream)?;
        ensure!(hand.bytes(&span)? == content(root, 1, 50), "from {root}");
        let all = cx.exchange("lengths", &content(cx.rank(), 2, u64::from(cx.rank()) * 3))?;
        for (rank, message) in (0..).zip(&all) {
            ensure!(*message == content(rank, 2, u64::from(rank) * 3), "of rank {rank}");
        }
        cx.communicator.barrier(op(sequence, "barrier"))?;
    }
    Ok(())
}

/// Groups by colour, in the order of their keys, working side by side.
pub fn splits_work_side_by_side<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let hand = Hand::new(cx)?;
    let (rank, world) = (cx.rank(), cx.world());
    let color = (rank + 1 < world || world == 1).then_some(rank % 2);
    let child = cx.communicator.split(color, world - rank)?;
    ensure!(child.is_some() == color.is_some(), "a rank without a colour is in no group");
    let whole = cx
        .communicator
        .split(Some(0), 0)?
        .ok_or_else(|| anyhow::anyhow!("a colour gives a group"))?;
    ensure!((whole.rank(), whole.world()) == (rank, world), "equal keys keep the order");
    let second = cx.backend.stream("second")?;
    for step in 0..20 {
        let word = hand.span_of(&(rank + step).to_le_bytes())?;
        let ready = cx.backend.record(&hand.stream)?;
        cx.backend.wait(&second, &ready, "case-word")?;
        let sequence = u64::from(step);
        whole.all_reduce(op(sequence, "all-reduce"), Reduce::MaxU32, &word, &second)?;
        if let Some(child) = &child {
            let own = hand.span_of(&rank.to_le_bytes())?;
            let parts = [(own, hand.zeros(4 * u64::from(child.world()))?)];
            child.all_gather(op(sequence, "all-gather"), &parts, &hand.stream)?;
            let members = (0..world.max(2) - 1).rev().filter(|member| member % 2 == rank % 2);
            let expected = members.flat_map(u32::to_le_bytes).collect::<Vec<_>>();
            ensure!(hand.bytes(&parts[0].1)? == expected, "of the group, step {step}");
        }
        let mut max = [0; 4];
        cx.backend.download(&second, &word, &mut max)?;
        ensure!(u32::from_le_bytes(max) == world - 1 + step, "of all, step {step}");
    }
    Ok(())
}

/// A rank that aborts ends what the others wait for, with its reason.
pub fn an_abort_reaches_everybody<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let culprit = cx.world() - 1;
    // Aborted when all are through the start, where it would reach them as well; it may overtake
    // the last messages of this barrier.
    let started = cx.communicator.barrier(op(0, "barrier"));
    if cx.rank() == culprit {
        cx.communicator.abort_handle().abort("on purpose");
    }
    let Err(error) = started.and_then(|()| cx.communicator.barrier(op(1, "barrier"))) else {
        anyhow::bail!("the barrier went through");
    };
    if cx.rank() == culprit {
        ensure!(matches!(error, Error::Aborted { .. }), "the culprit got: {error}");
    } else {
        ensure!(error.blamed_rank() == Some(culprit), "blames another: {error}");
        ensure!(error.to_string().contains("on purpose"), "no reason: {error}");
    }
    ensure!(cx.communicator.check().is_err(), "the failure does not stay");
    Ok(())
}

/// A rank that drops its communicator is named by those who wait for it.
pub fn who_leaves_is_named<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let hand = Hand::new(cx)?;
    let group = cx.communicator.split(Some(0), cx.rank())?;
    let group = group.ok_or_else(|| anyhow::anyhow!("a colour gives a group"))?;
    if cx.world() == 1 {
        return Ok(());
    }
    // Rank 1 leaves when all are through the split, and none before: a rank that has not heard the
    // last of the others would fail in the split. So all have something on their streams that rank 1
    // waits for, and the others do not.
    let span = hand.span_of(&[0; 4])?;
    cx.communicator.all_reduce(op(0, "all-reduce"), Reduce::MaxU32, &span, &hand.stream)?;
    let waits = if cx.rank() == 1 {
        hand.bytes(&span)?;
        drop(group);
        cx.communicator.barrier(op(1, "barrier"))
    } else {
        group.barrier(op(1, "barrier"))
    };
    let Err(error) = waits else { anyhow::bail!("the barrier went through") };
    ensure!(error.blamed_rank() == Some(1), "blames another: {error}");
    // A device's watchdog may have heard of it before, in an operation of its own.
    let text = error.to_string();
    let exact = TypeId::of::<B>() == TypeId::of::<Cpu>();
    ensure!(
        text == "rank 1 left before barrier #1 of `case`"
            || !exact && text.starts_with("rank 1 left before "),
        "it says: {text}"
    );
    Ok(())
}

/// Ranks that pass different things all learn who passed what.
pub fn mismatches_are_told_to_all<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    if cx.world() == 1 {
        return Ok(());
    }
    let hand = Hand::new(cx)?;
    let len = if cx.rank() == 1 { 12 } else { 8 };
    let span = hand.zeros(len)?;
    let issued =
        cx.communicator.all_reduce(op(3, "all-reduce"), Reduce::SumF32, &span, &hand.stream);
    let result =
        issued.and_then(|()| cx.backend.synchronize(&hand.stream).map_err(Error::from_backend));
    let Err(error) = result else { anyhow::bail!("the lengths went unnoticed") };
    let text = error.to_string();
    ensure!(
        text.contains("rank 0 passed all-reduce SumF32 of `case` (8 bytes)")
            && text.contains("rank 1 passed all-reduce SumF32 of `case` (12 bytes)"),
        "it says: {text}"
    );
    Ok(())
}

/// Unused streams and communicators go without a trace.
pub fn dropping_is_quiet<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let hand = Hand::new(cx)?;
    for step in 0..5 {
        let child = cx.communicator.split(Some(0), 0)?;
        let child = child.ok_or_else(|| anyhow::anyhow!("a colour gives a group"))?;
        let span = hand.span_of(&cx.rank().to_le_bytes())?;
        child.all_reduce(op(step, "all-reduce"), Reduce::MaxU32, &span, &hand.stream)?;
        let weak = Arc::downgrade(&child);
        drop(child);
        ensure!(weak.upgrade().is_none(), "somebody holds the communicator");
        // It was issued before the drop, so it is done.
        ensure!(hand.bytes(&span)? == (cx.world() - 1).to_le_bytes(), "step {step}");
    }
    cx.communicator.check()?;
    Ok(())
}

//! What only GPUs and NCCL can get wrong.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use gather8::Scaling;
use gather8_kernels::Backend;
use gather8_kernels::cuda::{Cuda, Seen, Trial};

use super::collectives::late_gather;
use crate::ten_steps::ten_steps;
use crate::{Case, Context};

/// Every case with its name.
pub const ALL: [(&str, Case<Cuda>); 3] = [
    ("an_event_after_a_gather_waits_for_a_late_device", waits_for_a_late_device),
    ("a_delay_takes_its_time", a_delay_takes_its_time),
    ("delays_change_no_byte", delays_change_no_byte),
];

/// As [`late_gather`], with a rank that issues in time but whose device comes late.
fn waits_for_a_late_device(cx: &Context<Cuda>) -> anyhow::Result<()> {
    late_gather(cx, |stream| Ok(cx.backend.delay(stream, Duration::from_millis(300))?))
}

/// What the next case relies on: a delay lasts, holds back its own stream, and no other.
fn a_delay_takes_its_time(cx: &Context<Cuda>) -> anyhow::Result<()> {
    let backend = &cx.backend;
    let (held, free) = (backend.stream("held")?, backend.stream("free")?);
    let start = Instant::now();
    backend.delay(&held, Duration::from_millis(200))?;
    let event = backend.record(&held)?;
    let issued = start.elapsed();
    backend.synchronize(&free)?;
    let passed_beside = start.elapsed();
    ensure!(!backend.has_passed(&event)?, "the delay was over after {passed_beside:?}");
    backend.wait_host(&event)?;
    let lasted = start.elapsed();
    ensure!(lasted >= Duration::from_millis(200), "200 ms took {lasted:?}");
    ensure!(issued < Duration::from_millis(100), "issuing the delay took {issued:?}");
    Ok(())
}

/// How long one operation comes late: longer than the host needs to issue a step.
const LATE: Duration = Duration::from_millis(1);
/// What the runs of one kind of scaling may take, and those that search for what a missing wait does.
const BUDGET: Duration = Duration::from_secs(60);
const SEARCH: Duration = Duration::from_secs(45);
/// The wait whose loss must be seen: a cast that comes late is then read too early.
const VITAL: &str = "use-after-gather";

/// A run of ten steps in which something may come late.
fn run(cx: &Context<Cuda>, scaling: Scaling, trial: Trial) -> (anyhow::Result<Vec<u8>>, Seen) {
    let bytes = ten_steps(cx, scaling, || cx.backend.begin_trial(trial));
    (bytes, cx.backend.end_trial())
}

/// Ten steps give the same bytes whichever operation comes late, on whichever rank. Where there are
/// too many operations for the time, every n-th is tried, and said.
fn delays_change_no_byte(cx: &Context<Cuda>) -> anyhow::Result<()> {
    for (scaling, name) in [(Scaling::Dynamic, "dynamic"), (Scaling::delayed(), "delayed")] {
        // The first run also warms up.
        run(cx, scaling, Trial::new()).0?;
        let start = Instant::now();
        let (plain, seen) = run(cx, scaling, Trial::new());
        let (plain, took) = (plain?, start.elapsed());
        // Ranks go through the longest list of operations, and the longest time.
        let mine = format!("{} {}", seen.operations, took.as_micros());
        let (mut operations, mut micros) = (0, 0);
        for message in cx.exchange("operations", mine.as_bytes())? {
            let text = String::from_utf8(message)?;
            let (issued, took) = text.split_once(' ').context("two numbers")?;
            operations = operations.max(issued.parse::<u64>()?);
            micros = micros.max(took.parse::<u64>()?);
        }
        it_comes_late(cx, scaling, seen.operations, &plain)?;

        let each = micros + LATE.as_micros() as u64 + 500;
        let stride = stride((operations * each).div_ceil(BUDGET.as_micros() as u64));
        let mut tried = 0;
        for (turn, late) in (0..operations).step_by(stride as usize).enumerate() {
            let mine = turn as u32 % cx.world() == cx.rank();
            let trial = if mine { Trial::new().late(late, LATE) } else { Trial::new() };
            let (bytes, now) = run(cx, scaling, trial);
            let verdict = match &bytes {
                Ok(_) if now.operations != seen.operations => {
                    format!("{} operations instead of {}", now.operations, seen.operations)
                }
                Ok(_) if mine && late < seen.operations && now.late.is_none() => {
                    "nothing came late".to_owned()
                }
                Ok(bytes) if *bytes == plain => String::new(),
                Ok(bytes) => format!("{} (byte {:?})", describe(&now), difference(bytes, &plain)),
                Err(error) => format!("{}: {error:#}", describe(&now)),
            };
            for (rank, verdict) in cx.exchange("verdict", verdict.as_bytes())?.iter().enumerate() {
                let verdict = String::from_utf8_lossy(verdict);
                ensure!(
                    verdict.is_empty(),
                    "{name}: operation {late} of {operations} late on rank {}: other bytes on rank {rank}: {verdict}",
                    turn as u32 % cx.world()
                );
            }
            tried += 1;
        }
        if cx.rank() == 0 {
            println!(
                "{name}, world {}: {tried} of {operations} operations came {LATE:?} late in ten steps, one at a time: the same {} bytes every time ({:.1} ms a run)",
                cx.world(),
                plain.len(),
                took.as_secs_f64() * 1e3
            );
        }
        if cx.world() == 1 {
            missing_waits(cx, scaling, name, &seen, &plain)?;
        }
    }
    Ok(())
}

/// Number of the first byte that differs.
fn difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a.len() != b.len() { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
}

fn describe(seen: &Seen) -> String {
    seen.late.clone().unwrap_or_else(|| "nothing late here".to_owned())
}

/// At least `least`, and without a factor in common with the steps' ten or the layers' three, so that
/// the operations tried fall on every place of a step.
fn stride(least: u64) -> u64 {
    (least.max(1)..).find(|n| [2, 3, 5].iter().all(|factor| n % factor != 0)).unwrap_or(1)
}

/// A run with a long delay in its midst takes at least that long: the delay is no mere claim.
fn it_comes_late(
    cx: &Context<Cuda>,
    scaling: Scaling,
    operations: u64,
    plain: &[u8],
) -> anyhow::Result<()> {
    let late = Duration::from_millis(150);
    let start = Instant::now();
    let (bytes, seen) = run(cx, scaling, Trial::new().late(operations / 2, late));
    let took = start.elapsed();
    ensure!(bytes? == plain, "other bytes with {} {late:?} late", describe(&seen));
    ensure!(
        took >= late,
        "{} was to come {late:?} late, but the run took {took:?}",
        describe(&seen)
    );
    Ok(())
}

/// Leaves out each wait in turn and looks for an operation whose delay then shows: whether this test
/// can fail. Some waits order what is too far apart in time to be seen in this way; the CPU backend's
/// checker sees all.
fn missing_waits(
    cx: &Context<Cuda>,
    scaling: Scaling,
    name: &str,
    plain: &Seen,
    expected: &[u8],
) -> anyhow::Result<()> {
    let mut vital = false;
    // Two steps' worth, from the third on.
    let span = plain.operations / 5;
    for &wait in &plain.waits {
        let until = Instant::now() + SEARCH / plain.waits.len() as u32;
        let mut found = None;
        let mut tried = 0;
        for late in (plain.operations * 3 / 10..).take(span as usize) {
            if Instant::now() >= until {
                break;
            }
            tried += 1;
            let (bytes, seen) = run(cx, scaling, Trial::new().late(late, LATE).without_wait(wait));
            match bytes {
                Ok(bytes) if bytes == expected => {}
                Ok(_) => found = Some(format!("other bytes with {}", describe(&seen))),
                Err(error) => found = Some(format!("{error:#} with {}", describe(&seen))),
            }
            if found.is_some() {
                break;
            }
        }
        vital |= wait == VITAL && found.is_some();
        match found {
            Some(found) => println!("{name}, without `{wait}`: seen at try {tried}: {found}"),
            None => println!("{name}, without `{wait}`: not seen in {tried} tries"),
        }
    }
    // Under delayed scaling the optimizer makes the bytes, on the stream that also reads them.
    if scaling == Scaling::Dynamic && !vital {
        bail!("nothing shows that `{VITAL}` is missing: this test cannot fail");
    }
    // The device goes on unharmed.
    let (bytes, _) = run(cx, scaling, Trial::new());
    ensure!(bytes? == expected, "other bytes after the search");
    Ok(())
}

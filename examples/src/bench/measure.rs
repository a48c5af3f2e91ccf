//! Timing a row against a copy.

use std::time::Duration;

use anyhow::Result;

/// Something that can be run again and again on memory of its own.
pub trait Row {
    /// Untimed, before every run.
    ///
    /// # Errors
    /// A failure of a device.
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }

    /// Runs once and returns how long that took.
    ///
    /// # Errors
    /// A failure of a device.
    fn run(&mut self) -> Result<Duration>;
}

/// Seconds of every run, in order: of the row, and of the copy before each.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// The row's.
    pub row: Vec<f64>,
    /// The copy's.
    pub copy: Vec<f64>,
}

/// Copy and row in turn, after one run of each that does not count.
pub(super) fn measure(row: &mut dyn Row, copy: &mut dyn Row, repeats: u32) -> Result<Samples> {
    let mut samples = Samples::default();
    for repeat in 0..=repeats {
        copy.prepare()?;
        let copied = copy.run()?;
        row.prepare()?;
        let ran = row.run()?;
        if repeat > 0 {
            samples.copy.push(copied.as_secs_f64());
            samples.row.push(ran.as_secs_f64());
        }
    }
    Ok(samples)
}

/// The value in the middle; of an even number, the larger of the two there.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

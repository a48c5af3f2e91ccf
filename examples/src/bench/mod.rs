//! How fast the passes are, next to a copy of the same size in the same minute.
//!
//! Every row works on at least [`Settings::size`] bytes of memory and is run
//! [`Settings::repeats`] times, each time right after a copy, so that both see the same machine:
//! other programs' load falls on both. Times are medians, and a row's ratio is its rate over the
//! copy's. Rates count every byte that a pass must read and every byte that it must write; a copy
//! reads and writes each byte once. No datum is subnormal, which some processors take long over.
//!
//! Rows come in groups of one implementation and one number of threads. A device's group is made by
//! [`device::group`] from nothing but its [`Backend`](gather8_kernels::Backend) and a clock; so are
//! rows over a whole [`model`], and the [`gather`] of units over a communicator.

#[cfg(feature = "cuda")]
pub mod cuda;
mod data;
pub mod device;
pub mod gather;
pub mod host;
mod machine;
mod measure;
pub mod model;
mod report;
mod select;
pub mod step;

use anyhow::{Context, Result};

pub use machine::Machine;
pub use measure::{Row, Samples};
pub use report::{Figure, Gpu, Measured, Report, SCHEMA, Settings};
pub use select::Selection;

/// One pass of a group, made when its turn comes: its memory is free again before the next.
pub struct Entry<'a> {
    /// The pass, such as `cast-e4m3`.
    pub pass: &'static str,
    /// Elements of every tensor of the row.
    pub elements: u64,
    /// Bytes that must be read and written per element.
    pub bytes_per_element: u64,
    /// Allocates and fills.
    pub make: Box<dyn Fn() -> Result<Box<dyn Row>> + 'a>,
}

/// Rows that are compared with one copy.
pub struct Group<'a> {
    /// What runs the passes, such as `fast` or `cpu`.
    pub implementation: &'static str,
    /// Threads that share a pass.
    pub threads: usize,
    /// The copy.
    pub copy: Entry<'a>,
    /// The passes, without the copy.
    pub entries: Vec<Entry<'a>>,
}

impl Group<'_> {
    /// All of its passes, the copy first.
    pub fn passes(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.copy.pass).chain(self.entries.iter().map(|entry| entry.pass))
    }
}

/// Measures the chosen rows; `done` gets each as soon as it is there.
///
/// # Errors
/// Memory that is not there, a failure of a device.
pub fn run(
    groups: &[Group<'_>],
    selection: &Selection,
    settings: Settings,
    mut done: impl FnMut(&Measured),
) -> Result<Vec<Measured>> {
    let mut results = Vec::new();
    for group in groups {
        let chosen = |entry: &&Entry<'_>| selection.chooses(group.implementation, entry.pass);
        let entries: Vec<_> =
            std::iter::once(&group.copy).chain(&group.entries).filter(chosen).collect();
        if entries.is_empty() {
            continue;
        }
        let mut copy = (group.copy.make)().context("cannot set up the copy")?;
        for entry in entries {
            let mut row =
                (entry.make)().with_context(|| format!("cannot set up {}", entry.pass))?;
            let samples = measure::measure(&mut *row, &mut *copy, settings.repeats)?;
            let result = Measured::new(group, entry, &samples);
            done(&result);
            results.push(result);
        }
    }
    Ok(results)
}

//! Results, as a table for people and as JSON for programs.

use std::fmt;

use serde::Serialize;

use super::gather::Gathered;
use super::measure::{Samples, median};
use super::{Entry, Group, Machine};

/// The JSON's version; it changes when a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// How rows are measured.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Settings {
    /// Bytes of memory that every row works on at least.
    pub size: u64,
    /// Runs of each row that count.
    pub repeats: u32,
}

/// The whole JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// When, in UTC, RFC 3339.
    pub date: String,
    /// The command line.
    pub command: Vec<String>,
    /// The program's version.
    pub version: &'static str,
    /// False if it was built without optimisation, and the numbers mean nothing.
    pub optimised: bool,
    /// Where.
    pub machine: Machine,
    /// How.
    pub settings: Settings,
    /// The GPU, if one was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// The numbers.
    pub rows: Vec<Measured>,
    /// Gathers of whole units.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gathers: Vec<Gathered>,
    /// Numbers that are no rates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<Figure>,
}

/// A GPU and its software.
#[derive(Clone, Debug, Serialize)]
pub struct Gpu {
    /// The product.
    pub name: String,
    /// The compute capability, times ten.
    pub architecture: u32,
    /// The driver's version; empty if the system does not tell.
    pub driver: String,
    /// The CUDA version that the driver serves.
    pub cuda: String,
    /// NCCL's version, if it was used.
    pub nccl: Option<String>,
    /// GPUs that the program sees.
    pub visible: usize,
    /// Ranks that took part.
    pub ranks: u32,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, architecture, driver, cuda, visible, ranks, .. } = self;
        write!(
            f,
            "{name} (sm_{architecture}), {visible} visible, {ranks} ranks, driver {driver}, CUDA {cuda}"
        )?;
        self.nccl.as_ref().map_or(Ok(()), |nccl| write!(f, ", NCCL {nccl}"))
    }
}

/// A number that is no rate.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// What.
    pub what: String,
    /// Its unit.
    pub unit: &'static str,
    /// The number, or the median of several.
    pub value: f64,
    /// The smallest of them.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Figure {
    /// One number.
    pub(super) fn once(what: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self::of(what, unit, &[value])
    }

    /// The median of several.
    pub(super) fn of(what: impl Into<String>, unit: &'static str, values: &[f64]) -> Self {
        Self {
            what: what.into(),
            unit,
            value: median(values),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {:.1} {} ({:.1} to {:.1})",
            self.what, self.value, self.unit, self.min, self.max
        )
    }
}

/// One row.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// What ran it.
    pub implementation: &'static str,
    /// What ran.
    pub pass: &'static str,
    /// Threads that shared it.
    pub threads: usize,
    /// Elements of every tensor.
    pub elements: u64,
    /// Bytes read and written per element.
    pub bytes_per_element: u64,
    /// Median time of a run.
    pub seconds: f64,
    /// Its fastest run.
    pub seconds_min: f64,
    /// Its slowest run.
    pub seconds_max: f64,
    /// 10^9 bytes read and written per second, at the median.
    pub gb_per_s: f64,
    /// The same of the copies between its runs.
    pub copy_gb_per_s: f64,
    /// `gb_per_s / copy_gb_per_s`.
    pub ratio: f64,
}

impl Measured {
    pub(super) fn new(group: &Group<'_>, entry: &Entry<'_>, samples: &Samples) -> Self {
        let rate = |entry: &Entry<'_>, seconds: f64| {
            (entry.elements * entry.bytes_per_element) as f64 / seconds / 1e9
        };
        let seconds = median(&samples.row);
        let gb_per_s = rate(entry, seconds);
        let copy_gb_per_s = rate(&group.copy, median(&samples.copy));
        Self {
            implementation: group.implementation,
            pass: entry.pass,
            threads: group.threads,
            elements: entry.elements,
            bytes_per_element: entry.bytes_per_element,
            seconds,
            seconds_min: samples.row.iter().copied().fold(f64::INFINITY, f64::min),
            seconds_max: samples.row.iter().copied().fold(0.0, f64::max),
            gb_per_s,
            copy_gb_per_s,
            ratio: gb_per_s / copy_gb_per_s,
        }
    }

    /// The table's head.
    pub fn head() -> String {
        format!(
            "{:<10} {:<21} {:>7} {:>12} {:>6} {:>9} {:>8} {:>8} {:>6}",
            "by", "pass", "threads", "elements", "B/elt", "ms", "GB/s", "copy", "ratio"
        )
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<10} {:<21} {:>7} {:>12} {:>6} {:>9.3} {:>8.2} {:>8.2} {:>6.3}",
            self.implementation,
            self.pass,
            self.threads,
            self.elements,
            self.bytes_per_element,
            self.seconds * 1e3,
            self.gb_per_s,
            self.copy_gb_per_s,
            self.ratio
        )
    }
}

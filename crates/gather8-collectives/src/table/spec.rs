//! What a table is made of: its settings, and what each slot describes.

use gather8_kernels::Format;
use gather8_kernels::job::AmaxAlgorithm;
use gather8_kernels::layout::slot_flags;
use gather8_kernels::scale::ScaleRule;
use serde::{Deserialize, Serialize};

/// How amaxes become scales, for the whole table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawConfig")]
#[non_exhaustive]
pub struct TableConfig {
    /// Entries in a slot's ring, 1 to 1024.
    pub history: u32,
    /// How a delayed scale comes from the ring.
    pub algorithm: AmaxAlgorithm,
    /// Margin and power-of-two option.
    pub rule: ScaleRule,
}

impl TableConfig {
    /// The longest ring.
    pub const MAX_HISTORY: u32 = 1024;

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`gather8_kernels::Error::OutOfRange`] for a history outside 1 to 1024 or a margin above 32.
    pub fn check(&self) -> gather8_kernels::Result<()> {
        if !(1..=Self::MAX_HISTORY).contains(&self.history) {
            return Err(gather8_kernels::Error::OutOfRange {
                name: "history",
                range: "1 to 1024",
                value: self.history.to_string(),
            });
        }
        self.rule.check()
    }
}

impl Default for TableConfig {
    /// 16 entries, the largest of them, no margin, any scale.
    fn default() -> Self {
        Self { history: 16, algorithm: AmaxAlgorithm::Max, rule: ScaleRule::default() }
    }
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawConfig {
    history: u32,
    algorithm: AmaxAlgorithm,
    rule: ScaleRule,
}

impl Default for RawConfig {
    fn default() -> Self {
        let TableConfig { history, algorithm, rule } = TableConfig::default();
        Self { history, algorithm, rule }
    }
}

impl TryFrom<RawConfig> for TableConfig {
    type Error = gather8_kernels::Error;

    fn try_from(raw: RawConfig) -> gather8_kernels::Result<Self> {
        let config = Self { history: raw.history, algorithm: raw.algorithm, rule: raw.rule };
        config.check()?;
        Ok(config)
    }
}

/// What a slot describes; decides what a non-finite amax does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotKind {
    /// A weight: a non-finite amax is fatal.
    Weight,
    /// A layer's input: a non-finite amax is counted and kept out.
    Input,
    /// A layer's output gradient: as inputs.
    Gradient,
}

/// One slot of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSpec {
    /// The name in errors; each once in a table.
    pub name: String,
    /// What it describes.
    pub kind: SlotKind,
    /// The format that the scale is for.
    pub format: Format,
    /// Whether the scale comes from the ring (delayed) or from the amax at hand (dynamic).
    pub delayed: bool,
}

impl SlotSpec {
    /// The flags of its record, without [`SEED`](slot_flags::SEED).
    pub(super) fn flags(&self) -> u32 {
        let kind = match self.kind {
            SlotKind::Weight => 0,
            SlotKind::Input => slot_flags::INPUT,
            SlotKind::Gradient => slot_flags::GRADIENT,
        };
        let format = match self.format {
            Format::E4m3 => 0,
            Format::E5m2 => slot_flags::E5M2,
        };
        kind | format | if self.delayed { slot_flags::DELAYED } else { 0 }
    }
}

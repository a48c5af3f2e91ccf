//! From an amax to a scale.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::Format;

/// The smallest amax that a scale is formed from. torchao uses the same value.
pub const AMAX_EPSILON: f64 = 1e-12;

/// How an amax becomes a scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScaleRule {
    /// Powers of two of head room, 0 to 32: the scale is divided by 2^margin.
    pub margin: u32,
    /// Round the scale down to a power of two by clearing its mantissa bits.
    pub power_of_two: bool,
}

impl ScaleRule {
    /// The largest margin.
    pub const MAX_MARGIN: u32 = 32;

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a margin above 32.
    pub fn check(&self) -> Result<()> {
        if self.margin > Self::MAX_MARGIN {
            return Err(Error::OutOfRange {
                name: "margin",
                range: "0 to 32",
                value: self.margin.to_string(),
            });
        }
        Ok(())
    }

    /// `max / max(amax, 1e-12) * 2^-margin` in f64, rounded to f32, clamped to the normal range,
    /// then truncated to a power of two if asked.
    ///
    /// # Errors
    /// [`Error::NonFiniteAmax`] for NaN and infinity; [`Error::OutOfRange`] for the margin.
    pub fn scale(&self, format: Format, amax: f32) -> Result<f32> {
        self.check()?;
        if !amax.is_finite() {
            return Err(Error::NonFiniteAmax { amax });
        }
        Ok(self.scale_of_finite(format, amax))
    }

    /// [`scale`](Self::scale) where the caller has ruled the errors out.
    pub(crate) fn scale_of_finite(&self, format: Format, amax: f32) -> f32 {
        let head_room = f64::from_bits(u64::from(1023 - self.margin.min(Self::MAX_MARGIN)) << 52);
        let exact = f64::from(format.max()) / f64::from(amax.abs()).max(AMAX_EPSILON) * head_room;
        let scale = (exact as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
        if self.power_of_two { f32::from_bits(scale.to_bits() & 0x7f80_0000) } else { scale }
    }
}

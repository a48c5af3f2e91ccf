//! The two float8 formats, and the element types that shards are stored in.

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

/// The type of a tensor's elements as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The lower-case name: `bf16`, `f16`, `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}

/// A float8 format of the OCP 8-bit floating point specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// 4 exponent bits, 3 mantissa bits, no infinities ("fn"); largest value 448.
    #[default]
    E4m3,
    /// 5 exponent bits, 2 mantissa bits, with infinities; largest finite value 57344.
    E5m2,
}

impl Format {
    /// The largest finite value: 448 or 57344.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// The magnitude above which a scaled value counts as saturated: the midpoint between the
    /// largest value and the next that the exponent could have held (464 or 61440).
    pub const fn saturation_bound(self) -> f32 {
        match self {
            Self::E4m3 => 464.0,
            Self::E5m2 => 61440.0,
        }
    }

    /// The lower-case name: `e4m3` or `e5m2`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
        }
    }

    /// Encodes one value that has already been scaled: clamped to the largest value (infinities
    /// too), rounded to nearest even, subnormals and the sign of zero kept, every NaN to 0x7f.
    pub const fn encode(self, x: f32) -> u8 {
        match self {
            Self::E4m3 => encode::<3, 7>(x, 0x7e),
            Self::E5m2 => encode::<2, 15>(x, 0x7b),
        }
    }

    /// Decodes one code. E5M2's infinities decode to infinities, although
    /// [`encode`](Self::encode) never makes them; NaN codes to the canonical f32 NaN.
    pub const fn decode(self, code: u8) -> f32 {
        match self {
            Self::E4m3 => decode::<3, 7>(code, false),
            Self::E5m2 => decode::<2, 15>(code, true),
        }
    }
}

/// Rounds to `M` mantissa bits with exponent bias `BIAS`, saturating at the code `max`.
const fn encode<const M: u32, const BIAS: i32>(x: f32, max: u8) -> u8 {
    let bits = x.to_bits();
    let sign = ((bits >> 24) & 0x80) as u8;
    let abs = bits & 0x7fff_ffff;
    if abs > 0x7f80_0000 {
        return 0x7f;
    }
    let exponent = (abs >> 23) as i32 - 127;
    // How many low bits of the 24-bit significand fall away: more below the smallest normal.
    let below = (1 - BIAS) - exponent;
    let drop = 23 - M as i32 + if below > 0 { below } else { 0 };
    if drop > 24 || exponent < -126 {
        // Less than half of the smallest subnormal.
        return sign;
    }
    let significand = (abs & 0x007f_ffff) | 0x0080_0000;
    let drop = drop as u32;
    let kept = significand >> drop;
    let rest = significand & ((1 << drop) - 1);
    let half = 1 << (drop - 1);
    let rounded = kept + (rest > half || (rest == half && kept & 1 == 1)) as u32;
    // A carry out of the mantissa lands in the exponent, which is where it belongs.
    let code =
        if below > 0 { rounded } else { (((exponent + BIAS) as u32) << M) + rounded - (1 << M) };
    sign | if code > max as u32 { max } else { code as u8 }
}

const fn decode<const M: u32, const BIAS: i32>(code: u8, infinities: bool) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let sign = ((code & 0x80) as u32) << 24;
    let mantissa = magnitude & ((1 << M) - 1);
    let exponent = (magnitude >> M) as i32;
    let top = 0x7f >> M;
    if infinities && exponent == top {
        return if mantissa == 0 {
            f32::from_bits(sign | 0x7f80_0000)
        } else {
            f32::from_bits(crate::scalar::CANONICAL_NAN)
        };
    }
    if !infinities && magnitude == 0x7f {
        return f32::from_bits(crate::scalar::CANONICAL_NAN);
    }
    if exponent == 0 {
        // Exact: a small integer times a power of two.
        let unit = f32::from_bits(((127 + 1 - BIAS - M as i32) as u32) << 23);
        let value = mantissa as f32 * unit;
        return f32::from_bits(value.to_bits() | sign);
    }
    f32::from_bits(sign | (((exponent + 127 - BIAS) as u32) << 23) | (mantissa << (23 - M)))
}

macro_rules! float8 {
    ($(#[$doc:meta])* $name:ident, $format:expr) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
        pub struct $name(pub u8);

        impl $name {
            /// Saturating, nearest even; see [`Format::encode`].
            pub const fn from_f32(x: f32) -> Self {
                Self($format.encode(x))
            }

            /// Exact; see [`Format::decode`].
            pub const fn to_f32(self) -> f32 {
                $format.decode(self.0)
            }

            /// True for the two NaN codes of E4M3, the six of E5M2.
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }
    };
}

float8!(
    /// One E4M3 code (OCP "fn": no infinities). Equality compares codes, not values.
    E4M3,
    Format::E4m3
);
float8!(
    /// One E5M2 code. Equality compares codes, not values.
    E5M2,
    Format::E5m2
);

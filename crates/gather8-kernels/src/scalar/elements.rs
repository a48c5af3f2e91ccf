//! Elements as they are stored, and their way to f32 and back.

/// The only f32 NaN that is ever stored.
pub const CANONICAL_NAN: u32 = 0x7fc0_0000;
/// The only bf16 NaN that is ever stored.
pub const CANONICAL_BF16_NAN: u16 = 0x7fc0;
/// The only f16 NaN that is ever stored.
pub const CANONICAL_F16_NAN: u16 = 0x7e00;

/// The value itself, or the canonical NaN for any NaN. Processors make different NaNs from 0/0
/// (x86 sets the sign, CUDA sets every mantissa bit), so none is stored as it comes.
#[inline(always)]
pub const fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(CANONICAL_NAN) } else { x }
}

/// Exact: a bf16 is the high half of an f32.
#[inline(always)]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Nearest even; overflow to infinity; every NaN to 0x7fc0.
#[inline(always)]
pub const fn f32_to_bf16(x: f32) -> u16 {
    if x.is_nan() {
        return CANONICAL_BF16_NAN;
    }
    let bits = x.to_bits();
    // Half a unit less one, plus one if the kept part is odd: carries exactly when the rest is
    // above half, or is half and the kept part odd. The sum cannot wrap: x is no NaN.
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Exact.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

/// Nearest even; overflow to infinity; every NaN to 0x7e00.
pub fn f32_to_f16(x: f32) -> u16 {
    if x.is_nan() { CANONICAL_F16_NAN } else { half::f16::from_f32(x).to_bits() }
}

/// A tensor's elements, to read. BF16 and F16 as their bits.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// bfloat16 bits.
    Bf16(&'a [u16]),
    /// IEEE half-precision bits.
    F16(&'a [u16]),
    /// Single precision.
    F32(&'a [f32]),
}

impl<'a> Elements<'a> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Self::Bf16(bits) | Self::F16(bits) => bits.len(),
            Self::F32(values) => values.len(),
        }
    }

    /// True without elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of element `i`, exactly.
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    #[allow(clippy::indexing_slicing, reason = "an index, as documented")]
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Self::Bf16(bits) => bf16_to_f32(bits[i]),
            Self::F16(bits) => f16_to_f32(bits[i]),
            Self::F32(values) => values[i],
        }
    }

    /// The values in order.
    pub fn iter(self) -> impl Iterator<Item = f32> + use<'a> {
        (0..self.len()).map(move |i| self.get(i))
    }

    /// The first `mid` elements and the rest.
    ///
    /// # Panics
    /// If there are fewer than `mid`.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Bf16(bits) => {
                let (a, b) = bits.split_at(mid);
                (Self::Bf16(a), Self::Bf16(b))
            }
            Self::F16(bits) => {
                let (a, b) = bits.split_at(mid);
                (Self::F16(a), Self::F16(b))
            }
            Self::F32(values) => {
                let (a, b) = values.split_at(mid);
                (Self::F32(a), Self::F32(b))
            }
        }
    }
}

/// A tensor's elements, to read and write.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// bfloat16 bits.
    Bf16(&'a mut [u16]),
    /// IEEE half-precision bits.
    F16(&'a mut [u16]),
    /// Single precision.
    F32(&'a mut [f32]),
}

impl<'a> ElementsMut<'a> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Self::Bf16(bits) | Self::F16(bits) => bits.len(),
            Self::F32(values) => values.len(),
        }
    }

    /// True without elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same elements, to read.
    pub const fn as_elements(&self) -> Elements<'_> {
        match self {
            Self::Bf16(bits) => Elements::Bf16(bits),
            Self::F16(bits) => Elements::F16(bits),
            Self::F32(values) => Elements::F32(values),
        }
    }

    /// The same elements, borrowed for less long.
    pub const fn reborrow(&mut self) -> ElementsMut<'_> {
        match self {
            Self::Bf16(bits) => ElementsMut::Bf16(bits),
            Self::F16(bits) => ElementsMut::F16(bits),
            Self::F32(values) => ElementsMut::F32(values),
        }
    }

    /// The value of element `i`, exactly.
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    pub fn get(&self, i: usize) -> f32 {
        self.as_elements().get(i)
    }

    /// Stores a value: to nearest even in the element's type, every NaN as the canonical one.
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    #[allow(clippy::indexing_slicing, reason = "an index, as documented")]
    pub fn set(&mut self, i: usize, value: f32) {
        match self {
            Self::Bf16(bits) => bits[i] = f32_to_bf16(value),
            Self::F16(bits) => bits[i] = f32_to_f16(value),
            Self::F32(values) => values[i] = canonical(value),
        }
    }

    /// The first `mid` elements and the rest.
    ///
    /// # Panics
    /// If there are fewer than `mid`.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Bf16(bits) => {
                let (a, b) = bits.split_at_mut(mid);
                (Self::Bf16(a), Self::Bf16(b))
            }
            Self::F16(bits) => {
                let (a, b) = bits.split_at_mut(mid);
                (Self::F16(a), Self::F16(b))
            }
            Self::F32(values) => {
                let (a, b) = values.split_at_mut(mid);
                (Self::F32(a), Self::F32(b))
            }
        }
    }
}

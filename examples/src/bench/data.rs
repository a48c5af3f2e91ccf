//! Values to measure on: normal numbers of both signs, whatever the seed.

/// Bits of normal f32 values with an exponent in a range; reproducible.
struct Generator {
    state: u64,
    exponents: std::ops::Range<u32>,
    signed: bool,
}

impl Generator {
    fn next(&mut self) -> u32 {
        // Marsaglia's xorshift64.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let random = (self.state >> 32) as u32;
        let span = self.exponents.end - self.exponents.start;
        let exponent = self.exponents.start + (self.state as u32 & 0xffff) * span / 0x1_0000;
        let sign = if self.signed { random & 0x8000_0000 } else { 0 };
        sign | (exponent << 23) | (random & 0x007f_ffff)
    }
}

/// What a tensor holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content {
    /// Magnitudes from 2^-7 to 1.
    Weight,
    /// Magnitudes from 2^-14 to 2^-7.
    Gradient,
    /// The square of such a gradient: positive, 2^-28 to 2^-14.
    Square,
}

impl Content {
    fn generator(self, seed: u64) -> Generator {
        let (exponents, signed) = match self {
            Self::Weight => (120..127, true),
            Self::Gradient => (113..120, true),
            Self::Square => (99..113, false),
        };
        Generator { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, exponents, signed }
    }

    /// Single precision.
    pub(super) fn f32(self, elements: usize) -> Vec<f32> {
        let mut generator = self.generator(1);
        (0..elements).map(|_| f32::from_bits(generator.next())).collect()
    }

    /// BF16 bits.
    pub(super) fn bf16(self, elements: usize) -> Vec<u16> {
        let mut generator = self.generator(2);
        (0..elements).map(|_| (generator.next() >> 16) as u16).collect()
    }
}

//! Numbers that depend on a seed, a name and a counter, and on nothing else.
//!
//! Neither the number of ranks, nor the order of calls, nor the platform's mathematics library changes
//! a value: weights and batches are the same for every world.

/// A stream of numbers, addressed by position: SplitMix64 (Steele, Lea and Flood, 2014) from a start
/// that blake3 derives of a seed and a name.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    start: u64,
}

impl Stream {
    /// The stream of `name` under `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        let mut start = [0; 8];
        hasher.finalize_xof().fill(&mut start);
        Self { start: u64::from_le_bytes(start) }
    }

    /// 64 bits at `position`.
    pub fn bits(self, position: u64) -> u64 {
        let state =
            self.start.wrapping_add(position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `bound` - 1 at `position`; 0 when `bound` is 0.
    pub fn below(self, position: u64, bound: u64) -> u64 {
        // The high half of the 128-bit product; its bias is at most bound / 2^64.
        ((u128::from(self.bits(position)) * u128::from(bound)) >> 64) as u64
    }

    /// A number at `position` from the uniform distribution with mean 0 and the given standard
    /// deviation. Uniform, because it needs no function of the mathematics library.
    pub fn uniform(self, position: u64, deviation: f64) -> f32 {
        // 53 bits in [0, 1), then [-1, 1); such a uniform has variance 1/3.
        let unit = (self.bits(position) >> 11) as f64 / (1u64 << 53) as f64;
        ((2.0 * unit - 1.0) * 3f64.sqrt() * deviation) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_seed_name_and_position_alone() {
        let a = Stream::new(7, "weight");
        assert_eq!(a.bits(5), Stream::new(7, "weight").bits(5));
        assert_ne!(a.bits(5), a.bits(6));
        assert_ne!(a.bits(5), Stream::new(8, "weight").bits(5));
        assert_ne!(a.bits(5), Stream::new(7, "other").bits(5));
    }

    #[test]
    fn moments_are_those_asked_for() {
        let stream = Stream::new(1, "moments");
        let values: Vec<f64> = (0..100_000).map(|i| f64::from(stream.uniform(i, 0.5))).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        // Five standard errors of each estimate: 0.5 / sqrt(n), and 0.25 * sqrt(0.8 / n).
        assert!(mean.abs() < 8e-3, "{mean}");
        assert!((variance - 0.25).abs() < 3.6e-3, "{variance}");
    }

    #[test]
    fn below_covers_its_range() {
        let stream = Stream::new(3, "range");
        let mut seen = [false; 10];
        for position in 0..1000 {
            seen[stream.below(position, 10) as usize] = true;
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!(stream.below(0, 0), 0);
    }
}

//! The text that the example learns, byte by byte, and its batches.

use std::ops::Range;

use anyhow::{Result, bail};

use crate::random::Stream;

/// One token per byte value.
pub const VOCABULARY: usize = 256;

/// Moby-Dick, as `data/SOURCE` describes it.
pub const MOBY_DICK: &[u8] = include_bytes!("../data/moby-dick.txt");

/// Sequences of equal length: `tokens` and, one byte further on, `targets`, sequence by sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Bytes that the model reads, `sequences` x context.
    pub tokens: Vec<u8>,
    /// The byte that follows each of them.
    pub targets: Vec<u8>,
    /// How many sequences there are.
    pub sequences: usize,
}

/// A text cut into windows of `context` bytes.
#[derive(Debug, Clone, Copy)]
pub struct Windows<'a> {
    text: &'a [u8],
    context: usize,
    stream: Stream,
}

impl<'a> Windows<'a> {
    /// Windows of `context` bytes and the one that follows them, drawn with `seed`.
    ///
    /// # Errors
    /// A text that holds no such window.
    pub fn new(text: &'a [u8], context: usize, seed: u64) -> Result<Self> {
        if text.len() <= context {
            bail!(
                "the text has {} bytes, but a context of {context} needs at least {}: give a longer \
                 text or a shorter context",
                text.len(),
                context + 1
            );
        }
        Ok(Self { text, context, stream: Stream::new(seed, "batches") })
    }

    /// The given samples of a step. Sample `i` of step `t` is a function of (seed, t, i) alone, so
    /// ranks that take disjoint ranges train on the same global batch in every world.
    pub fn batch(&self, step: u64, samples: Range<usize>) -> Batch {
        let mut batch = Batch { tokens: Vec::new(), targets: Vec::new(), sequences: samples.len() };
        let starts = (self.text.len() - self.context) as u64;
        for sample in samples {
            // Steps lie 2^32 positions apart, more than any batch has samples.
            let position = (step << 32) + sample as u64;
            let start = self.stream.below(position, starts) as usize;
            let window = self.text.iter().skip(start).copied();
            batch.tokens.extend(window.clone().take(self.context));
            batch.targets.extend(window.skip(1).take(self.context));
        }
        batch
    }
}

/// Part `index` of `count` parts of `0..total` whose sizes differ by at most one.
pub fn share(total: usize, index: usize, count: usize) -> Range<usize> {
    total * index / count..total * (index + 1) / count
}

/// Entropy of the bytes taken one by one, in nats: what a model reaches that knows their frequencies
/// and nothing else.
pub fn unigram_entropy(text: &[u8]) -> f64 {
    let mut counts = [0u64; VOCABULARY];
    for &byte in text {
        if let Some(count) = counts.get_mut(usize::from(byte)) {
            *count += 1;
        }
    }
    let total = text.len() as f64;
    let share = |&count: &u64| count as f64 / total;
    counts.iter().filter(|&&count| count > 0).map(share).map(|p| -p * p.ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_the_one_described() {
        assert_eq!(MOBY_DICK.len(), 1_204_997);
        let source = include_str!("../data/SOURCE");
        let hash = blake3::hash(MOBY_DICK).to_string();
        assert!(source.contains(&hash), "data/SOURCE does not name {hash}");
        assert!((unigram_entropy(MOBY_DICK) - 3.137).abs() < 5e-4);
    }

    #[test]
    fn ranks_together_read_the_batch_of_one() {
        let windows = Windows::new(MOBY_DICK, 16, 42).unwrap();
        let whole = windows.batch(3, 0..7);
        for world in 1..=7 {
            let parts: Vec<Batch> =
                (0..world).map(|rank| windows.batch(3, share(7, rank, world))).collect();
            let tokens: Vec<u8> = parts.iter().flat_map(|part| part.tokens.clone()).collect();
            assert_eq!(tokens, whole.tokens, "world {world}");
        }
        assert_ne!(whole, windows.batch(4, 0..7));
    }

    #[test]
    fn targets_follow_tokens() {
        let windows = Windows::new(b"abcdefgh", 3, 1).unwrap();
        let batch = windows.batch(0, 0..50);
        assert!(
            batch.tokens.iter().zip(&batch.targets).all(|(token, target)| token + 1 == *target)
        );
        assert!(batch.targets.contains(&b'h'), "the last byte is never a target");
    }

    #[test]
    fn a_text_without_a_window_is_refused() {
        assert!(Windows::new(b"abc", 2, 1).is_ok());
        let error = Windows::new(b"abc", 3, 1).unwrap_err().to_string();
        assert!(error.contains("3 bytes") && error.contains("at least 4"), "{error}");
    }
}

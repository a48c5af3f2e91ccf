//! What a model consists of, as its trainer describes it.

use gather8_kernels::DType;
use serde::{Deserialize, Serialize};

use crate::config::{DEFAULT_GROUP, NO_DECAY_GROUP};
use crate::error::{Error, Result};

/// A weight's number, in the order in which the units were described.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WeightId(pub usize);

/// A unit's number, in the order of description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UnitId(pub usize);

/// One weight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WeightSpec {
    /// A name, unique in the model.
    pub name: String,
    /// Dimensions; the first is sharded.
    pub shape: Vec<u64>,
    /// How the shard is stored: BF16 or F32; F16 too if the weight is frozen.
    pub dtype: DType,
    /// Gathered in float8 (if the configuration says so too), or as stored.
    pub float8: bool,
    /// Its parameter group.
    pub group: String,
    /// False for a frozen weight: gathered, never changed, no optimizer state.
    pub trainable: bool,
}

impl WeightSpec {
    /// A BF16 weight that is gathered in float8, in the group `default`.
    pub fn float8(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            dtype: DType::Bf16,
            float8: true,
            group: DEFAULT_GROUP.into(),
            trainable: true,
        }
    }

    /// A weight that is gathered as it is stored, in the group `no_decay`: norms, biases,
    /// embeddings.
    pub fn plain(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> Self {
        Self { float8: false, group: NO_DECAY_GROUP.into(), ..Self::float8(name, shape) }
    }

    /// In another parameter group.
    pub fn in_group(mut self, group: impl Into<String>) -> Self {
        self.group = group.into();
        self
    }

    /// Never changed.
    pub fn frozen(mut self) -> Self {
        self.trainable = false;
        self
    }

    /// Stored in another type than BF16.
    pub fn stored_as(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Rows: the first dimension.
    pub fn rows(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements in one row.
    pub fn row_elements(&self) -> u64 {
        self.shape.iter().skip(1).fold(1, |product: u64, &n| product.saturating_mul(n))
    }

    /// Elements in the whole weight.
    pub fn elements(&self) -> u64 {
        self.rows().saturating_mul(self.row_elements())
    }

    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Weight { weight: self.name.clone(), problem });
        if self.shape.is_empty() || self.shape.contains(&0) {
            return refuse(format!(
                "shape {:?} needs at least one dimension, none of them 0",
                self.shape
            ));
        }
        let elements =
            self.shape.iter().try_fold(1u64, |product, &dimension| product.checked_mul(dimension));
        if elements.is_none_or(|elements| elements > 1 << 48) {
            return refuse(format!("shape {:?} has more than 2^48 elements", self.shape));
        }
        if self.trainable && !matches!(self.dtype, DType::Bf16 | DType::F32) {
            return refuse(format!(
                "trainable shards are stored in bf16 or f32, not {}: convert it, or freeze it",
                self.dtype.name()
            ));
        }
        Ok(())
    }
}

/// Weights that are gathered together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UnitSpec {
    /// A name, unique in the model.
    pub name: String,
    /// Its weights.
    pub weights: Vec<WeightSpec>,
    /// Stays gathered from its first use to the end of the backward pass, in a slot of its own:
    /// roots, tied embeddings.
    pub held: bool,
}

impl UnitSpec {
    /// A unit that is resharded after use.
    pub fn new(name: impl Into<String>, weights: impl Into<Vec<WeightSpec>>) -> Self {
        Self { name: name.into(), weights: weights.into(), held: false }
    }

    /// Held from its first use to the end of the backward pass.
    pub fn held(mut self) -> Self {
        self.held = true;
        self
    }
}

/// One rank's part of a weight: `ceil(rows / world)` rows, fewer or none on the last ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// Rows of the whole weight.
    pub rows: u64,
    /// Elements in a row.
    pub row_elements: u64,
    /// Ranks.
    pub world: u32,
    /// This rank.
    pub rank: u32,
}

impl Sharding {
    /// How `spec` is sharded.
    pub fn new(spec: &WeightSpec, world: u32, rank: u32) -> Self {
        Self { rows: spec.rows(), row_elements: spec.row_elements(), world, rank }
    }

    /// Rows per rank, padding included.
    pub fn padded_rows(&self) -> u64 {
        self.rows.div_ceil(u64::from(self.world).max(1))
    }

    /// The rows that this rank owns.
    pub fn range(&self) -> std::ops::Range<u64> {
        let first = self.padded_rows().saturating_mul(u64::from(self.rank)).min(self.rows);
        first..first.saturating_add(self.padded_rows()).min(self.rows)
    }

    /// Elements of this rank's shard without padding.
    pub fn elements(&self) -> u64 {
        let range = self.range();
        (range.end - range.start).saturating_mul(self.row_elements)
    }

    /// Elements of every rank's shard with padding.
    pub fn padded_elements(&self) -> u64 {
        self.padded_rows().saturating_mul(self.row_elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_frozen_weights_are_stored_in_f16() {
        let weight = WeightSpec::float8("w", [2, 3]).stored_as(DType::F16);
        let text = weight.check().unwrap_err().to_string();
        assert!(text.contains("`w`") && text.contains("bf16 or f32, not f16"), "{text}");
        weight.frozen().check().unwrap();
    }
}

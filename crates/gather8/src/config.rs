//! The one configuration: recipe, formats, optimizer. Serde-readable; unknown keys are errors.

use std::collections::BTreeMap;
use std::time::Duration;

use gather8_kernels::Format;
use gather8_kernels::job::AmaxAlgorithm;
use gather8_kernels::scale::ScaleRule;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Everything that decides numbers or traffic. Every rank must have the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// What travels, and through how much memory.
    pub gather: GatherConfig,
    /// How weights come by their scales.
    pub scaling: Scaling,
    /// Margin and power-of-two option of every scale.
    pub scale: ScaleRule,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// Seconds that peers may keep this rank waiting in one collective.
    pub deadline: Deadline,
}

/// Seconds, as a number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Deadline(pub f64);

impl Default for Deadline {
    fn default() -> Self {
        Self(60.0)
    }
}

impl Deadline {
    /// As a duration; what is none (negative, no number, too large), which [`Config::check`] refuses, is
    /// taken for the default.
    pub fn duration(self) -> Duration {
        Duration::try_from_secs_f64(self.0).unwrap_or(Duration::from_secs(60))
    }
}

/// What weights that ask for float8 are gathered as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GatherType {
    /// One byte per element, one scale per weight.
    #[default]
    Float8,
    /// The shards as they are: the baseline to compare with.
    Bf16,
}

/// The gather.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct GatherConfig {
    /// Float8, or BF16 for everything.
    pub dtype: GatherType,
    /// The float8 format.
    pub format: Format,
    /// Units that may be gathered at once, besides the held ones: 2 lets one be gathered while
    /// another computes.
    pub arena_slots: u32,
    /// Units gathered ahead of use; less than `arena_slots`.
    pub prefetch: u32,
    /// Units whose full gradients may be incomplete at once, besides the held ones: 2 lets one be
    /// filled while another is reduced. More for trainers that give gradients in an order of their
    /// own; each costs the full gradients of the largest unit, in f32.
    pub gradient_slots: u32,
    /// Count the values that saturate in casts (costs the optimizer's float8 output under delayed
    /// scaling: the bytes are then cast separately).
    pub count_saturated: bool,
}

impl Default for GatherConfig {
    fn default() -> Self {
        Self {
            dtype: GatherType::Float8,
            format: Format::E4m3,
            arena_slots: 2,
            prefetch: 1,
            gradient_slots: 2,
            count_saturated: false,
        }
    }
}

/// How a weight's scale follows its amax.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", from = "ScalingKeys")]
#[non_exhaustive]
pub enum Scaling {
    /// Version v is cast with the scale of its own amax.
    #[default]
    Dynamic,
    /// Version v is cast with the scale that the last sync before it published, from a ring of past
    /// amaxes.
    Delayed {
        /// Entries in the ring, 1 to 1024.
        history: u32,
        /// The largest entry or the newest.
        algorithm: AmaxAlgorithm,
    },
}

/// As files spell it. With braces, since serde lets a tag without fields pass any other key.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
enum ScalingKeys {
    Dynamic {},
    Delayed {
        #[serde(default = "default_history")]
        history: u32,
        #[serde(default)]
        algorithm: AmaxAlgorithm,
    },
}

impl From<ScalingKeys> for Scaling {
    fn from(keys: ScalingKeys) -> Self {
        match keys {
            ScalingKeys::Dynamic {} => Self::Dynamic,
            ScalingKeys::Delayed { history, algorithm } => Self::Delayed { history, algorithm },
        }
    }
}

const fn default_history() -> u32 {
    16
}

impl Scaling {
    /// Delayed scaling with 16 entries and their maximum.
    pub const fn delayed() -> Self {
        Self::Delayed { history: default_history(), algorithm: AmaxAlgorithm::Max }
    }

    /// True for delayed scaling.
    pub const fn is_delayed(self) -> bool {
        matches!(self, Self::Delayed { .. })
    }

    pub(crate) const fn ring(self) -> (u32, AmaxAlgorithm) {
        match self {
            Self::Dynamic => (1, AmaxAlgorithm::MostRecent),
            Self::Delayed { history, algorithm } => (history, algorithm),
        }
    }
}

/// Decoupled weight decay, or decay added to the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OptimizerMode {
    /// AdamW (Loshchilov and Hutter, 2019).
    #[default]
    Adamw,
    /// Adam (Kingma and Ba, 2015) with L2 regularisation.
    AdamL2,
}

/// How a BF16 weight keeps full precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MasterWeight {
    /// An F32 copy beside the BF16 weight (4 more bytes per parameter).
    #[default]
    F32,
    /// The low 16 bits beside the BF16 weight (2 more bytes per parameter), the same numbers.
    Remainder,
}

/// How moments are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum MomentType {
    /// 4 bytes each.
    #[default]
    F32,
    /// 2 bytes each. With b2 > 0.995 the second moment can no longer decay.
    Bf16,
}

/// The optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct OptimizerConfig {
    /// AdamW or Adam with L2.
    pub mode: OptimizerMode,
    /// Gradients are scaled down to this global norm; 0 for no clipping.
    pub max_grad_norm: f32,
    /// Skip a step in which any gradient holds a NaN or an infinity.
    pub skip_on_found_inf: bool,
    /// Parameter groups by name. Empty as it comes: [`group`](Self::group) says what `default` and
    /// `no_decay` are until an entry of that name replaces them.
    pub groups: BTreeMap<String, GroupConfig>,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            mode: OptimizerMode::Adamw,
            max_grad_norm: 1.0,
            skip_on_found_inf: true,
            groups: BTreeMap::new(),
        }
    }
}

/// The group of weights that name none.
pub const DEFAULT_GROUP: &str = "default";
/// The group of norms, biases and embeddings by convention: no weight decay.
pub const NO_DECAY_GROUP: &str = "no_decay";

impl OptimizerConfig {
    /// A group by name; `default` and `no_decay` exist even if the configuration names none.
    pub fn group(&self, name: &str) -> Option<GroupConfig> {
        match (self.groups.get(name), name) {
            (Some(group), _) => Some(group.clone()),
            (None, DEFAULT_GROUP) => Some(GroupConfig::default()),
            (None, NO_DECAY_GROUP) => {
                Some(GroupConfig { weight_decay: 0.0, ..self.group(DEFAULT_GROUP)? })
            }
            (None, _) => None,
        }
    }
}

/// One parameter group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct GroupConfig {
    /// Learning rate to start with; schedules change it through `Fsdp::set_lr`.
    pub lr: f32,
    /// Decay rates of the moments, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// How full precision is kept.
    pub master: MasterWeight,
    /// How moments are stored.
    pub moments: MomentType,
    /// Allow BF16 moments with b2 > 0.995 although the second moment then stalls.
    pub allow_stalling_moments: bool,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.95),
            eps: 1e-8,
            weight_decay: 0.1,
            master: MasterWeight::F32,
            moments: MomentType::F32,
            allow_stalling_moments: false,
        }
    }
}

impl Config {
    /// Checks every range.
    ///
    /// # Errors
    /// [`Error::Config`], one sentence that names the key.
    pub fn check(&self) -> Result<()> {
        let refuse = |text: String| Err(Error::Config(text));
        self.scale.check().map_err(|error| Error::Config(error.to_string()))?;
        if let Scaling::Delayed { history, .. } = self.scaling
            && !(1..=1024).contains(&history)
        {
            return refuse(format!("scaling.history must lie in 1 to 1024, not {history}"));
        }
        if !(1..=64).contains(&self.gather.arena_slots) {
            return refuse(format!(
                "gather.arena_slots must lie in 1 to 64, not {}",
                self.gather.arena_slots
            ));
        }
        if !(1..=64).contains(&self.gather.gradient_slots) {
            return refuse(format!(
                "gather.gradient_slots must lie in 1 to 64, not {}",
                self.gather.gradient_slots
            ));
        }
        if self.gather.prefetch >= self.gather.arena_slots {
            return refuse(format!(
                "gather.prefetch ({}) must be less than gather.arena_slots ({}): one slot holds the unit in use",
                self.gather.prefetch, self.gather.arena_slots
            ));
        }
        if !(self.deadline.0.is_finite() && self.deadline.0 > 0.0 && self.deadline.0 <= 86_400.0) {
            return refuse(format!(
                "deadline must be a number of seconds above 0 and at most 86400, not {}",
                self.deadline.0
            ));
        }
        let norm = self.optimizer.max_grad_norm;
        if !(norm.is_finite() && norm >= 0.0) {
            return refuse(format!(
                "optimizer.max_grad_norm must be 0 or a positive number, not {norm}"
            ));
        }
        for (name, group) in &self.optimizer.groups {
            group.check(name)?;
        }
        Ok(())
    }
}

impl GroupConfig {
    fn check(&self, name: &str) -> Result<()> {
        let refuse = |text: String| Err(Error::Config(format!("optimizer.groups.{name}.{text}")));
        if !(self.lr.is_finite() && self.lr >= 0.0) {
            return refuse(format!("lr must be 0 or a positive number, not {}", self.lr));
        }
        let (beta1, beta2) = self.betas;
        if !((0.0..1.0).contains(&beta1) && (0.0..1.0).contains(&beta2)) {
            return refuse(format!("betas must lie in [0, 1), not ({beta1}, {beta2})"));
        }
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            return refuse(format!("eps must be 0 or a positive number, not {}", self.eps));
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return refuse(format!(
                "weight_decay must be 0 or a positive number, not {}",
                self.weight_decay
            ));
        }
        if self.moments == MomentType::Bf16 && beta2 > 0.995 && !self.allow_stalling_moments {
            return refuse(format!(
                "moments = \"bf16\" cannot hold a second moment with b2 = {beta2}: above 0.995 a step's decay rounds to nothing; use f32, a smaller b2, or allow_stalling_moments = true"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_unknown_are_errors_everywhere() {
        let read = |text: &str| serde_json::from_str::<Config>(text).map_err(|e| e.to_string());
        for text in [
            r#"{"gathers": {}}"#,
            r#"{"gather": {"slots": 2}}"#,
            r#"{"scaling": {"kind": "dynamic", "history": 3}}"#,
            r#"{"scaling": {"kind": "delayed", "histroy": 3}}"#,
            r#"{"optimizer": {"groups": {"default": {"rate": 1.0}}}}"#,
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains("unknown field"), "{text}: {error}");
        }
        let scaling = |text: &str| read(&format!(r#"{{"scaling": {text}}}"#)).unwrap().scaling;
        assert_eq!(scaling(r#"{"kind": "dynamic"}"#), Scaling::Dynamic);
        assert_eq!(scaling(r#"{"kind": "delayed"}"#), Scaling::delayed());
        for kept in [Scaling::Dynamic, Scaling::delayed()] {
            assert_eq!(scaling(&serde_json::to_string(&kept).unwrap()), kept);
        }
    }
}

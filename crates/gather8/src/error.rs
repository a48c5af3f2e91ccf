//! One error enum for the crate.

use std::sync::Arc;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in sharded training. Every text says what, where, and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration value cannot be used.
    #[error("configuration: {0}")]
    Config(String),
    /// The model's description cannot be used.
    #[error("weight `{weight}`: {problem}")]
    Weight {
        /// The weight.
        weight: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// No weight has this id or name.
    #[error("there is no {what} {which}: the model has {known}")]
    Unknown {
        /// `weight` or `unit`.
        what: &'static str,
        /// The id or name asked for.
        which: String,
        /// How many there are, or their names.
        known: String,
    },
    /// The initial values could not be made.
    #[error("weight `{weight}`: its initial values: {source}")]
    Init {
        /// The weight.
        weight: String,
        /// What the closure said.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// Ranks were started with different models or configurations.
    #[error("the ranks were started differently: {difference}")]
    Disagreement {
        /// The first difference, naming both ranks.
        difference: String,
    },
    /// The weight changed and the ranks have not agreed on its new scale yet.
    #[error(
        "the float8 bytes of `{weight}` are of version {bytes}, the weight is of version {weight_version}: call sync() after step(), update() or mark_modified()"
    )]
    StaleBytes {
        /// The weight.
        weight: String,
        /// The bytes' version; 0 if there are none.
        bytes: u64,
        /// The weight's version.
        weight_version: u64,
    },
    /// The same for a weight that is gathered as stored.
    #[error(
        "weight `{weight}` was changed by step(), update() or mark_modified(), and the ranks have not come together since: call sync()"
    )]
    Unsynced {
        /// The weight.
        weight: String,
    },
    /// Two steps in a row.
    #[error(
        "step() was called twice without sync(): the amaxes of the first step were not exchanged; call sync() after every step()"
    )]
    StepWithoutSync,
    /// A step cannot be captured or replayed as things stand.
    #[error("capturing a step: {problem}")]
    Capture {
        /// Why, and what to do.
        problem: String,
    },
    /// A view outlived its unit's residence.
    #[error(
        "weight `{weight}` was used after unit `{unit}` was resharded: ask for the weight again"
    )]
    UsedAfterReshard {
        /// The weight.
        weight: String,
        /// Its unit.
        unit: String,
    },
    /// All slots of the arena are taken.
    #[error(
        "no arena slot is free for unit `{unit}`: {holders} hold them; reshard one, mark a unit that is used again and again as held, or raise gather.arena_slots"
    )]
    ArenaExhausted {
        /// Who asked.
        unit: String,
        /// Who holds the slots.
        holders: String,
    },
    /// More units' gradients are incomplete than there is memory for.
    #[error(
        "no gradient slot is free for unit `{unit}`: gradients of {holders} are still missing; give a unit's gradients before those of others, or raise gather.gradient_slots"
    )]
    GradientSlotsExhausted {
        /// Whose gradient came.
        unit: String,
        /// Who holds the slots.
        holders: String,
    },
    /// A trainable weight got no gradient.
    #[error(
        "weight `{weight}` of unit `{unit}` got {arrived} of {expected} gradients in this step: run its backward, or declare_unused() the unit on every rank"
    )]
    MissingGradient {
        /// The weight.
        weight: String,
        /// Its unit.
        unit: String,
        /// Gradients that arrived.
        arrived: u32,
        /// Gradients that the forward pass announced.
        expected: u32,
    },
    /// A call came at the wrong time.
    #[error("{call}: {problem}")]
    OutOfOrder {
        /// The call.
        call: &'static str,
        /// Why not now, and what to do.
        problem: String,
    },
    /// A slice has another length than it must have.
    #[error("weight `{weight}`: {what} must have {expected} elements, not {got}")]
    Length {
        /// The weight.
        weight: String,
        /// What was passed.
        what: &'static str,
        /// Its length.
        got: u64,
        /// The right one.
        expected: u64,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] gather8_collectives::Error),
}

/// Names that an error lists.
const NAMES_SHOWN: usize = 8;

impl From<gather8_kernels::Error> for Error {
    fn from(error: gather8_kernels::Error) -> Self {
        Self::Collective(gather8_collectives::Error::from_backend(error))
    }
}

impl Error {
    /// A name that nothing has, among these.
    pub(crate) fn unknown_name<'a>(
        what: &'static str,
        name: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> Self {
        let names = names.map(|name| format!("`{name}`")).collect::<Vec<_>>();
        let shown = names.get(..NAMES_SHOWN).unwrap_or(&names).join(", ");
        let known = match names.len() {
            0 => "none".to_owned(),
            count if count > NAMES_SHOWN => format!("{count}: {shown}, ..."),
            _ => shown,
        };
        Self::Unknown { what, which: format!("`{name}`"), known }
    }

    /// A number that nothing has, among so many.
    pub(crate) fn unknown_number(what: &'static str, number: usize, count: usize) -> Self {
        Self::Unknown { what, which: format!("number {number}"), known: count.to_string() }
    }

    /// The rank that the error blames, if it blames one.
    pub fn blamed_rank(&self) -> Option<u32> {
        match self {
            Self::Collective(error) => error.blamed_rank(),
            _ => None,
        }
    }
}

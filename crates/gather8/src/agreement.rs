//! Before the first step every rank says what it was given; the first difference is the error.

use std::time::Duration;

use gather8_collectives::table::SlotSpec;
use gather8_collectives::{Communicator, Op};
use gather8_kernels::Backend;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::spec::UnitSpec;

/// One line per thing that must be the same on every rank.
fn describe(config: &Config, units: &[UnitSpec]) -> Vec<String> {
    let mut lines = vec![
        format!("gather8 version {}", env!("CARGO_PKG_VERSION")),
        format!("gather.dtype = {:?}", config.gather.dtype),
        format!("gather.format = {}", config.gather.format.name()),
        format!("gather.arena_slots = {}", config.gather.arena_slots),
        format!("gather.prefetch = {}", config.gather.prefetch),
        format!("gather.gradient_slots = {}", config.gather.gradient_slots),
        format!("gather.count_saturated = {}", config.gather.count_saturated),
        format!("scaling: {:?} with {:?}", config.scaling, config.scale),
        format!("deadline: {:?} s", config.deadline.0),
        format!(
            "optimizer: {:?}, clipping at {:?}, skipping on found-inf: {}",
            config.optimizer.mode,
            config.optimizer.max_grad_norm,
            config.optimizer.skip_on_found_inf
        ),
    ];
    for (name, group) in &config.optimizer.groups {
        lines.push(format!("parameter group `{name}`: {group:?}"));
    }
    for unit in units {
        let held = if unit.held { " (held)" } else { "" };
        lines.push(format!("unit `{}`{held} of {} weights", unit.name, unit.weights.len()));
        for weight in &unit.weights {
            let recipe = if weight.float8 { "float8" } else { "as stored" };
            let trainable = if weight.trainable { "trainable" } else { "frozen" };
            lines.push(format!(
                "weight `{}` {:?} {} gathered {recipe}, group `{}`, {trainable}",
                weight.name,
                weight.shape,
                weight.dtype.name(),
                weight.group
            ));
        }
    }
    lines
}

/// A digest of configuration and model: equal on every rank of a run.
pub fn digest(config: &Config, units: &[UnitSpec]) -> String {
    blake3::hash(describe(config, units).join("\n").as_bytes()).to_hex().to_string()
}

/// Compares configuration, model and the slots of activations.
pub(crate) fn check<B: Backend>(
    communicator: &dyn Communicator<B>,
    op: Op<'_>,
    config: &Config,
    units: &[UnitSpec],
    activations: &[SlotSpec],
) -> Result<()> {
    let mut lines = describe(config, units);
    lines.extend(activations.iter().map(|slot| {
        let (name, kind, format) = (&slot.name, slot.kind, slot.format.name());
        format!("amax slot `{name}`: {kind:?} in {format}")
    }));
    compare(communicator, op, &lines)
}

/// Compares what a trainer adds of its own (seed, data, batch size) in the same way: one line per
/// thing that must be the same on every rank. Every rank calls it; all get the same verdict.
///
/// # Errors
/// [`Error::Disagreement`] with the first line that differs; a failure of the communicator.
pub fn agree<B: Backend>(
    communicator: &dyn Communicator<B>,
    deadline: Duration,
    lines: &[String],
) -> Result<()> {
    compare(communicator, Op { sequence: 0, name: "agreement", unit: "settings", deadline }, lines)
}

/// Exchanges digests, and on a difference the lines themselves.
fn compare<B: Backend>(
    communicator: &dyn Communicator<B>,
    op: Op<'_>,
    lines: &[String],
) -> Result<()> {
    let own = blake3::hash(lines.join("\n").as_bytes()).to_hex().to_string();
    let digests = communicator.exchange(op, own.as_bytes())?;
    if digests.iter().all(|other| *other == own.as_bytes()) {
        return Ok(());
    }
    let again = Op { sequence: op.sequence + 1, ..op };
    let texts = communicator.exchange(again, lines.join("\n").as_bytes())?;
    Err(Error::Disagreement { difference: first_difference(&texts) })
}

fn first_difference(texts: &[Vec<u8>]) -> String {
    let texts: Vec<_> = texts.iter().map(|text| String::from_utf8_lossy(text)).collect();
    let Some(first) = texts.first() else { return "no rank said anything".into() };
    for (rank, other) in texts.iter().enumerate().skip(1) {
        let (mut left, mut right) = (first.lines(), other.lines());
        loop {
            match (left.next(), right.next()) {
                (None, None) => break,
                (a, b) if a == b => {}
                (a, b) => {
                    let or_nothing = |line: Option<&str>| line.unwrap_or("nothing more").to_owned();
                    return format!(
                        "rank 0 has {}, rank {rank} has {}",
                        or_nothing(a),
                        or_nothing(b)
                    );
                }
            }
        }
    }
    "their descriptions have different digests".into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::WeightSpec;

    #[test]
    fn the_first_difference_is_named() {
        let config = Config::default();
        let one = [UnitSpec::new("a", [WeightSpec::float8("w", [4, 4])])];
        let two = [UnitSpec::new("a", [WeightSpec::float8("w", [4, 5])])];
        let text = |units: &[UnitSpec]| describe(&config, units).join("\n").into_bytes();
        let said = first_difference(&[text(&one), text(&one), text(&two)]);
        assert_eq!(
            said,
            "rank 0 has weight `w` [4, 4] bf16 gathered float8, group `default`, trainable, \
             rank 2 has weight `w` [4, 5] bf16 gathered float8, group `default`, trainable"
        );
        assert_ne!(digest(&config, &one), digest(&config, &two));
    }
}

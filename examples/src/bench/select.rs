//! Which rows to measure.

use anyhow::{Result, bail};

use super::Group;

/// A list of `IMPLEMENTATION`, `PASS` or `IMPLEMENTATION/PASS`; a pass also by the part before its
/// first hyphen (`cast` is `cast-e4m3` and `cast-e5m2`). An empty list is everything.
#[derive(Clone, Debug, Default)]
pub struct Selection(Vec<String>);

impl Selection {
    /// Checks every item against the rows that there are.
    ///
    /// # Errors
    /// The first item that chooses nothing.
    pub fn new(items: &[String], groups: &[Group<'_>]) -> Result<Self> {
        for item in items {
            let mut rows = groups
                .iter()
                .flat_map(|group| group.passes().map(|pass| (group.implementation, pass)));
            if !rows.any(|(implementation, pass)| fits(item, implementation, pass)) {
                let mut known: Vec<_> = groups.iter().map(|group| group.implementation).collect();
                known.extend(groups.iter().flat_map(Group::passes));
                let mut seen = std::collections::HashSet::new();
                known.retain(|&name| seen.insert(name));
                bail!("there are no rows `{item}`: choose among {}", known.join(", "));
            }
        }
        Ok(Self(items.to_vec()))
    }

    /// True if this row is to be measured.
    pub fn chooses(&self, implementation: &str, pass: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|item| fits(item, implementation, pass))
    }
}

fn fits(item: &str, implementation: &str, pass: &str) -> bool {
    let is_pass =
        |name: &str| name == pass || pass.split_once('-').is_some_and(|(family, _)| name == family);
    match item.split_once('/') {
        Some((by, name)) => by == implementation && is_pass(name),
        None => item == implementation || is_pass(item),
    }
}

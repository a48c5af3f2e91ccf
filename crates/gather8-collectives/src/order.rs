//! What a rank has issued, hashed, so that two ranks that issue equal-sized operations in another
//! order cannot mix their data in silence.
//!
//! Every rank keeps a log. Its digest travels with the amax all-reduce; if the digests differ, the
//! ranks exchange the logs and [`first_difference`] says where they part.

use std::collections::{HashMap, VecDeque};

/// Entries that a log keeps, the newest ones.
pub const CAPACITY: usize = 4096;
/// Agreed entries that a log still tells other ranks, since they may have learned of the agreement
/// a little later.
const CONTEXT: u64 = 1024;
/// The longest name that a log keeps; longer ones are cut.
const NAME_LIMIT: usize = 256;
/// Different names that a log keeps.
const NAMES_LIMIT: usize = 65_536;
/// How names begin that carry a value's bits instead of bytes that move.
const SET: &str = "set ";
/// The first bytes of a log's byte form, with its version.
const MAGIC: &[u8; 8] = b"g8order1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    operation: u32,
    unit: u32,
    bytes: u64,
}

/// What one rank has issued.
///
/// The digest is a chain: `d(0) = 0^32`, `d(n + 1) = blake3(d(n) || len(operation) || operation ||
/// len(unit) || unit || bytes)` with lengths and bytes as little-endian u64; its first eight bytes
/// are what travels. The log keeps the newest [`CAPACITY`] entries and tells those that are not
/// agreed yet, with some before them.
#[derive(Clone, Debug, Default)]
pub struct OrderLog {
    chain: [u8; 32],
    /// Operations noted since the start.
    count: u64,
    /// Operations that all ranks are known to have agreed in.
    agreed: u64,
    entries: VecDeque<Entry>,
    names: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl OrderLog {
    /// An empty log.
    pub fn new() -> Self {
        Self { entries: VecDeque::with_capacity(CAPACITY), ..Self::default() }
    }

    /// Notes that a setting has this value from now on: ranks that go on with different values
    /// differ like ranks that issue different operations.
    pub fn note_value(&mut self, setting: &'static str, of: &str, value: f32) {
        self.note(&format!("{SET}{setting}"), of, u64::from(value.to_bits()));
    }

    /// Notes an operation as it is issued: its name, the unit that it is for, the bytes that it
    /// moves.
    pub fn note(&mut self, operation: &str, unit: &str, bytes: u64) {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.chain);
        for text in [operation, unit] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&bytes.to_le_bytes());
        self.chain = *hasher.finalize().as_bytes();
        self.count += 1;

        let entry = Entry { operation: self.number(operation), unit: self.number(unit), bytes };
        if self.entries.len() == CAPACITY {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    /// The digest of everything noted so far.
    pub fn digest(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.chain;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Operations noted so far: the position that [`agree`](Self::agree) takes.
    pub fn position(&self) -> u64 {
        self.count
    }

    /// All ranks agreed in the first `position` operations: a sync that carried the digest taken
    /// there was accepted.
    pub fn agree(&mut self, position: u64) {
        self.agreed = self.agreed.max(position.min(self.count));
    }

    fn number(&mut self, name: &str) -> u32 {
        let name = cut(name);
        if let Some(&number) = self.numbers.get(name) {
            return number;
        }
        if self.names.len() >= NAMES_LIMIT {
            return u32::MAX;
        }
        let number = self.names.len() as u32;
        self.names.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// The log for other ranks: count, names and entries, little endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let from = self.agreed.saturating_sub(CONTEXT);
        let oldest = self.count - self.entries.len() as u64;
        let skip = usize::try_from(from.saturating_sub(oldest)).unwrap_or(usize::MAX);
        let told = self.entries.iter().skip(skip);
        let mut used = HashMap::new();
        let mut names = Vec::new();
        let mut entries = Vec::with_capacity(told.len() * 16);
        let entries_len = told.len() as u32;
        for entry in told {
            for number in [entry.operation, entry.unit] {
                let next = used.len() as u32;
                let number = *used.entry(number).or_insert_with(|| {
                    names.push(self.names.get(number as usize).map_or("?", String::as_str));
                    next
                });
                entries.extend(number.to_le_bytes());
            }
            entries.extend(entry.bytes.to_le_bytes());
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.count.to_le_bytes());
        bytes.extend((names.len() as u32).to_le_bytes());
        bytes.extend(entries_len.to_le_bytes());
        for name in names {
            bytes.extend((name.len() as u16).to_le_bytes());
            bytes.extend(name.as_bytes());
        }
        bytes.extend(entries);
        bytes
    }
}

/// The name, cut to what a log keeps.
fn cut(name: &str) -> &str {
    let mut end = name.len().min(NAME_LIMIT);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.get(..end).unwrap_or_default()
}

/// A log as another rank sent it.
#[derive(Debug)]
struct Told {
    count: u64,
    names: Vec<String>,
    entries: Vec<Entry>,
}

impl Told {
    /// `None` for anything that no [`OrderLog`] has written.
    fn read(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let count = u64::from_le_bytes(take(&mut rest)?);
        let names_len = u32::from_le_bytes(take(&mut rest)?) as usize;
        let entries_len = u32::from_le_bytes(take(&mut rest)?) as usize;
        if names_len > 2 * CAPACITY || entries_len > CAPACITY || entries_len as u64 > count {
            return None;
        }
        let mut names = Vec::with_capacity(names_len);
        for _ in 0..names_len {
            let len = u16::from_le_bytes(take(&mut rest)?) as usize;
            let (name, after) = rest.split_at_checked(len).filter(|_| len <= NAME_LIMIT)?;
            names.push(printable(std::str::from_utf8(name).ok()?));
            rest = after;
        }
        let mut entries = Vec::with_capacity(entries_len);
        for _ in 0..entries_len {
            let operation = u32::from_le_bytes(take(&mut rest)?);
            let unit = u32::from_le_bytes(take(&mut rest)?);
            let bytes = u64::from_le_bytes(take(&mut rest)?);
            if operation.max(unit) as usize >= names_len {
                return None;
            }
            entries.push(Entry { operation, unit, bytes });
        }
        rest.is_empty().then_some(Self { count, names, entries })
    }

    fn first(&self) -> u64 {
        self.count - self.entries.len() as u64
    }

    fn entry(&self, position: u64) -> Option<(&str, &str, u64)> {
        let at = usize::try_from(position.checked_sub(self.first())?).ok()?;
        let entry = self.entries.get(at)?;
        let name = |number: u32| self.names.get(number as usize).map(String::as_str);
        Some((name(entry.operation)?, name(entry.unit)?, entry.bytes))
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, after) = rest.split_first_chunk::<N>()?;
    *rest = after;
    Some(*head)
}

/// Names go into error texts: no control characters.
fn printable(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Where the logs of ranks 0, 1, … (as [`OrderLog::to_bytes`] gives them) part, in one clause:
/// `operation 17: rank 0 all-gather of `block.1` (4096 bytes), rank 1 …`. Bytes that are no log are
/// named as such.
pub fn first_difference(logs: &[Vec<u8>]) -> String {
    let told = logs.iter().map(|bytes| Told::read(bytes)).collect::<Vec<_>>();
    if let Some(rank) = told.iter().position(Option::is_none) {
        return format!("rank {rank} sent a log that cannot be read");
    }
    let told = told.into_iter().flatten().collect::<Vec<_>>();
    let first = told.iter().map(Told::first).max().unwrap_or_default();
    let shortest = told.iter().map(|log| log.count).min().unwrap_or_default();
    let longest = told.iter().map(|log| log.count).max().unwrap_or_default();

    let differs = |&position: &u64| {
        let mut entries = told.iter().map(|log| log.entry(position));
        let one = entries.next().flatten();
        entries.any(|entry| entry != one)
    };
    if let Some(position) = (first..shortest).find(differs) {
        return at_position(&told, position);
    }
    if first > shortest {
        let counts = told.iter().enumerate().map(|(r, log)| format!("rank {r} {}", log.count));
        return format!(
            "the ranks are too far apart to compare (operations issued: {})",
            counts.collect::<Vec<_>>().join(", ")
        );
    }
    if shortest < longest {
        return at_position(&told, shortest);
    }
    format!("it lies before operation {first}, which is as far back as the logs reach")
}

fn at_position(told: &[Told], position: u64) -> String {
    // Changes of settings and of weights move nothing.
    let moves = told.iter().any(|log| log.entry(position).is_some_and(|(_, _, bytes)| bytes > 0));
    let said = told.iter().enumerate().map(|(rank, log)| match log.entry(position) {
        Some((operation, unit, bits)) if operation.starts_with(SET) => {
            format!("rank {rank} {operation} of `{unit}` to {}", f32::from_bits(bits as u32))
        }
        Some((operation, "", _)) => format!("rank {rank} {operation}"),
        Some((operation, unit, bytes)) if moves => {
            format!("rank {rank} {operation} of `{unit}` ({bytes} bytes)")
        }
        Some((operation, unit, _)) => format!("rank {rank} {operation} of `{unit}`"),
        None => format!("rank {rank} nothing"),
    });
    format!("operation {position}: {}", said.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn log(entries: &[(&str, &str, u64)]) -> OrderLog {
        let mut log = OrderLog::new();
        for (operation, unit, bytes) in entries {
            log.note(operation, unit, *bytes);
        }
        log
    }

    #[test]
    fn equal_logs_have_equal_digests_and_swapped_ones_do_not() {
        let a = log(&[("all-gather", "x", 8), ("all-gather", "y", 8)]);
        let b = log(&[("all-gather", "y", 8), ("all-gather", "x", 8)]);
        assert_eq!(a.digest(), a.clone().digest());
        assert_ne!(a.digest(), b.digest());
        assert_ne!(a.digest(), log(&[("all-gather", "x", 8), ("all-gather", "y", 9)]).digest());
        // Names do not run into each other.
        assert_ne!(log(&[("ab", "c", 1)]).digest(), log(&[("a", "bc", 1)]).digest());
    }

    #[test]
    fn the_first_difference_is_named() {
        let a = log(&[
            ("cast", "w", 1),
            ("all-gather", "block.1", 4096),
            ("all-gather", "block.2", 4096),
        ]);
        let b = log(&[
            ("cast", "w", 1),
            ("all-gather", "block.2", 4096),
            ("all-gather", "block.1", 4096),
        ]);
        assert_eq!(
            first_difference(&[a.to_bytes(), b.to_bytes()]),
            "operation 1: rank 0 all-gather of `block.1` (4096 bytes), rank 1 all-gather of `block.2` (4096 bytes)"
        );
        let rates = [1e-3, 2e-3].map(|rate| {
            let mut log = OrderLog::new();
            log.note_value("learning rate", "default", rate);
            log.to_bytes()
        });
        assert_eq!(
            first_difference(&rates),
            "operation 0: rank 0 set learning rate of `default` to 0.001, rank 1 set learning rate of `default` to 0.002"
        );
        let short = log(&[("cast", "w", 1)]);
        assert_eq!(
            first_difference(&[short.to_bytes(), a.to_bytes()]),
            "operation 1: rank 0 nothing, rank 1 all-gather of `block.1` (4096 bytes)"
        );
    }

    #[test]
    fn old_entries_go_and_the_position_stays() {
        let mut a = OrderLog::new();
        for i in 0..CAPACITY as u64 + 100 {
            a.note("all-gather", "x", i);
        }
        let mut b = a.clone();
        a.agree(a.position());
        a.note("all-gather", "x", 1);
        b.note("all-gather", "x", 2);
        let position = CAPACITY + 100;
        assert_eq!(
            first_difference(&[a.to_bytes(), b.to_bytes()]),
            format!(
                "operation {position}: rank 0 all-gather of `x` (1 bytes), rank 1 all-gather of `x` (2 bytes)"
            )
        );
        assert!(a.entries.len() == CAPACITY && a.names.len() == 2);
    }

    #[test]
    fn logs_too_far_apart_say_so() {
        let mut a = OrderLog::new();
        (0..3 * CAPACITY).for_each(|_| a.note("a", "b", 1));
        let b = log(&[("a", "b", 1)]);
        let text = first_difference(&[a.to_bytes(), b.to_bytes()]);
        assert!(text.contains("too far apart") && text.contains("rank 1 1"), "{text}");
    }

    #[test]
    fn huge_counts_in_a_log_are_refused() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(u64::MAX.to_le_bytes());
        bytes.extend(u32::MAX.to_le_bytes());
        bytes.extend(u32::MAX.to_le_bytes());
        assert_eq!(first_difference(&[bytes]), "rank 0 sent a log that cannot be read");
    }

    proptest! {
        #[test]
        fn garbled_bytes_are_answered(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), keep in 0_usize..80) {
            let good = log(&[("all-gather", "x", 8), ("sync", "amax", 4)]).to_bytes();
            let text = first_difference(&[good.clone(), bytes.clone()]);
            prop_assert!(text.contains("rank 1"));
            let mut prefix = good.get(..keep.min(good.len())).unwrap().to_vec();
            prefix.append(&mut bytes);
            let text = first_difference(&[good, prefix]);
            prop_assert!(!text.is_empty());
        }
    }
}

//! The memory that an export takes: that of the largest matrix, not that of the file. The only test
//! of its program, since what is measured is the program's own peak.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]
#![cfg(target_os = "linux")]

mod support;

use std::fs::File;
use std::io::Write;

use gather8_examples::export::{Options, Silent, export};
use gather8_kernels::Format;

/// The largest resident size so far, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

#[test]
fn memory_is_that_of_the_largest_matrix() {
    const MATRICES: u64 = 100;
    const ROWS: u64 = 512;
    const ELEMENTS: u64 = ROWS * 2048;
    const RANKS: u64 = 4;
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let bytes = 2 * ELEMENTS;
    let entries = (0..MATRICES).map(|i| {
        let (start, end) = (i * bytes, (i + 1) * bytes);
        format!(r#""m{i}":{{"dtype":"BF16","shape":[{ROWS},2048],"data_offsets":[{start},{end}]}}"#)
    });
    // And one that passes through, larger than the limit below.
    let start = MATRICES * bytes;
    let copied = 64 << 20;
    let entries = entries.chain([format!(
        r#""copied":{{"dtype":"U8","shape":[{copied}],"data_offsets":[{start},{}]}}"#,
        start + copied
    )]);
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    let mut file = File::create(&input).unwrap();
    file.write_all(&support::with_header(&header, &[])).unwrap();
    // The data is a hole, which reads as zeros.
    file.set_len(8 + header.len() as u64 + start + copied).unwrap();
    drop(file);

    let before = peak();
    let options = Options { ranks: RANKS as u32, format: Format::E4m3 };
    export(&input, &output, options, &mut Silent).unwrap();
    let used = peak() - before;
    // One byte an element for every rank and 16 for all, as the module says, and 8 MiB for threads
    // and pages of the program that were not used before.
    let limit = (RANKS + 16) * ELEMENTS + (8 << 20);
    println!("{} MB used, {} allowed", used / 1_000_000, limit / 1_000_000);
    assert!(used <= limit, "{} MB used, {} allowed", used / 1_000_000, limit / 1_000_000);
    assert!(MATRICES * bytes > 5 * limit, "the file is too small to tell");
}

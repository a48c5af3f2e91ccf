//! Files to export, and programs to run.

#![allow(dead_code, unreachable_pub, reason = "every test file uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// One tensor: name, type, dimensions, bytes.
pub type Tensor<'a> = (&'a str, &'a str, &'a [u64], Vec<u8>);

/// The file of these tensors, in this order.
pub fn safetensors(tensors: &[Tensor<'_>], metadata: &[(&str, &str)]) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    if !metadata.is_empty() {
        let pairs = metadata
            .iter()
            .map(|(key, value)| format!("{}:{}", serde_json::json!(key), serde_json::json!(value)));
        entries.push(format!("\"__metadata__\":{{{}}}", pairs.collect::<Vec<_>>().join(",")));
    }
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend_from_slice(bytes);
        entries.push(format!(
            "{}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{}]}}",
            serde_json::json!(name),
            data.len()
        ));
    }
    with_header(&format!("{{{}}}", entries.join(",")), &data)
}

/// A file of any header and any data.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// Values as elements of a type; the generator is in these tests' hands.
pub fn elements(dtype: &str, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let values = values.into_iter();
    match dtype {
        "F32" => values.flat_map(f32::to_le_bytes).collect(),
        "F16" => values.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
        "BF16" => values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
        _ => panic!("no elements of {dtype}"),
    }
}

/// The elements' values.
pub fn values(dtype: &str, bytes: &[u8]) -> Vec<f32> {
    let half = |pair: &[u8]| [pair[0], pair[1]];
    match dtype {
        "F32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        "F16" => bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes(half(b)).into()).collect(),
        "BF16" => {
            bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes(half(b)).into()).collect()
        }
        _ => panic!("no values of {dtype}"),
    }
}

/// A reproducible stream of numbers.
pub struct Random(pub u64);

impl Random {
    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Less than `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// In [-1, 1).
    pub fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Every name in a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// An example's program, which `cargo test` builds before it runs tests.
pub fn program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let profile = tests.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join(name);
    assert!(
        program.is_file(),
        "{} is not there: run `cargo build -p gather8-examples --examples` first",
        program.display()
    );
    program
}

/// Runs an example's program, backtraces asked for.
pub fn run(name: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program(name));
    command.args(arguments).env("RUST_BACKTRACE", "1").output().unwrap()
}

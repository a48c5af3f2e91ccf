//! Inputs that are no checkpoints: one sentence, no file, and never a panic.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::path::Path;

use gather8_examples::export::{LONGEST_HEADER, Options, Silent, export, one_line};
use gather8_kernels::Format;
use safetensors::SafeTensors;
use support::{Random, Tensor, elements, names, safetensors, with_header};

/// Exports the bytes; the error's text, or `None` for a file that could be read.
fn attempt(folder: &Path, bytes: &[u8]) -> Option<String> {
    let (input, output) = (folder.join("in"), folder.join("out"));
    std::fs::write(&input, bytes).unwrap();
    let options = Options { ranks: 2, format: Format::E4m3 };
    match export(&input, &output, options, &mut Silent) {
        Ok(_) => {
            let file = std::fs::read(&output).unwrap();
            SafeTensors::deserialize(&file).expect("what was written can be read");
            std::fs::remove_file(&output).unwrap();
            assert_eq!(names(folder), ["in"]);
            None
        }
        Err(error) => {
            assert_eq!(names(folder), ["in"], "a file was left: {error:#}");
            Some(one_line(&format!("{error:#}")))
        }
    }
}

fn refused(bytes: &[u8], problem: &str) {
    let folder = tempfile::tempdir().unwrap();
    let text = attempt(folder.path(), bytes).unwrap_or_else(|| panic!("accepted: {problem}"));
    assert!(text.contains(problem), "{text:?} does not say {problem:?}");
    assert!(text.contains("in is no valid safetensors file"), "{text:?}");
}

fn header(text: &str, data: usize) -> Vec<u8> {
    with_header(text, &vec![0; data])
}

#[test]
fn lengths_that_do_not_fit_the_file() {
    refused(b"", "it has 0 bytes");
    refused(b"1234567", "it has 7 bytes");
    refused(&u64::MAX.to_le_bytes(), "18446744073709551615 bytes");
    refused(&(1_u64 << 40).to_le_bytes(), "but the file has 8 in all");
    let mut cut = header(r#"{"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}"#, 4);
    cut.pop();
    refused(&cut, "describes 4 bytes of data, but 3 follow");
    cut.extend([0, 0]);
    refused(&cut, "describes 4 bytes of data, but 5 follow");
}

#[test]
fn a_header_that_is_too_long_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    let length = LONGEST_HEADER + 1;
    std::fs::write(&input, length.to_le_bytes()).unwrap();
    // The rest is a hole: it takes no room on the disk.
    std::fs::File::options().write(true).open(&input).unwrap().set_len(8 + length).unwrap();
    let options = Options { ranks: 1, format: Format::E4m3 };
    let result = export(&input, &folder.path().join("out"), options, &mut Silent);
    let text = format!("{:#}", result.unwrap_err());
    assert!(text.contains(&format!("at most {LONGEST_HEADER} are read")), "{text}");
}

#[test]
fn headers_that_are_no_headers() {
    for text in ["", "\0\0\0\0", "PK\u{3}\u{4}", "[]", "null", "7", "{", r#"{"a":1}"#, r#"{"a"}"#] {
        refused(&header(text, 0), "its header cannot be used");
    }
    let mut bytes = header("{}      ", 0);
    bytes[12] = 0xff;
    refused(&bytes, "its header cannot be used");
    refused(&header(&"[".repeat(100_000), 0), "its header cannot be used");
    refused(&header(&"{\"a\":".repeat(100_000), 0), "its header cannot be used");
    for metadata in ["1", "[]", r#"{"a":1}"#, r#"{"a":null}"#, r#""text""#] {
        refused(&header(&format!("{{\"__metadata__\":{metadata}}}"), 0), "header cannot be used");
    }
}

/// A header of tensors `a` and `b`, as their JSON.
fn two(a: &str, b: &str, data: usize) -> Vec<u8> {
    header(&format!("{{\"a\":{{{a}}},\"b\":{{{b}}}}}"), data)
}

#[test]
fn tensors_that_cannot_be() {
    let a = r#""dtype":"F32","shape":[1,2],"data_offsets":[0,8]"#;
    let refuse = |b: &str, data| refused(&two(a, b, data), "its header cannot be used");
    // Overlap, gap, backwards, outside.
    refuse(r#""dtype":"F32","shape":[1,2],"data_offsets":[4,12]"#, 12);
    refuse(r#""dtype":"F32","shape":[1,2],"data_offsets":[0,8]"#, 8);
    refuse(r#""dtype":"F32","shape":[1,2],"data_offsets":[12,20]"#, 20);
    refuse(r#""dtype":"F32","shape":[1,2],"data_offsets":[16,8]"#, 16);
    refused(
        &two(a, r#""dtype":"F32","shape":[1,2],"data_offsets":[8,16]"#, 8),
        "describes 16 bytes of data, but 8 follow",
    );
    // Shapes and types that do not fit the bytes, or no number.
    refuse(r#""dtype":"F32","shape":[1,3],"data_offsets":[8,16]"#, 16);
    refuse(r#""dtype":"F64","shape":[1,2],"data_offsets":[8,16]"#, 16);
    refuse(r#""dtype":"F4","shape":[3],"data_offsets":[8,9]"#, 9);
    refuse(r#""dtype":"F31","shape":[1,2],"data_offsets":[8,16]"#, 16);
    refuse(r#""dtype":"F32","shape":[-1,2],"data_offsets":[8,16]"#, 16);
    refuse(r#""dtype":"F32","shape":[1.5],"data_offsets":[8,16]"#, 16);
    refuse(r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[8,8]"#, 8);
    refuse(r#""dtype":"F32","shape":[4611686018427387904,1],"data_offsets":[8,8]"#, 8);
    refuse(r#""dtype":"F32","shape":[1],"data_offsets":[18446744073709551615,3]"#, 8);
    refuse(r#""dtype":"F32","shape":[1],"data_offsets":[8]"#, 12);
    refuse(r#""dtype":"F32","shape":[1]"#, 12);
    refuse("", 8);
}

#[test]
fn names_are_shown_safely_and_cut() {
    let folder = tempfile::tempdir().unwrap();
    let nan = elements("F32", [f32::NAN]);
    let evil = "a\nexport: all is well\u{1b}[2J\u{202e}";
    let tensors: Vec<Tensor<'_>> = vec![(evil, "F32", &[1, 1], nan.clone())];
    let text = attempt(folder.path(), &safetensors(&tensors, &[])).unwrap();
    assert!(!text.contains(['\n', '\u{1b}', '\u{202e}']), "{text:?}");
    assert!(text.contains(r"a\nexport: all is well\u{1b}[2J"), "{text:?}");

    let long = "x".repeat(100_000);
    let tensors: Vec<Tensor<'_>> = vec![(&long, "F32", &[1, 1], nan)];
    let text = attempt(folder.path(), &safetensors(&tensors, &[])).unwrap();
    assert!(text.len() < 700, "{} bytes", text.len());
    // Odd as they are, they are converted.
    for name in [evil, &long] {
        let one = elements("F32", [1.0]);
        let tensors: Vec<Tensor<'_>> = vec![(name, "F32", &[1, 1], one)];
        assert_eq!(attempt(folder.path(), &safetensors(&tensors, &[])), None);
    }
    let dtype = format!(r#"{{"a":{{"dtype":"{long}","shape":[],"data_offsets":[0,0]}}}}"#);
    let text = attempt(folder.path(), &header(&dtype, 0)).unwrap();
    assert!(text.len() < 700, "{} bytes", text.len());
}

#[test]
fn no_files_and_other_things_than_files() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { ranks: 1, format: Format::E4m3 };
    let output = folder.path().join("out");
    for (input, problem) in [
        (folder.path().join("missing"), "cannot open"),
        (folder.path().to_owned(), "is no regular file"),
        ("/dev/zero".into(), "is no regular file"),
    ] {
        let text = format!("{:#}", export(&input, &output, options, &mut Silent).unwrap_err());
        assert!(text.contains(problem), "{text}");
        assert!(names(folder.path()).is_empty());
    }
}

#[test]
fn random_bytes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random(2);
    for _ in 0..1000 {
        let mut bytes: Vec<u8> = (0..random.below(64)).map(|_| random.bits() as u8).collect();
        if bytes.len() >= 8 && random.below(2) == 0 {
            let length = random.below(bytes.len()) as u64;
            bytes[..8].copy_from_slice(&length.to_le_bytes());
        }
        // Only `{}` and spaces would do.
        assert!(attempt(folder.path(), &bytes).is_some(), "{bytes:?}");
    }
}

#[test]
fn damaged_files_are_refused_or_read() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<Tensor<'_>> = vec![
        ("a.weight", "F32", &[3, 2], elements("F32", [1.0; 6])),
        ("b", "BF16", &[2], elements("BF16", [1.0; 2])),
        ("c", "F16", &[1, 4], elements("F16", [1.0; 4])),
    ];
    let whole = safetensors(&tensors, &[("format", "pt")]);
    assert_eq!(attempt(folder.path(), &whole), None, "the file is good before it is damaged");
    let mut random = Random(3);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..1500 {
        let mut bytes = whole.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len());
            match random.below(5) {
                0 => bytes[at] = random.bits() as u8,
                1 => bytes[at] ^= 1 << random.below(8),
                2 => bytes[at] = b"0123456789{}[]\",:"[random.below(17)],
                3 => bytes.truncate(at.max(1)),
                _ => {
                    let from = random.below(bytes.len());
                    let piece = bytes[from..(from + 8).min(bytes.len())].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
        }
        match attempt(folder.path(), &bytes) {
            Some(_) => refused += 1,
            None => read += 1,
        }
    }
    assert!(refused > 500 && read > 50, "{refused} refused, {read} read: the damage is no test");
}

//! Machines that lack what GPUs need, as the programs' users meet them: one sentence, exit code 1.
//! Drivers and libraries that are too old are built from `fakes`.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::path::Path;
use std::process::Command;

use support::{elements, program, safetensors};

/// The program fails with one sentence that says all of these.
fn fails(command: &mut Command, parts: &[&str]) {
    let output = command.env("RUST_BACKTRACE", "1").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{command:?}: {text}");
    assert_eq!(text.lines().count(), 1, "one sentence: {text}");
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

/// Every program on GPUs, with this folder ahead of the system's libraries.
fn programs(libraries: &Path, scratch: &Path, parts: &[&str]) {
    let input = scratch.join("in.safetensors");
    let tensors: [(_, _, &[u64], _); 1] = [("w", "BF16", &[3, 2], elements("BF16", [1.0; 6]))];
    std::fs::write(&input, safetensors(&tensors, &[])).unwrap();
    let mut export = Command::new(program("export"));
    export.arg(&input).arg(scratch.join("out.safetensors"));
    let commands = [Command::new(program("doctor")), Command::new(program("bench")), export];
    for mut command in commands {
        fails(command.args(["--device", "cuda"]).env("LD_LIBRARY_PATH", libraries), parts);
    }
    assert!(!scratch.join("out.safetensors").exists());
}

fn build(source: &str, library: &Path) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakes");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(library).arg(folder.join(source));
    assert!(compiler.status().unwrap().success(), "{compiler:?}");
}

#[test]
fn a_driver_that_cannot_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = folder.path().join("lib");
    std::fs::create_dir(&libraries).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::fs::write(libraries.join(name), "no library").unwrap();
    }
    let parts = ["opening the driver: install the NVIDIA driver", "libcuda.so.1: ", "use the CPU"];
    programs(&libraries, folder.path(), &parts);
}

#[test]
fn a_gpu_that_is_too_old() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = folder.path().join("lib");
    std::fs::create_dir(&libraries).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        build("old_gpu.c", &libraries.join(name));
    }
    programs(&libraries, folder.path(), &["A GPU of 2016", "Ampere", "oldest"]);
}

#[test]
fn memory_is_asked_of_a_gpu() {
    let output = Command::new(program("doctor")).args(["--memory", "1G"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("give --device cuda, too"));
}

/// Whatever else is missing, doctor looks for NCCL.
#[test]
fn doctor_names_what_nccl_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("libnccl.so.2");
    build("old_nccl.c", &old);
    let says = |nccl: &Path, parts: &[&str]| {
        let output = Command::new(program("doctor")).env("GATHER8_NCCL", nccl).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("NCCL")).unwrap();
        for part in parts {
            assert!(line.contains(part), "{line:?} does not say {part:?}");
        }
    };
    says(&old, &["libnccl.so.2 has no function ncclCommSplit", "NCCL 2.18 or newer is needed"]);
    says(Path::new("/nowhere/libnccl.so.2"), &["install NCCL", "/nowhere/libnccl.so.2: "]);
}

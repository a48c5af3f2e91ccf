//! The program `train` from outside: what it writes, and how it refuses.
//!
//! `cargo test` builds examples before it runs tests; a run of this target alone (`--test train`) uses
//! the program as it was last built.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "all of this file is tests"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn program() -> PathBuf {
    // target/PROFILE/deps/this -> target/PROFILE/examples/train
    let this = std::env::current_exe().unwrap();
    let path = this.parent().unwrap().parent().unwrap().join("examples/train");
    assert!(path.exists(), "{} is not built: cargo build --example train", path.display());
    path
}

/// Sizes that train in a moment.
const TINY: [&str; 14] = [
    "--steps",
    "4",
    "--width",
    "16",
    "--heads",
    "2",
    "--layers",
    "2",
    "--context",
    "16",
    "--batch",
    "6",
    "--ranks",
    "3",
];

fn train(arguments: &[&str], out: &Path) -> Output {
    Command::new(program())
        .args(arguments)
        .arg("--out")
        .arg(out)
        .env("RUST_BACKTRACE", "1")
        .output()
        .unwrap()
}

fn tiny(more: &[&str], out: &Path) -> Output {
    let output = train(&[&TINY, more].concat(), out);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(out: &Path, run: &str) -> Vec<f64> {
    let lines = lines(&out.join(run).join("metrics.jsonl"));
    lines[1..].iter().map(|line| line["loss"].as_f64().unwrap()).collect()
}

fn files(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found
}

/// One sentence, the code, and the words that must be in it.
fn refused(output: &Output, code: i32, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "more than one line: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "no {word:?} in: {stderr}");
    }
    assert!(output.stdout.is_empty());
}

#[test]
fn a_comparison_writes_everything_that_the_help_names() {
    let folder = tempfile::tempdir().unwrap();
    let output = tiny(&["--trace"], folder.path());
    let mut expected = BTreeSet::from(["loss.svg".to_owned()]);
    for run in ["bf16", "float8-dynamic", "float8-delayed"] {
        expected.extend(
            ["metrics.jsonl", "rank-0.log", "rank-1.log", "rank-2.log", "trace.json"]
                .map(|file| format!("{run}/{file}")),
        );
        assert!(String::from_utf8_lossy(&output.stdout).contains(run));
    }
    assert_eq!(files(folder.path()), expected);

    let svg = std::fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    for label in ["bf16", "float8-dynamic", "float8-delayed", "step", "nats per byte"] {
        assert!(svg.contains(label), "no {label:?} in loss.svg");
    }
    let log = std::fs::read_to_string(folder.path().join("bf16/rank-2.log")).unwrap();
    assert!(log.contains("rank=2 step=3"), "{log}");
}

#[test]
fn metrics_start_with_a_header_and_hold_every_step() {
    let folder = tempfile::tempdir().unwrap();
    tiny(&["--gather", "float8", "--scaling", "delayed"], folder.path());
    let lines = lines(&folder.path().join("float8-delayed/metrics.jsonl"));
    assert_eq!(lines.len(), 5);
    let header = &lines[0]["header"];
    assert_eq!(header["schema"], 1);
    assert_eq!(header["configuration"]["training"]["ranks"], 3);
    assert_eq!(header["digest"].as_str().unwrap().len(), 64);
    for (step, line) in lines[1..].iter().enumerate() {
        assert_eq!(line["step"], step);
        let keys: BTreeSet<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
        let expected = [
            "step",
            "loss",
            "lr",
            "grad_norm",
            "tokens_per_s",
            "gathered_bytes",
            "reduced_bytes",
            "amax_max",
            "saturated",
        ];
        assert_eq!(keys, BTreeSet::from(expected));
        // A byte-level model starts near ln 256 = 5.5.
        let loss = line["loss"].as_f64().unwrap();
        assert!(loss > 4.0 && loss < 7.0, "{loss}");
    }
}

#[test]
fn a_trace_names_rank_and_step_in_every_span() {
    let folder = tempfile::tempdir().unwrap();
    tiny(&["--gather", "bf16", "--trace"], folder.path());
    let text = std::fs::read_to_string(folder.path().join("bf16/trace.json")).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    for name in ["step", "forward", "backward"] {
        let count = spans.iter().filter(|span| span["name"] == name).count();
        assert_eq!(count, 3 * 4, "{name}: one for each of 3 ranks and 4 steps");
    }
    for span in spans {
        assert_eq!(span["args"]["rank"], span["tid"], "{span}");
        assert!(span["args"]["step"].as_u64().is_some_and(|step| step < 4), "{span}");
        assert!(span["dur"].as_f64().unwrap() >= 0.0);
    }
}

#[test]
fn the_same_seed_trains_the_same_way_in_every_world() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str]| {
        let out = folder.path().join(name);
        tiny(&[&["--gather", "bf16"], more].concat(), &out);
        losses(&out, "bf16")
    };
    // A later flag of the same name is an error, so these worlds come from a file.
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "seed = 9\nlog = \"warn\"\n").unwrap();
    let three = run("three", &["--config", config.to_str().unwrap()]);
    assert_eq!(three, run("again", &["--seed", "9"]));
    assert_ne!(three, run("other", &["--seed", "10"]));

    let world = |ranks: &str, microbatches: &str| {
        let mut arguments = TINY.to_vec();
        *arguments.last_mut().unwrap() = ranks;
        arguments.extend(["--gather", "bf16", "--seed", "9", "--microbatches", microbatches]);
        let out = folder.path().join(format!("world-{ranks}-{microbatches}"));
        let output = train(&arguments, &out);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        losses(&out, "bf16")
    };
    // 4 does not divide the 6 sequences of a step: shares differ, the mean does not.
    for (ranks, microbatches) in [("1", "1"), ("2", "3"), ("4", "1")] {
        let other = world(ranks, microbatches);
        for (a, b) in three.iter().zip(&other) {
            assert!((a - b).abs() < 1e-3, "{ranks} x {microbatches}: {three:?} and {other:?}");
        }
    }
}

#[test]
fn flags_override_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("train.toml");
    std::fs::write(&config, "ranks = 2\nlr = 0.5\nweight-decay = 0.25\ngather = \"bf16\"\n")
        .unwrap();
    let out = folder.path().join("out");
    tiny(&["--config", config.to_str().unwrap(), "--lr", "0.001"], &out);
    let header = &lines(&out.join("bf16/metrics.jsonl"))[0]["header"]["configuration"]["training"];
    assert_eq!(header["ranks"], 3);
    assert_eq!(header["lr"], 0.001);
    assert_eq!(header["weight-decay"], 0.25);
    assert!(!out.join("float8-dynamic").exists(), "the file asked for one run");
}

#[test]
fn wrong_usage_is_one_sentence_and_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("train.toml");
    std::fs::write(&config, "ranks = 2\n\nstep = 5\n").unwrap();
    let out = folder.path().join("out");
    let refuse = |arguments: &[&str], words: &[&str]| {
        refused(&train(arguments, &out), 2, words);
        assert!(!out.exists(), "{arguments:?} left a folder");
    };
    refuse(&["--ranks", "0"], &["--ranks", "at least 1"]);
    refuse(&["--ranks", "many"], &["many", "--ranks"]);
    refuse(&["--rank", "2"], &["--rank"]);
    refuse(&["--gather", "fp8"], &["fp8", "float8", "bf16"]);
    refuse(&["--gather", "bf16", "--scaling", "delayed"], &["--scaling", "bf16"]);
    refuse(&["--compare", "--gather", "bf16"], &["--compare"]);
    refuse(&["--heads", "5", "--width", "96"], &["--heads 5", "--width 96"]);
    refuse(&["--ranks", "4", "--batch", "3"], &["--batch 3", "at least 4"]);
    let long = ["--context", "8192", "--heads", "16", "--batch", "64"];
    refuse(&long, &["--context 8192", "64 GiB"]);
    refuse(&["--lr", "-1"], &["--lr", "-1"]);
    refuse(&["--lr", "nan"], &["--lr", "NaN"]);
    refuse(&["--log", "loud"], &["--log", "loud"]);
    let path = config.to_str().unwrap();
    refuse(&["--config", path], &["train.toml line 3", "step"]);
    std::fs::write(&config, "ranks = -2\n").unwrap();
    refuse(&["--config", path], &["train.toml line 1", "-2"]);
    std::fs::write(&config, "ranks = \n").unwrap();
    refuse(&["--config", path], &["train.toml line 1"]);
}

#[test]
fn other_failures_are_one_sentence_and_code_1_and_leave_nothing_half_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let text = folder.path().join("short.txt");
    std::fs::write(&text, "too short").unwrap();
    let short = text.to_str().unwrap();
    refused(&train(&["--text", short, "--context", "9"], &out), 1, &["9 bytes", "at least 10"]);
    refused(&train(&["--text", "/nowhere/text"], &out), 1, &["/nowhere/text"]);
    refused(&train(&["--communicator", "mpi"], &out), 1, &["--communicator mpi", "mpirun"]);
    refused(&train(&["--config", "/nowhere/config"], &out), 1, &["/nowhere/config"]);
    assert!(!out.exists());

    // Below a file no folder can be made, whoever runs this.
    let below = text.join("out");
    refused(&train(&TINY, &below), 1, &["short.txt/out"]);

    let diverging = [&TINY, &["--lr", "1e30"] as &[&str]].concat();
    refused(&train(&diverging, &out), 1, &["--lr", "step"]);
    let left = files(&out);
    assert!(left.iter().all(|file| file.ends_with(".log")), "{left:?}");
    assert!(left.contains("bf16/rank-0.log"), "the logs of a failed run stay: {left:?}");
}

#[test]
fn help_explains_every_option() {
    let output = Command::new(program()).arg("--help").output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    let help = String::from_utf8(output.stdout).unwrap();
    for option in [
        "ranks",
        "gather",
        "scaling",
        "format",
        "history",
        "compare",
        "steps",
        "batch",
        "microbatches",
        "context",
        "width",
        "heads",
        "layers",
        "lr",
        "warmup",
        "weight-decay",
        "max-grad-norm",
        "seed",
        "text",
        "out",
        "trace",
        "log",
        "inject-fault",
        "config",
    ] {
        let line = help.lines().position(|line| line.contains(&format!("--{option}")));
        let line = line.unwrap_or_else(|| panic!("no --{option} in the help"));
        let explained = help.lines().skip(line).take(2).collect::<String>();
        assert!(explained.trim().len() > option.len() + 20, "--{option} is not explained");
    }
    assert!(help.contains("Exit code"));
}

#[test]
fn faults_break_the_training() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str]| {
        let out = folder.path().join(name);
        tiny(&[&["--gather", "float8", "--lr", "0.02", "--warmup", "1"], more].concat(), &out);
        losses(&out, "float8-dynamic")
    };
    let healthy = run("healthy", &[]);
    let scale = run("scale", &["--inject-fault", "scale"]);
    assert_ne!(healthy[0], scale[0], "the first forward pass already has the wrong scale");
    for fault in ["stale", "drop-gradient"] {
        let broken = run(fault, &["--inject-fault", fault]);
        assert_eq!(healthy[0], broken[0], "{fault} starts from the same weights");
        assert_ne!(healthy[3], broken[3], "{fault} changed nothing");
    }
}

/// Starts every rank as a process, as a launcher does.
fn processes(world: usize, job: &str, arguments: &[&str], out: &Path) -> Vec<std::process::Child> {
    let start = |rank: usize| {
        Command::new(program())
            .args(arguments)
            .arg("--out")
            .arg(out)
            .env("RUST_BACKTRACE", "1")
            .env("GATHER8_RANK", rank.to_string())
            .env("GATHER8_WORLD", world.to_string())
            .env("GATHER8_LOCAL_RANK", rank.to_string())
            .env("GATHER8_LOCAL_WORLD", world.to_string())
            .env("GATHER8_JOB", format!("{job}-{}", std::process::id()))
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    (0..world).map(start).collect()
}

#[test]
fn ranks_as_processes_train_as_threads_do() {
    let folder = tempfile::tempdir().unwrap();
    let threads = folder.path().join("threads");
    let more = ["--gather", "float8", "--scaling", "delayed"];
    tiny(&more, &threads);
    let out = folder.path().join("processes");
    // Ranks come from the environment.
    let arguments: Vec<_> = TINY[..12].iter().chain(&more).copied().collect();
    for (rank, child) in processes(3, "same", &arguments, &out).into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "rank {rank}: {said}");
        assert_eq!(output.stdout.is_empty(), rank > 0, "rank 0 alone prints the table");
        assert!(out.join(format!("float8-delayed/rank-{rank}.log")).exists());
    }
    assert_eq!(losses(&threads, "float8-delayed"), losses(&out, "float8-delayed"));
}

#[test]
fn a_killed_process_is_named_by_all_others() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [&TINY[2..12], &["--steps", "1000000", "--gather", "float8"]].concat();
    let mut ranks = processes(3, "killed", &arguments, folder.path());
    let log = folder.path().join("float8-dynamic/rank-0.log");
    let training = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("step done"));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !training() {
        assert!(std::time::Instant::now() < deadline, "the ranks do not train");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    ranks[1].kill().unwrap();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        if rank == 1 {
            continue;
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("train: rank {rank}: rank 1 ")), "rank {rank} said: {said}");
        let log = folder.path().join(format!("float8-dynamic/rank-{rank}.log"));
        assert!(std::fs::read_to_string(log).unwrap().contains("rank 1 "));
    }
}

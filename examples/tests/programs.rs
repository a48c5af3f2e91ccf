//! The programs `export` and `bench` as their users meet them: exit codes, sentences, files.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::fs::File;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use support::{Tensor, elements, names, program, run, safetensors, with_header};

fn failed(output: &Output, code: i32, problem: &str) {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(problem), "{text:?} does not say {problem:?}");
    assert!(output.stdout.is_empty());
    if code == 1 {
        assert_eq!(text.lines().count(), 1, "one sentence: {text}");
    }
}

#[test]
fn export_succeeds_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<Tensor<'_>> = vec![
        ("w", "BF16", &[3, 2], elements("BF16", [1.0; 6])),
        ("b", "F32", &[2], elements("F32", [1.0; 2])),
    ];
    let input = folder.path().join("in.safetensors");
    std::fs::write(&input, safetensors(&tensors, &[])).unwrap();
    let input = input.to_str().unwrap();
    let mut files = Vec::new();
    for ranks in ["1", "2", "3", "5", "8"] {
        let output = folder.path().join("out.safetensors");
        let to = output.to_str().unwrap();
        let arguments = [input, to, "--ranks", ranks, "--format", "e5m2", "--scaling", "dynamic"];
        let done = run("export", &arguments);
        assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(done.stderr.is_empty());
        let text = String::from_utf8(done.stdout).unwrap();
        let expected = format!("1 tensors in e5m2 over {ranks} ranks, 1 unchanged");
        assert!(text.lines().count() == 1 && text.contains(&expected), "{text}");
        files.push(std::fs::read(&output).unwrap());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode =
                |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(
                mode(&output),
                mode(&folder.path().join("in.safetensors")),
                "as any other new file"
            );
        }
    }
    assert!(files.iter().all(|file| *file == files[0]));
    assert_eq!(names(folder.path()), ["in.safetensors", "out.safetensors"]);
}

#[test]
fn export_fails_with_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let tensors: Vec<Tensor<'_>> =
        vec![("bad.weight", "F16", &[3, 1], elements("F16", [1.0, f32::INFINITY, 2.0]))];
    let file = safetensors(&tensors, &[]);
    std::fs::write(path("inf"), &file).unwrap();
    std::fs::write(path("cut"), &file[..file.len() - 1]).unwrap();
    std::fs::write(path("foreign"), b"PK\x03\x04 this is an archive, not a checkpoint").unwrap();
    let out = path("out");
    let export = |input: &str, more: &[&str]| {
        run("export", &[&[&*path(input), &*out, "--ranks", "4"], more].concat())
    };
    failed(&export("inf", &[]), 1, "`bad.weight` holds a NaN or an infinity");
    failed(&export("cut", &[]), 1, "is no valid safetensors file");
    failed(&export("foreign", &[]), 1, "is no valid safetensors file");
    failed(&export("missing", &[]), 1, "cannot open");
    assert_eq!(names(folder.path()), ["cut", "foreign", "inf"]);
    failed(&run("export", &[]), 2, "Usage: export");
    failed(&run("export", &["a", "b", "--ranks", "0"]), 2, "0 is not in 1..=64");
    failed(&run("export", &["a", "b", "--format", "e3m4"]), 2, "possible values: e4m3, e5m2");
    failed(&run("export", &["a", "b", "--scaling", "delayed"]), 2, "possible values: dynamic");
}

#[test]
fn export_that_is_told_to_stop_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    // Some seconds of work, in a file that takes no place on the disk.
    let (bytes, header) = (
        1_u64 << 30,
        r#"{"w":{"dtype":"F32","shape":[16384,16384],"data_offsets":[0,1073741824]}}"#,
    );
    let mut input = File::create(path("in")).unwrap();
    input.write_all(&with_header(header, &[])).unwrap();
    input.set_len((8 + header.len()) as u64 + bytes).unwrap();
    // Whatever the test was started with. The last one is as nohup starts it: an ignored signal
    // stays ignored, and another must end it.
    for (start, signals, ended_by) in [
        ("--default-signal=HUP", &["HUP"][..], 1),
        ("--default-signal=INT", &["INT"], 2),
        ("--default-signal=TERM", &["TERM"], 15),
        ("--ignore-signal=HUP,INT", &["HUP", "INT", "TERM"], 15),
    ] {
        let mut export = Command::new("env")
            .arg(start)
            .arg(program("export"))
            .args([path("in"), path("out")])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = export.id().to_string();
        let begun = Instant::now();
        while names(folder.path()).len() == 1 {
            assert!(begun.elapsed() < Duration::from_secs(60), "no file begins");
            std::thread::sleep(Duration::from_millis(1));
        }
        for signal in signals {
            assert_eq!(names(folder.path()).len(), 2, "it has ended before {signal}");
            assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(export.wait().unwrap().signal(), Some(ended_by), "{start} {signals:?}");
        assert_eq!(names(folder.path()), ["in"], "{start} {signals:?}");
    }
}

#[test]
fn bench_writes_the_rows_that_were_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("bench.json");
    let arguments = ["--size", "64K", "--repeats", "3", "--rows", "fast,scalar/amax,cpu", "--json"];
    let done = run("bench", &[&arguments[..], &[json.to_str().unwrap()]].concat());
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["schema"], 1);
    assert_eq!(report["date"].as_str().unwrap().len(), "2000-01-01T00:00:00Z".len());
    assert_eq!(report["settings"], serde_json::json!({ "size": 65536, "repeats": 3 }));
    assert!(report["machine"]["cores"].as_u64().unwrap() >= 1);
    assert!(report["command"].as_array().unwrap().len() > 8);
    let rows = report["rows"].as_array().unwrap();
    let passes = |by: &str, threads: u64| -> Vec<(&str, u64)> {
        rows.iter()
            .filter(|row| row["implementation"] == by && row["threads"] == threads)
            .map(|row| (row["pass"].as_str().unwrap(), row["bytes_per_element"].as_u64().unwrap()))
            .collect()
    };
    let all = [
        ("copy", 4),
        ("amax", 2),
        ("cast-e4m3", 3),
        ("cast-e5m2", 3),
        ("adamw-remainder", 26),
        ("adamw-remainder-emit", 27),
        ("adamw-copy", 28),
        ("adamw-bf16-moments", 18),
    ];
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    for threads in [1, cores] {
        assert_eq!(passes("fast", threads), all);
        assert_eq!(passes("cpu", threads), all);
        assert_eq!(passes("scalar", threads), [("amax", 2)]);
    }
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("seconds") > 0.0 && number("ratio") > 0.0, "{row}");
        assert!(number("seconds_min") <= number("seconds"), "{row}");
        assert!(number("seconds") <= number("seconds_max"), "{row}");
        let bytes = number("elements") * number("bytes_per_element");
        assert!((number("gb_per_s") * 1e9 * number("seconds") / bytes - 1.0).abs() < 1e-6, "{row}");
    }
    // The table has a line each, after the machine and the head (and a warning in debug builds).
    let lines = String::from_utf8(done.stdout).unwrap().lines().count();
    assert!((rows.len() + 2..=rows.len() + 3).contains(&lines), "{lines} lines");
}

#[test]
fn bench_refuses_what_it_does_not_know() {
    failed(&run("bench", &["--rows", "fast,quick"]), 2, "there are no rows `quick`");
    failed(&run("bench", &["--rows", "cpu/nothing"]), 2, "there are no rows `cpu/nothing`");
    failed(&run("bench", &["--size", "12"]), 2, "such as 256M");
    failed(&run("bench", &["--size", "huge"]), 2, "such as 256M");
    failed(&run("bench", &["--repeats", "0"]), 2, "0 is not in 1..=1000");
    failed(&run("bench", &["--rows", "fast,quick"]), 2, "Usage: bench");
    failed(&run("bench", &["--gather"]), 1, "start --gather with two or more");
    let missing = ["--size", "1K", "--rows", "fast/copy", "--json", "/no such folder/x.json"];
    let done = run("bench", &missing);
    failed(&done, 1, "cannot write into the folder of /no such folder/x.json");
}

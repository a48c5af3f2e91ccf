//! `doctor`, and `export` and `bench` with ranks that are processes, on the CPU.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::process::{Command, Output, Stdio};

use support::{Tensor, elements, names, program, run, safetensors};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Starts a program once per rank of a world, as a launcher does, and waits for all.
fn ranks(world: u32, name: &str, arguments: &[&str]) -> Vec<Output> {
    each_rank(world, name, |_| arguments.iter().map(ToString::to_string).collect())
}

/// The same with arguments of each rank's own.
fn each_rank(world: u32, name: &str, arguments: impl Fn(u32) -> Vec<String>) -> Vec<Output> {
    static JOBS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = JOBS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let job = format!("{name}-{}-{number}", std::process::id());
    let start = |rank: u32| {
        let mut command = Command::new(program(name));
        command.args(arguments(rank)).env("RUST_BACKTRACE", "1").env("GATHER8_JOB", &job);
        command.env("GATHER8_WORLD", world.to_string()).env("GATHER8_RANK", rank.to_string());
        for variable in ["GATHER8_LOCAL_WORLD", "GATHER8_LOCAL_RANK"] {
            let value = if variable.ends_with("WORLD") { world } else { rank };
            command.env(variable, value.to_string());
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..world).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

#[test]
fn doctor_says_what_can_run() {
    let report = run("doctor", &[]);
    assert_eq!(report.status.code(), Some(0));
    assert!(report.stderr.is_empty(), "{}", text(&report.stderr));
    let said = text(&report.stdout);
    let build = if cfg!(feature = "cuda") { "is compiled in" } else { "is not compiled in" };
    for part in [build, "cores", "instructions", "a world of 1", "--device cpu can run"] {
        assert!(said.contains(part), "{part:?} is missing in {said}");
    }
    assert_eq!(run("doctor", &["--device", "cpu"]).status.code(), Some(0));
    let json = run("doctor", &["--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(json["findings"].as_array().unwrap().len() >= 3);
    assert!(json["cpu"].is_null());
}

/// On a machine without a GPU, whatever the build; where there is one, `doctor` may well succeed.
#[test]
fn doctor_says_what_keeps_a_gpu_from_running() {
    let asked = run("doctor", &["--device", "cuda"]);
    if asked.status.code() == Some(0) {
        assert!(text(&asked.stdout).contains("--device cuda can run"));
        return;
    }
    assert_eq!(asked.status.code(), Some(1));
    assert!(text(&asked.stdout).contains("--device cuda cannot run"));
    let problem = text(&asked.stderr);
    assert_eq!(problem.lines().count(), 1, "{problem}");
    assert!(problem.starts_with("doctor: "), "{problem}");
    let remedy = if cfg!(feature = "cuda") { "install" } else { "--features cuda" };
    assert!(problem.contains(remedy), "{problem}");
    for (name, arguments) in
        [("export", vec!["a", "b", "--device", "cuda"]), ("bench", vec!["--device", "cuda"])]
    {
        let refused = run(name, &arguments);
        assert_eq!(refused.status.code(), Some(1));
        let said = text(&refused.stderr);
        assert!(said.lines().count() == 1 && said.contains(remedy), "{said}");
    }
}

#[test]
fn doctor_names_variables_that_contradict_each_other() {
    let mut command = Command::new(program("doctor"));
    let asked = command.args(["--device", "cpu"]).env("RANK", "1").output().unwrap();
    assert_eq!(asked.status.code(), Some(1));
    let problem = text(&asked.stderr);
    assert!(problem.lines().count() == 1 && problem.contains("WORLD_SIZE"), "{problem}");
}

#[test]
fn export_over_processes_writes_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let values = |count: usize| (0..count).map(|i| (i as f32 - 7.0) * 0.37);
    let tensors: Vec<Tensor<'_>> = vec![
        ("a", "BF16", &[5, 3], elements("BF16", values(15))),
        ("b", "F32", &[2, 7], elements("F32", values(14))),
        ("bias", "F32", &[3], elements("F32", values(3))),
        ("c", "F16", &[1, 9], elements("F16", values(9))),
    ];
    std::fs::write(path("in"), safetensors(&tensors, &[("made", "by hand")])).unwrap();
    let done = run("export", &[&path("in"), &path("threads"), "--ranks", "4"]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    for world in [2, 3] {
        let outputs = ranks(world, "export", &[&path("in"), &path("processes")]);
        for (rank, output) in outputs.iter().enumerate() {
            assert_eq!(output.status.code(), Some(0), "{rank}: {}", text(&output.stderr));
            let said = text(&output.stdout);
            let expected = format!("3 tensors in e4m3 over {world} ranks, 1 unchanged");
            assert_eq!(said.contains(&expected), rank == 0, "{said}");
        }
        let read = |name| std::fs::read(path(name)).unwrap();
        assert!(read("threads") == read("processes"), "{world} processes wrote another file");
        std::fs::remove_file(path("processes")).unwrap();
    }
}

#[test]
fn export_over_processes_fails_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let tensors: Vec<Tensor<'_>> = vec![
        ("good", "F32", &[2, 2], elements("F32", [1.0; 4])),
        ("bad", "BF16", &[3, 1], elements("BF16", [1.0, 2.0, f32::NAN])),
    ];
    std::fs::write(path("nan"), safetensors(&tensors, &[])).unwrap();
    let fails = |arguments: &[&str], problem: &str| {
        for (rank, output) in ranks(3, "export", arguments).iter().enumerate() {
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{rank}: {said}");
            assert!(said.starts_with(&format!("export: rank {rank}: ")), "{said}");
            assert!(said.lines().count() == 1 && said.contains(problem), "{rank}: {said}");
        }
        assert_eq!(names(folder.path()), ["nan"]);
    };
    fails(&[&path("nan"), &path("out")], "`bad` holds a NaN");
    // Rank 0 alone meets it.
    fails(&[&path("nan"), &path("no folder/out")], "cannot write into the folder");
    fails(&[&path("missing"), &path("out")], "cannot open");
    fails(&[&path("nan"), &path("out"), "--ranks", "2"], "ranks are processes here");

    // Inputs that differ between the ranks: in a weight's values alone, and in how many there are.
    let matrix = |x: f32| ("w", "F32", &[8_u64, 16][..], elements("F32", [x; 128]));
    let one = safetensors(&[matrix(1.0)], &[]);
    let another = safetensors(&[matrix(-2.0)], &[]);
    let many: Vec<String> = (0..300).map(|n| format!("m{n}")).collect();
    let many: Vec<Tensor<'_>> =
        many.iter().map(|name| (&**name, "BF16", &[1_u64, 1][..], vec![0, 0])).collect();
    for (other, problem) in [(another, "data hashes to"), (safetensors(&many, &[]), "an input of ")]
    {
        for (rank, bytes) in [&one, &other].into_iter().enumerate() {
            std::fs::create_dir_all(path(&rank.to_string())).unwrap();
            std::fs::write(path(&format!("{rank}/in")), bytes).unwrap();
        }
        let outputs = each_rank(2, "export", |rank| vec![path(&format!("{rank}/in")), path("out")]);
        for output in outputs {
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("started differently") && said.contains(problem), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
        assert!(!std::fs::exists(path("out")).unwrap());
    }
}

#[test]
fn bench_measures_gathers_between_processes() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("gather.json");
    let arguments = ["--gather", "--divide", "4096", "--repeats", "2", "--json"];
    let outputs = ranks(2, "bench", &[&arguments[..], &[json.to_str().unwrap()]].concat());
    for output in &outputs {
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    assert!(outputs[1].stdout.is_empty(), "rank 0 alone prints");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let gathers = report["gathers"].as_array().unwrap();
    assert_eq!(gathers.len(), 10);
    for row in gathers {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("raw_seconds") > 0.0 && number("unshard_seconds") > 0.0, "{row}");
        let bytes = if row["dtype"] == "float8" { 1.0 } else { 2.0 };
        assert_eq!(number("bytes"), number("parameters") * bytes, "{row}");
    }
    let figures: Vec<_> =
        report["figures"].as_array().unwrap().iter().map(|f| f["what"].as_str().unwrap()).collect();
    assert_eq!(figures[0], "sync of 560 x 3 slots");
    assert_eq!(figures.len(), 4);
    let alone = ranks(2, "bench", &["--rows", "fast/amax"]);
    assert!(text(&alone[1].stderr).contains("give --gather"), "{}", text(&alone[1].stderr));
}

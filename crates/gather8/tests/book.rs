//! What the book shows of the interface compiles, runs, and stands in the book as it stands here.

#![allow(
    clippy::indexing_slicing,
    clippy::redundant_closure,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and the book names a closure's arguments"
)]

use gather8::collectives::{JoinOptions, Launch, LocalWorld, TcpWorld};
use gather8::config::{GroupConfig, NO_DECAY_GROUP};
use gather8::kernels::cpu::Cpu;
use gather8::kernels::{Backend, DType, Format, Memory, Span, Tensor};
use gather8::{Config, Fsdp, Phase, Scaling, Schedule, UnitSpec, WeightId, WeightSpec};

/// A page of the book; `None` in a packaged crate, which comes without it.
fn page(name: &str) -> Option<String> {
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    docs.is_dir().then(|| std::fs::read_to_string(docs.join(name)).unwrap())
}

/// Blocks of a page that are marked with `language`.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if line == format!("```{language}") {
            blocks.push(
                lines.by_ref().take_while(|line| *line != "```").collect::<Vec<_>>().join("\n"),
            );
        }
    }
    blocks
}

/// Lines without the white space around them, and without comments at their end.
fn bare(text: &str) -> String {
    let bare = text.lines().map(|line| line.split(" //").next().unwrap_or(line).trim());
    bare.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_example_of_the_book_stands_here() {
    let here = bare(include_str!("book.rs"));
    for (name, count) in [("embedding.md", 5), ("operating.md", 1)] {
        let Some(page) = page(name) else { return };
        let blocks = blocks(&page, "rust,ignore");
        assert_eq!(blocks.len(), count, "{name}");
        // What needs the feature `cuda` is compiled there.
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let of_gpus = crates.join("gather8-collectives/tests/lent.rs");
        let here = here.clone() + "\n" + &bare(&std::fs::read_to_string(of_gpus).unwrap());
        for block in blocks {
            assert!(here.contains(&bare(&block)), "{name} shows what is not here:\n{block}");
        }
    }
}

#[test]
fn the_configuration_of_the_book_is_the_default_one() {
    let Some(page) = page("embedding.md") else { return };
    let [_, text] = &blocks(&page, "toml")[..] else { panic!("a manifest, a configuration") };
    let config: Config = toml::from_str(text).unwrap();
    config.check().unwrap();
    let mut default = Config::default();
    default.scaling = Scaling::delayed();
    default.optimizer.groups = config.optimizer.groups.clone();
    assert_eq!(config, default);
    assert_eq!(config.optimizer.group("default"), Some(GroupConfig::default()));
    assert_eq!(config.optimizer.group(NO_DECAY_GROUP).map(|group| group.weight_decay), Some(0.0));
    assert!(toml::from_str::<Config>("deadlin = 1.0").is_err(), "unknown keys are denied");
}

fn initial_values(
    spec: &WeightSpec,
    rows: std::ops::Range<u64>,
) -> Result<Vec<f32>, std::fmt::Error> {
    Ok(vec![0.5; (rows.end - rows.start) as usize * spec.row_elements() as usize])
}

fn describe(world: &LocalWorld, rank: u32) -> gather8::Result<Fsdp<Cpu>> {
    let (layers, vocabulary, width) = (2, 16, 8);
    let backend = Cpu::new();
    let communicator = world.rank(rank, backend.clone())?;
    let mut config = Config::default();
    config.scaling = Scaling::delayed();
    let block = |n| {
        let norm = WeightSpec::plain(format!("block.{n}.norm"), [width]);
        let qkv = WeightSpec::float8(format!("block.{n}.qkv"), [3 * width, width]);
        UnitSpec::new(format!("block.{n}"), [norm, qkv])
    };
    let embedding = WeightSpec::plain("embedding", [vocabulary, width]);
    let fsdp = Fsdp::builder(config, backend, communicator)
        .unit(UnitSpec::new("root", [embedding]).held())
        .units((0..layers).map(block))
        .input_slot("block.0.input", Format::E4m3)
        .build(|spec, rows| initial_values(spec, rows))?;
    Ok(fsdp)
}

fn without_hooks(fsdp: &Fsdp<Cpu>, schedule: Schedule) -> gather8::Result<u64> {
    let (microbatches, step) = (2, 0);
    let ids: Vec<WeightId> =
        fsdp.weights().map(|spec| fsdp.weight_id(&spec.name)).collect::<Result<_, _>>()?;
    fsdp.begin_step(microbatches)?;
    for _ in 0..microbatches {
        for &id in &ids {
            let view = fsdp.weight(id, Phase::Forward)?;
            assert_eq!(view.to_f32()?[0], 0.5);
        }
        for &id in ids.iter().rev() {
            let view = fsdp.weight(id, Phase::Backward)?;
            let gradient = view.to_f32()?;
            fsdp.gradient(id, &gradient)?;
        }
        fsdp.finish_backward()?;
    }
    fsdp.scale_lr(schedule.factor(step))?;
    fsdp.step()?;
    fsdp.sync()?;
    let report = fsdp.report()?;
    Ok(report.steps)
}

fn as_graph(fsdp: &Fsdp<Cpu>, schedule: Schedule) -> gather8::Result<u64> {
    let (backend, steps) = (fsdp.backend(), 5);
    let gradients = fsdp.weights().map(|spec| {
        let buffer = backend.alloc(spec.elements() * 4, Memory::Device)?;
        Tensor::new(Span::whole(&buffer), DType::F32)
    });
    let gradients = &gradients.collect::<Result<Vec<_>, _>>()?[..];
    let ids = fsdp.weights().map(|spec| fsdp.weight_id(&spec.name));
    let ids = &ids.collect::<Result<Vec<WeightId>, _>>()?[..];
    let step = || -> gather8::Result<()> {
        for id in ids {
            fsdp.weight(*id, Phase::Forward)?;
        }
        for (id, gradient) in ids.iter().zip(gradients).rev() {
            fsdp.weight(*id, Phase::Backward)?;
            fsdp.gradient_from(*id, gradient)?;
        }
        fsdp.step()?;
        fsdp.sync()
    };
    step()?;
    let captured = fsdp.capture(step)?;
    for number in 2..steps {
        fsdp.scale_lr(schedule.factor(number))?;
        fsdp.replay(&captured)?;
    }
    Ok(fsdp.report()?.steps)
}

fn with_hooks(fsdp: &Fsdp<Cpu>) -> gather8::Result<Vec<u8>> {
    let (unit, next) = (fsdp.unit_id("block.0")?, fsdp.unit_id("block.1")?);
    let id = fsdp.weight_id("block.0.qkv")?;
    let guard = fsdp.unshard(unit)?;
    fsdp.prefetch(next)?;
    let view = guard.weight(id)?;
    let bytes = view.to_bytes()?;
    guard.reshard()?;
    Ok(bytes)
}

#[test]
fn a_graph_of_the_book_counts_its_steps() {
    let fsdp = describe(&LocalWorld::new(1), 0).unwrap();
    assert_eq!(as_graph(&fsdp, Schedule::default()).unwrap(), 5);
    assert_eq!(fsdp.version(fsdp.weight_id("block.1.qkv").unwrap()).unwrap(), 6);
}

#[test]
fn the_examples_run() {
    let world = LocalWorld::new(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let world = &world;
            scope.spawn(move || {
                let fsdp = describe(world, rank).unwrap();
                assert_eq!(with_hooks(&fsdp).unwrap(), [0x7e; 192], "all are the amax");
                assert_eq!(without_hooks(&fsdp, Schedule::cosine(0, 10)).unwrap(), 1);
            });
        }
    });
}

/// Compiled only: it would take its rank from the environment of the tests.
#[allow(dead_code)]
fn processes(config: Config, cpu: Cpu) -> gather8::Result<gather8::FsdpBuilder<Cpu>> {
    let launch = Launch::from_env()?;
    let world = TcpWorld::join(&launch, &JoinOptions::from_env()?)?;
    let fsdp = Fsdp::builder(config, cpu.clone(), world.communicator(cpu));
    Ok(fsdp)
}

//! What `export` writes: the right codes and scales, the same at every number of ranks.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use gather8_examples::export::{Options, Progress, Silent, Summary, export};
use gather8_kernels::Format;
use safetensors::{Dtype, SafeTensors};
use support::{Random, Tensor, elements, names, safetensors, values};

const RANKS: [u32; 5] = [1, 2, 3, 5, 8];

fn options(ranks: u32, format: Format) -> Options {
    Options { ranks, format }
}

/// Matrices of every type, with more and fewer rows than ranks, and what passes through.
fn model() -> Vec<Tensor<'static>> {
    let mut random = Random(1);
    let mut matrix = |name, dtype, shape: &'static [u64], magnitude: f32| {
        let count = shape.iter().product::<u64>();
        let values = (0..count).map(|_| {
            let wide = f32::powi(2.0, -(random.below(20) as i32));
            random.signed() * magnitude * wide
        });
        (name, dtype, shape, elements(dtype, values.collect::<Vec<_>>()))
    };
    let mut tensors = vec![
        matrix("b.weight", "BF16", &[13, 10], 3.0),
        matrix("a.weight", "F32", &[7, 33], 1e-3),
        matrix("c.weight", "F16", &[1, 57], 100.0),
        matrix("one", "F32", &[1, 1], 1.0),
        matrix("row", "BF16", &[1, 40], 1e-20),
        matrix("column", "F16", &[40, 1], 1.0),
        matrix("large", "F32", &[5, 5], 3e38),
        matrix("a.bias", "F32", &[7], 1.0),
        matrix("kernel", "BF16", &[2, 3, 4], 1.0),
    ];
    tensors.push(("zeros", "F32", &[3, 3], vec![0; 36]));
    tensors.push(("signed zeros", "BF16", &[1, 2], vec![0, 0x80, 0, 0]));
    tensors.push(("subnormal", "F16", &[2, 1], vec![1, 0, 3, 0x80]));
    tensors.push(("scalar", "F32", &[], vec![1, 2, 3, 4]));
    tensors.push(("double", "F64", &[1, 1], vec![9; 8]));
    tensors.push(("ids", "I64", &[2, 1], vec![7; 16]));
    tensors.push(("empty", "F32", &[0, 4], vec![]));
    tensors.push(("odd", "U8", &[3], vec![1, 2, 3]));
    tensors.push(("float8", "F8_E4M3", &[2, 2], vec![0x7f, 0, 1, 2]));
    // A NaN is nobody's business here: no scale is formed.
    tensors.push(("nan.bias", "F32", &[1], vec![0, 0, 0xc0, 0x7f]));
    tensors
}

const METADATA: [(&str, &str); 3] =
    [("format", "pt"), ("z \"quoted\"", "two\nlines"), ("a", "\u{fc}")];

fn is_matrix(tensor: &Tensor<'_>) -> bool {
    let (_, dtype, shape, bytes) = tensor;
    shape.len() == 2 && !bytes.is_empty() && ["F32", "F16", "BF16"].contains(dtype)
}

/// The code whose value is nearest, the even one of two: found by looking at all of them.
fn nearest(format: Format, value: f32) -> u8 {
    let magnitude = f64::from(value).abs();
    let distance = |code: &u8| (f64::from(format.decode(*code)) - magnitude).abs();
    let codes = (0..=0x7f_u8).filter(|&code| format.decode(code).is_finite());
    let best = codes.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    best.unwrap() | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// Codes and the factor that decodes them, by the rule as it is written in the documents.
fn quantised(format: Format, values: &[f32]) -> (Vec<u8>, f32) {
    let largest = f64::from(format.max());
    let amax = values.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max);
    let scale = ((largest / amax.max(1e-12)) as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
    let codes =
        values.iter().map(|x| nearest(format, (x * scale).clamp(-format.max(), format.max())));
    (codes.collect(), 1.0 / scale)
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn codes_and_scales_are_those_of_the_stored_values_at_every_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let model = model();
    let input = write(folder.path(), "in", &safetensors(&model, &METADATA));
    for (format, dtype) in [(Format::E4m3, Dtype::F8_E4M3), (Format::E5m2, Dtype::F8_E5M2)] {
        let mut files = Vec::new();
        for ranks in RANKS {
            let output = folder.path().join(format!("out-{ranks}"));
            let summary = export(&input, &output, options(ranks, format), &mut Silent).unwrap();
            let file = std::fs::read(&output).unwrap();
            let sizes = (std::fs::metadata(&input).unwrap().len(), file.len() as u64);
            assert_eq!(summary, Summary { converted: 10, unchanged: 9, bytes: sizes });
            files.push(file);
        }
        assert!(files.iter().all(|file| *file == files[0]), "{format:?}: ranks change the file");

        let written = SafeTensors::deserialize(&files[0]).unwrap();
        assert_eq!(written.len(), model.len() + 10);
        for tensor in &model {
            let (name, stored, shape, bytes) = tensor;
            let found = written.tensor(name).unwrap();
            let dimensions: Vec<_> = found.shape().iter().map(|&n| n as u64).collect();
            assert_eq!(dimensions, *shape, "{name}");
            if !is_matrix(tensor) {
                assert_eq!(found.dtype().to_string(), *stored, "{name}");
                assert_eq!(found.data(), bytes, "{name}");
                continue;
            }
            let (codes, decodes) = quantised(format, &values(stored, bytes));
            assert_eq!(found.dtype(), dtype, "{name}");
            assert_eq!(found.data(), codes, "{name} as {format:?}");
            let scale = written.tensor(&format!("{name}_scale")).unwrap();
            assert_eq!((scale.dtype(), scale.shape()), (Dtype::F32, &[][..]), "{name}");
            assert_eq!(scale.data(), decodes.to_le_bytes(), "scale of {name}");
        }
        let (_, header) = SafeTensors::read_metadata(&files[0]).unwrap();
        let pairs = header.metadata().clone().unwrap();
        let expected = METADATA.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(BTreeMap::from_iter(pairs), BTreeMap::from(expected));
    }
}

#[test]
fn f32_and_f16_weights_do_not_pass_through_bf16() {
    let folder = tempfile::tempdir().unwrap();
    // In BF16 the amax would be 1; in F16 and F32 the eleventh bit counts.
    let values = [1.0 + 1.0 / 1024.0, 0.5];
    for dtype in ["F32", "F16"] {
        let file = safetensors(&[("w", dtype, &[1, 2], elements(dtype, values))], &[]);
        let input = write(folder.path(), "in", &file);
        let output = folder.path().join("out");
        export(&input, &output, options(2, Format::E4m3), &mut Silent).unwrap();
        let bytes = std::fs::read(&output).unwrap();
        let scale = SafeTensors::deserialize(&bytes).unwrap();
        let scale = scale.tensor("w_scale").unwrap().data().to_vec();
        let scale = f32::from_le_bytes(scale.try_into().unwrap());
        assert_eq!(scale, 1.0 / (448.0 / (1.0 + 1.0 / 1024.0_f64)) as f32, "{dtype}");
    }
}

#[test]
fn many_small_matrices_are_converted_in_batches() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = (0..700).map(|i| (format!("w{i}"), [i as f32 + 1.0])).collect();
    let tensors: Vec<Tensor<'_>> = tensors
        .iter()
        .map(|(name, value)| (&**name, "F32", &[1_u64, 1][..], elements("F32", *value)))
        .collect();
    let input = write(folder.path(), "in", &safetensors(&tensors, &[]));
    let output = folder.path().join("out");
    export(&input, &output, options(3, Format::E4m3), &mut Silent).unwrap();
    let bytes = std::fs::read(&output).unwrap();
    let written = SafeTensors::deserialize(&bytes).unwrap();
    for (name, _, _, value) in &tensors {
        let value = f32::from_le_bytes(value[..].try_into().unwrap());
        assert_eq!(written.tensor(name).unwrap().data(), [0x7e], "{name}: its own amax is 448");
        let scale = written.tensor(&format!("{name}_scale")).unwrap().data().to_vec();
        let expected = 1.0 / ((448.0 / f64::from(value)) as f32);
        assert_eq!(f32::from_le_bytes(scale.try_into().unwrap()), expected, "{name}");
    }
}

#[test]
fn a_nan_or_an_infinity_is_named_and_leaves_no_file() {
    for (dtype, bad) in [
        ("F32", f32::NAN),
        ("F32", f32::NEG_INFINITY),
        ("F16", f32::INFINITY),
        ("F16", f32::NAN),
        ("BF16", f32::NAN),
        ("BF16", f32::INFINITY),
    ] {
        for ranks in [1, 3, 8] {
            let folder = tempfile::tempdir().unwrap();
            let mut weights = vec![1.0; 20];
            weights[17] = bad;
            let tensors: Vec<Tensor<'_>> = vec![
                ("good.weight", "F32", &[5, 1], elements("F32", [1.0; 5])),
                ("bad.weight", dtype, &[10, 2], elements(dtype, weights)),
            ];
            let input = write(folder.path(), "in", &safetensors(&tensors, &[]));
            let output = folder.path().join("out");
            let result = export(&input, &output, options(ranks, Format::E4m3), &mut Silent);
            let text = format!("{:#}", result.unwrap_err());
            assert!(text.contains("`bad.weight` holds a NaN or an infinity"), "{ranks}: {text}");
            assert!(!text.contains("good.weight"), "{text}");
            assert_eq!(names(folder.path()), ["in"], "{dtype} {bad} at {ranks} ranks");
        }
    }
}

#[test]
fn every_bad_matrix_is_named_whatever_the_batches() {
    let folder = tempfile::tempdir().unwrap();
    let shape: &[u64] = &[1025, 512];
    let bad = |at: usize| {
        let mut values = vec![1.0; 1025 * 512];
        values[at] = f32::NAN;
        elements("BF16", values)
    };
    let good = elements("BF16", vec![1.0; 1025 * 512]);
    // Two fit into a batch of one rank, and one into one of several, which pad the rows.
    let tensors: Vec<Tensor<'_>> = vec![
        ("a", "BF16", shape, bad(0)),
        ("b", "BF16", shape, good.clone()),
        ("c", "BF16", shape, good),
        ("d", "BF16", shape, bad(1025 * 512 - 1)),
        ("e", "BF16", shape, bad(77_777)),
        ("large", "BF16", &[1026, 1024], elements("BF16", vec![1.0; 1026 * 1024])),
    ];
    let input = write(folder.path(), "in", &safetensors(&tensors, &[]));
    let output = folder.path().join("out");
    for ranks in [1, 2, 8] {
        let result = export(&input, &output, options(ranks, Format::E4m3), &mut Silent);
        let text = format!("{:#}", result.unwrap_err());
        assert!(text.starts_with("`a`, `d`, `e` hold a NaN or an infinity"), "{ranks}: {text}");
        assert_eq!(names(folder.path()), ["in"]);
    }
}

#[test]
fn a_name_that_a_scale_needs_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<Tensor<'_>> =
        vec![("x_scale", "I32", &[], vec![0; 4]), ("x", "F32", &[1, 1], elements("F32", [1.0]))];
    let input = write(folder.path(), "in", &safetensors(&tensors, &[]));
    let output = folder.path().join("out");
    let result = export(&input, &output, options(2, Format::E4m3), &mut Silent);
    let text = format!("{:#}", result.unwrap_err());
    assert!(text.contains("`x_scale`") && text.contains("`x`"), "{text}");
    assert_eq!(names(folder.path()), ["in"]);
    // A tensor that gets no scale needs no name for it.
    let tensors: Vec<Tensor<'_>> =
        vec![("x_scale", "I32", &[], vec![0; 4]), ("x", "F32", &[1], elements("F32", [1.0]))];
    let input = write(folder.path(), "in", &safetensors(&tensors, &[]));
    export(&input, &output, options(2, Format::E4m3), &mut Silent).unwrap();
}

#[test]
fn an_earlier_output_is_replaced_by_a_whole_one_or_kept() {
    let folder = tempfile::tempdir().unwrap();
    let good = [("w", "F32", &[1_u64, 1][..], elements("F32", [1.0]))];
    let bad = [("w", "F32", &[1_u64, 1][..], elements("F32", [f32::NAN]))];
    let good = write(folder.path(), "good", &safetensors(&good, &[]));
    let bad = write(folder.path(), "bad", &safetensors(&bad, &[]));
    let output = write(folder.path(), "out", b"earlier");
    export(&bad, &output, options(2, Format::E4m3), &mut Silent).unwrap_err();
    assert_eq!(std::fs::read(&output).unwrap(), b"earlier");
    export(&good, &output, options(2, Format::E4m3), &mut Silent).unwrap();
    assert!(SafeTensors::deserialize(&std::fs::read(&output).unwrap()).is_ok());
    assert_eq!(names(folder.path()), ["bad", "good", "out"]);
}

#[test]
fn outputs_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = [("w", "F32", &[1_u64, 1][..], elements("F32", [1.0]))];
    let input = write(folder.path(), "in", &safetensors(&file, &[]));
    std::fs::hard_link(&input, folder.path().join("same")).unwrap();
    std::fs::create_dir(folder.path().join("folder")).unwrap();
    for (output, problem) in [
        ("in", "is the input itself"),
        ("same", "is the input itself"),
        ("folder", "is no regular file"),
        ("nowhere/out", "cannot write into the folder of"),
        ("in/out", "cannot write into the folder of"),
        ("..", "names no file"),
    ] {
        let output = folder.path().join(output);
        let result = export(&input, &output, options(2, Format::E4m3), &mut Silent);
        let text = format!("{:#}", result.unwrap_err());
        assert!(text.contains(problem), "{text}");
        assert_eq!(names(folder.path()), ["folder", "in", "same"]);
    }
    let result = export(&input, &folder.path().join("out"), options(0, Format::E4m3), &mut Silent);
    assert!(result.unwrap_err().to_string().contains("0 ranks"));
}

#[derive(Default)]
struct Counting {
    total: u64,
    done: u64,
    ended: bool,
}

impl Progress for Counting {
    fn begin(&mut self, bytes: u64) {
        self.total = bytes;
    }

    fn advance(&mut self, bytes: u64) {
        assert!(!self.ended);
        self.done += bytes;
    }

    fn end(&mut self) {
        self.ended = true;
    }
}

#[test]
fn progress_ends_at_the_size_of_the_data() {
    let folder = tempfile::tempdir().unwrap();
    let model = model();
    let input = write(folder.path(), "in", &safetensors(&model, &[]));
    let mut counting = Counting::default();
    export(&input, &folder.path().join("out"), options(2, Format::E5m2), &mut counting).unwrap();
    let bytes: usize = model.iter().map(|(_, _, _, bytes)| bytes.len()).sum();
    assert_eq!((counting.total, counting.done, counting.ended), (bytes as u64, bytes as u64, true));
}

//! What stands where in the output: decided before the first byte of data is read.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use anyhow::{Result, bail};
use gather8_kernels::{DType, Format};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use super::source::{LENGTH_BYTES, Source};

/// The longest header that readers accept.
const LONGEST_HEADER: usize = 100_000_000;

/// A matrix that becomes float8.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    /// Its number in the source.
    pub(super) tensor: usize,
    /// How it is stored there.
    pub(super) dtype: DType,
    /// Where its codes go, counted from the start of the file.
    pub(super) codes: u64,
    /// Where its scale goes.
    pub(super) scale: u64,
}

/// The output's header, and where everything goes.
pub(super) struct Layout {
    header: Vec<u8>,
    matrices: Vec<Matrix>,
    copies: Vec<(Range<u64>, u64)>,
    file_bytes: u64,
}

/// A tensor of the output.
struct Planned {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: usize,
    content: Content,
}

enum Content {
    Copy(Range<u64>),
    Codes(usize),
    Scale(usize),
}

impl Layout {
    /// Orders the tensors as the safetensors library does, so that all are aligned: by their types'
    /// alignment, widest first, then by name.
    pub(super) fn new(source: &Source, format: Format) -> Result<Self> {
        let float8 = match format {
            Format::E4m3 => Dtype::F8_E4M3,
            Format::E5m2 => Dtype::F8_E5M2,
        };
        let names: HashSet<&str> = source.tensors().iter().map(|entry| &*entry.name).collect();
        let mut matrices = Vec::new();
        let mut planned = Vec::new();
        for (tensor, entry) in source.tensors().iter().enumerate() {
            let (name, shape) = (entry.name.clone(), entry.shape.clone());
            let Some(dtype) = entry.matrix() else {
                let bytes = usize::try_from(entry.range.end - entry.range.start)?;
                let content = Content::Copy(entry.range.clone());
                planned.push(Planned { name, dtype: entry.dtype, shape, bytes, content });
                continue;
            };
            let scale = format!("{name}_scale");
            if names.contains(&*scale) {
                bail!(
                    "the input has a tensor `{scale}`, the name that the scale of `{name}` needs: rename it, or convert a file that is not converted yet"
                );
            }
            let number = matrices.len();
            matrices.push(Matrix { tensor, dtype, codes: 0, scale: 0 });
            planned.push(Planned {
                name,
                dtype: float8,
                bytes: shape.iter().product(),
                shape,
                content: Content::Codes(number),
            });
            planned.push(Planned {
                name: scale,
                dtype: Dtype::F32,
                shape: Vec::new(),
                bytes: size_of::<f32>(),
                content: Content::Scale(number),
            });
        }
        planned.sort_by(|a, b| (Reverse(a.dtype), &a.name).cmp(&(Reverse(b.dtype), &b.name)));

        let header = header(source.metadata(), &planned)?;
        let mut at = header.len() as u64;
        let mut copies = Vec::new();
        for tensor in planned {
            match tensor.content {
                Content::Copy(range) => copies.push((range, at)),
                Content::Codes(number) => {
                    if let Some(matrix) = matrices.get_mut(number) {
                        matrix.codes = at;
                    }
                }
                Content::Scale(number) => {
                    if let Some(matrix) = matrices.get_mut(number) {
                        matrix.scale = at;
                    }
                }
            }
            at += tensor.bytes as u64;
        }
        copies.sort_by_key(|(range, _)| range.start);
        Ok(Self { header, matrices, copies, file_bytes: at })
    }

    /// The length and the header, as the file begins.
    pub(super) fn header(&self) -> &[u8] {
        &self.header
    }

    /// Every matrix, in the order of the input.
    pub(super) fn matrices(&self) -> &[Matrix] {
        &self.matrices
    }

    /// What passes through: from where, to where; in the order of the input.
    pub(super) fn copies(&self) -> impl Iterator<Item = (Range<u64>, u64)> {
        self.copies.iter().cloned()
    }

    /// Size of the output.
    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }
}

/// Written here and not by the library, which wants the tensors in memory and writes the metadata
/// in the order of a hash map, another one in every run.
fn header(metadata: Option<&BTreeMap<String, String>>, planned: &[Planned]) -> Result<Vec<u8>> {
    let mut json = serde_json::Map::new();
    if let Some(metadata) = metadata {
        json.insert("__metadata__".to_owned(), serde_json::to_value(metadata)?);
    }
    let mut at = 0;
    let mut text = serde_json::to_string(&json)?;
    text.pop();
    for tensor in planned {
        let info = TensorInfo {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data_offsets: (at, at + tensor.bytes),
        };
        at += tensor.bytes;
        if text.len() > 1 {
            text.push(',');
        }
        text.push_str(&serde_json::to_string(&tensor.name)?);
        text.push(':');
        text.push_str(&serde_json::to_string(&info)?);
    }
    text.push('}');
    let length = text.len().next_multiple_of(LENGTH_BYTES as usize);
    if length > LONGEST_HEADER {
        bail!(
            "the output's header would have {length} bytes; at most {LONGEST_HEADER} can be read back"
        );
    }
    let mut header = (length as u64).to_le_bytes().to_vec();
    header.extend_from_slice(text.as_bytes());
    header.resize(LENGTH_BYTES as usize + length, b' ');
    Ok(header)
}

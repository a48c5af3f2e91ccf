//! A safetensors file, read piece by piece. Only its header is ever in memory whole.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use gather8_kernels::{DType, scalar};
use safetensors::Dtype;

/// Headers above 16 MiB are refused: some 100,000 tensors, far above what files of models hold, while
/// parsing may take twenty times a header's size in memory.
pub const LONGEST_HEADER: u64 = 16 << 20;

/// The header's length stands in front, in so many bytes.
pub(super) const LENGTH_BYTES: u64 = 8;

/// Bytes that are read at once; a whole number of elements of every type.
const CHUNK: usize = 1 << 20;

/// Places in the data that are compared among ranks, evenly spaced, and bytes at each.
const SAMPLES: u128 = 256;
const SAMPLE: u64 = 4096;

/// One tensor of the file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its elements' type.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub range: Range<u64>,
}

impl Entry {
    /// The elements' type as shards are stored, if the tensor is a matrix that is gathered in
    /// float8: two dimensions, neither of them 0, of F32, F16 or BF16.
    pub fn matrix(&self) -> Option<DType> {
        if self.shape.len() != 2 || self.shape.contains(&0) {
            return None;
        }
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// Rows, and elements in a row, of a matrix.
    pub fn rows_and_columns(&self) -> (u64, u64) {
        let dimension = |at: usize| self.shape.get(at).copied().unwrap_or(1) as u64;
        (dimension(0), dimension(1))
    }
}

/// An open file whose header is valid. Ranks share it.
pub struct Source {
    path: PathBuf,
    file: Mutex<File>,
    status: Metadata,
    tensors: Vec<Entry>,
    metadata: Option<BTreeMap<String, String>>,
    data_start: u64,
    /// Of the header's bytes.
    header_digest: blake3::Hash,
}

impl Source {
    /// Opens the file and reads its header.
    ///
    /// # Errors
    /// A file that is missing, unreadable, no regular file, shorter or longer than its header says,
    /// or whose header is no valid safetensors header of at most [`LONGEST_HEADER`] bytes.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let status = fs::metadata(path).with_context(|| format!("cannot open {shown}"))?;
        // Before it is opened: opening a pipe waits for its other end.
        if !status.is_file() {
            bail!("{shown} is no regular file: give the path of a safetensors file");
        }
        let mut file = File::open(path).with_context(|| format!("cannot open {shown}"))?;
        let status = file.metadata().with_context(|| format!("cannot open {shown}"))?;
        let (header, data_start, header_digest) = read_header(&mut file, status.len())
            .with_context(|| format!("{shown} is no valid safetensors file"))?;
        let mut tensors = Vec::new();
        for name in header.offset_keys() {
            let Some(info) = header.info(&name) else { continue };
            let (start, end) = info.data_offsets;
            tensors.push(Entry {
                name,
                dtype: info.dtype,
                shape: info.shape.clone(),
                range: data_start + start as u64..data_start + end as u64,
            });
        }
        // Tensors without elements share their place with others: their names order them.
        tensors.sort_by(|a, b| {
            (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name))
        });
        let metadata = header.metadata().as_ref();
        let metadata = metadata.map(|map| map.clone().into_iter().collect());
        let file = Mutex::new(file);
        let path = path.to_owned();
        Ok(Self { path, file, status, tensors, metadata, data_start, header_digest })
    }

    /// Every tensor, in the order of the data.
    pub fn tensors(&self) -> &[Entry] {
        &self.tensors
    }

    /// The file's own key-value pairs, in the order of the keys.
    pub fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        self.metadata.as_ref()
    }

    /// Size of the file.
    pub fn file_bytes(&self) -> u64 {
        self.status.len()
    }

    /// Size of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.file_bytes() - self.data_start
    }

    /// What makes it another file than another: its size, its header, and samples of its data (all
    /// of it up to a mebibyte), each as a line to compare. Ranks read different rows, so that none
    /// sees whether the others read the same file.
    pub(super) fn describe(&self) -> Result<Vec<String>> {
        let mut hasher = blake3::Hasher::new();
        let length = self.data_bytes();
        let end = self.file_bytes();
        for sample in 0..SAMPLES {
            let at = self.data_start + (u128::from(length) * sample / SAMPLES) as u64;
            self.read_chunks(at..(at + SAMPLE).min(end), |_, chunk| {
                hasher.update(chunk);
                Ok(())
            })?;
        }
        let short = |digest: blake3::Hash| digest.to_hex().chars().take(16).collect::<String>();
        Ok(vec![
            format!("an input of {end} bytes"),
            format!("an input whose header hashes to {}", short(self.header_digest)),
            format!("an input whose data hashes to {} (samples)", short(hasher.finalize())),
        ])
    }

    /// What the system says about the file.
    pub(super) fn status(&self) -> &Metadata {
        &self.status
    }

    /// Reads a range of the file in order, piece by piece; `take` gets each piece and its distance
    /// from the range's start.
    ///
    /// # Errors
    /// What reading or `take` fails with; a file that has become shorter.
    pub fn read_chunks(
        &self,
        range: Range<u64>,
        mut take: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let length = range.end.saturating_sub(range.start);
        let mut buffer = vec![0; usize::try_from(length).unwrap_or(CHUNK).min(CHUNK)];
        let mut done = 0;
        while done < length {
            let left = usize::try_from(length - done).unwrap_or(CHUNK);
            let size = left.min(buffer.len());
            let (chunk, _) = buffer.split_at_mut(size);
            self.read_at(range.start + done, chunk).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    anyhow!("{} has become shorter while it was read", self.path.display())
                }
                _ => anyhow!("cannot read {}: {error}", self.path.display()),
            })?;
            take(done, chunk)?;
            done += size as u64;
        }
        Ok(())
    }

    /// Rows of a matrix, row-major, each element exactly as stored.
    ///
    /// # Errors
    /// As [`read_chunks`](Self::read_chunks).
    pub fn rows(&self, entry: &Entry, dtype: DType, rows: Range<u64>) -> Result<Vec<f32>> {
        let (_, columns) = entry.rows_and_columns();
        let row_bytes = columns * dtype.size();
        let at = |row: u64| entry.range.start + row * row_bytes;
        let elements = rows.end.saturating_sub(rows.start) * columns;
        let mut values = Vec::with_capacity(usize::try_from(elements)?);
        self.read_chunks(at(rows.start)..at(rows.end), |_, chunk| {
            widen(chunk, dtype, &mut values);
            Ok(())
        })?;
        Ok(values)
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(bytes)
    }
}

/// Appends little-endian elements; each has an exact f32.
fn widen(bytes: &[u8], dtype: DType, values: &mut Vec<f32>) {
    let (words, _) = bytes.as_chunks::<4>();
    let (halves, _) = bytes.as_chunks::<2>();
    let halves = halves.iter().map(|&half| u16::from_le_bytes(half));
    match dtype {
        DType::F16 => values.extend(halves.map(scalar::f16_to_f32)),
        DType::Bf16 => values.extend(halves.map(scalar::bf16_to_f32)),
        _ => values.extend(words.iter().map(|&word| f32::from_le_bytes(word))),
    }
}

/// The header, where the data starts, and the header's digest.
fn read_header(
    file: &mut File,
    file_bytes: u64,
) -> Result<(safetensors::tensor::Metadata, u64, blake3::Hash)> {
    if file_bytes < LENGTH_BYTES {
        bail!("it has {file_bytes} bytes, too few for the length of a header");
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > file_bytes - LENGTH_BYTES {
        bail!("its header would have {length} bytes, but the file has {file_bytes} in all");
    }
    if length > LONGEST_HEADER {
        bail!("its header has {length} bytes; at most {LONGEST_HEADER} are read");
    }
    let mut header = vec![0; usize::try_from(length)?];
    file.read_exact(&mut header)?;
    let digest = blake3::hash(&header);
    // The crate's own reader of whole files wants the file in memory; its header's type does all
    // the checks of names, types, shapes and offsets.
    let header: safetensors::tensor::Metadata =
        serde_json::from_slice(&header).context("its header cannot be used")?;
    let (data, rest) = (header.data_len() as u64, file_bytes - LENGTH_BYTES - length);
    if data != rest {
        bail!("its header describes {data} bytes of data, but {rest} follow it: it is damaged");
    }
    Ok((header, LENGTH_BYTES + length, digest))
}

//! The output: a temporary file until it is whole.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use tempfile::NamedTempFile;

use super::source::Source;

/// Removes itself when dropped before [`finish`](Self::finish).
pub(super) struct Target {
    path: PathBuf,
    folder: PathBuf,
    file: NamedTempFile,
    written: u64,
}

impl Target {
    /// A temporary file beside `path`.
    pub(super) fn create(path: &Path, source: &Source) -> Result<Self> {
        let shown = path.display();
        let Some(name) = path.file_name() else {
            bail!("{shown} names no file: give the path of the file to write");
        };
        if let Ok(status) = fs::metadata(path) {
            if !status.is_file() {
                bail!("{shown} exists and is no regular file: give another path");
            }
            if same_file(&status, source.status()) {
                bail!("{shown} is the input itself: give another path");
            }
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut prefix = std::ffi::OsString::from(".");
        // Long names leave no room for more.
        prefix.push(if name.len() < 200 { name } else { "export".as_ref() });
        prefix.push(".");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(".partial");
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = builder
            .tempfile_in(&folder)
            .map_err(|error| anyhow!("cannot write into the folder of {shown}: {error}"))?;
        Ok(Self { path: path.to_owned(), folder, file, written: 0 })
    }

    /// Writes at a place.
    pub(super) fn write_at(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let file = self.file.as_file_mut();
        let write = |file: &mut File| {
            file.seek(SeekFrom::Start(at))?;
            file.write_all(bytes)
        };
        write(file).with_context(|| format!("cannot write {}", self.path.display()))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Flushes the file and gives it its name.
    pub(super) fn finish(self, bytes: u64) -> Result<()> {
        let shown = self.path.display().to_string();
        if self.written != bytes {
            bail!("{} bytes of {bytes} were written to {shown}; report this", self.written);
        }
        let flushed = self.file.as_file().sync_all();
        flushed.with_context(|| format!("cannot flush {shown} to the disk"))?;
        self.file.persist(&self.path).map_err(|error| error.error).with_context(|| {
            format!("cannot give {shown} its name; remove what stands there, or give another path")
        })?;
        sync_folder(&self.folder).with_context(|| format!("cannot flush the folder of {shown}"))
    }
}

/// True for two names of one file.
#[cfg(unix)]
fn same_file(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn same_file(_: &fs::Metadata, _: &fs::Metadata) -> bool {
    false
}

/// The new name is in the folder; a folder is flushed like a file.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> std::io::Result<()> {
    Ok(())
}

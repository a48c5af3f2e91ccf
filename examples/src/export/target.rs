//! The output, written in any order.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::source::Source;
use crate::whole_file::WholeFile;

/// Nothing is left of it unless it is [finished](Self::finish).
pub(super) struct Target {
    file: WholeFile,
    written: u64,
}

impl Target {
    /// Begins the output of a source.
    pub(super) fn create(path: &Path, source: &Source) -> Result<Self> {
        if fs::metadata(path).is_ok_and(|status| same_file(&status, source.status())) {
            bail!("{} is the input itself: give another path", path.display());
        }
        Ok(Self { file: WholeFile::create(path)?, written: 0 })
    }

    /// Writes at a place.
    pub(super) fn write_at(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let write = |file: &mut File| {
            file.seek(SeekFrom::Start(at))?;
            file.write_all(bytes)
        };
        let written = write(self.file.file());
        written.with_context(|| format!("cannot write {}", self.file.path().display()))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// The output is whole: so many bytes.
    pub(super) fn finish(self, bytes: u64) -> Result<()> {
        if self.written != bytes {
            let shown = self.file.path().display();
            bail!("{} bytes of {bytes} were written to {shown}; report this", self.written);
        }
        self.file.finish()
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

//! A file that appears whole or not at all.

use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tempfile::NamedTempFile;

/// A temporary file in the folder of the file that it becomes; it removes itself when dropped before
/// [`finish`](Self::finish).
#[derive(Debug)]
pub struct WholeFile {
    path: PathBuf,
    folder: PathBuf,
    file: NamedTempFile,
}

/// Temporary files of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on these signals remove the temporary files before they do what they always do: they
/// end the process without dropping anything, and a file half written may be large. One that the
/// process was started to ignore (by nohup, say) stays ignored.
///
/// # Errors
/// A system that does not let the process watch.
pub fn remove_unfinished_on(signals: &[i32]) -> Result<()> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    let signals = signals.iter().filter(|signal| ignored >> (**signal - 1) & 1 == 0);
    let mut signals = Signals::new(signals).context("cannot watch for signals")?;
    let watch = move || {
        for signal in &mut signals {
            // Held to the end, so that no file begins or ends behind its back.
            let files = unfinished();
            for file in files.iter() {
                let _ = fs::remove_file(file);
            }
            if emulate_default_handler(signal).is_err() {
                std::process::exit(128 + signal);
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(watch).context("cannot watch for signals")?;
    Ok(())
}

impl WholeFile {
    /// Begins a file. What stands at `path` stays until the end.
    ///
    /// # Errors
    /// A path that names no file, or something else than a file; a folder that cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        let shown = path.display();
        let Some(name) = path.file_name() else {
            bail!("{shown} names no file: give the path of the file to write");
        };
        if fs::metadata(path).is_ok_and(|status| !status.is_file()) {
            bail!("{shown} exists and is no regular file: give another path");
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut prefix = OsString::from(".");
        // A long name leaves no room for more.
        prefix.push(if name.len() < 200 { name } else { "file".as_ref() });
        prefix.push(".");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(".partial");
        // As any new file; by default nobody else may read a temporary one.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut unfinished = unfinished();
        let file = builder
            .tempfile_in(&folder)
            .map_err(|error| {
                // The cause alone: the temporary name says nothing to anybody.
                let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                anyhow!("cannot write into the folder of {shown}: {cause}; make the folder writable, or give another path")
            })?;
        unfinished.push(file.path().to_owned());
        Ok(Self { path: path.to_owned(), folder, file })
    }

    /// The file that it will be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is written so far.
    pub fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Flushes the file to the disk and gives it its name.
    ///
    /// # Errors
    /// A disk that is full; a name that cannot be given.
    pub fn finish(self) -> Result<()> {
        let shown = self.path.display().to_string();
        let flushed = self.file.as_file().sync_all();
        flushed.with_context(|| format!("cannot flush {shown} to the disk"))?;
        let temporary = self.file.path().to_owned();
        // A signal that has come removes the file and ends the process: its name is not given then.
        let mut unfinished = unfinished();
        self.file.persist(&self.path).map_err(|error| error.error).with_context(|| {
            format!("cannot give {shown} its name; remove what stands there, or give another path")
        })?;
        unfinished.retain(|file| *file != temporary);
        drop(unfinished);
        sync_folder(&self.folder).with_context(|| format!("cannot flush the folder of {shown}"))
    }
}

/// The signals that a process ignores, the first in the lowest bit, by its `/proc/self/status`.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
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

//! A file that appears whole or not at all.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
        sweep(&folder, &prefix);
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(SUFFIX);
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
        // Where files cannot be locked, none is taken for left behind.
        let _ = file.as_file().try_lock();
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

/// How temporary files end.
const SUFFIX: &str = ".partial";
/// Younger ones may not be locked yet.
const AGE: Duration = Duration::from_secs(60);

/// Removes what killed processes have left of the same file: nobody holds its lock.
fn sweep(folder: &Path, prefix: &OsStr) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        if !name.starts_with(prefix.as_encoded_bytes()) || !name.ends_with(SUFFIX.as_bytes()) {
            continue;
        }
        // Before it is opened: opening a pipe waits for its other end.
        let Ok(status) = entry.metadata() else { continue };
        let age = status.modified().ok().and_then(|at| at.elapsed().ok());
        if !status.is_file() || age.is_none_or(|age| age <= AGE) {
            continue;
        }
        let Ok(file) = File::options().write(true).open(entry.path()) else { continue };
        if file.try_lock().is_ok() {
            // Who may not remove it leaves it.
            let _ = fs::remove_file(entry.path());
        }
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_killed_processes_have_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let old = SystemTime::now() - 2 * AGE;
        let leave = |name: &str, modified| {
            let file = File::create(path(name)).unwrap();
            file.set_modified(modified).unwrap();
            file
        };
        drop(leave(".out.dead.partial", old));
        let living = leave(".out.living.partial", old);
        living.lock().unwrap();
        drop(leave(".out.young.partial", SystemTime::now()));
        for foreign in [".other.x.partial", ".out.x", "out.x.partial"] {
            drop(leave(foreign, old));
        }
        WholeFile::create(&path("out")).unwrap().finish().unwrap();
        let mut left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        let expected = [
            ".other.x.partial",
            ".out.living.partial",
            ".out.x",
            ".out.young.partial",
            "out",
            "out.x.partial",
        ];
        assert_eq!(left, expected);
    }
}

//! The file by which ranks of one host find rank 0: its address and a random token, readable by
//! nobody else.
//!
//! It lies in a directory that belongs to us and that no other user may enter, is created anew
//! (never over something that is there, never through a link), is locked as long as its writer lives,
//! and is removed when the ranks have met.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::net::proof::TOKEN;

/// The longest file that is read.
const LONGEST: u64 = 512;
/// The first line.
const HEAD: &str = "gather8 1";

/// What the file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Invitation {
    pub(crate) address: SocketAddr,
    pub(crate) token: [u8; TOKEN],
    pub(crate) process: u32,
}

/// Where a job's file lies. `base` replaces the usual places.
pub(crate) fn path(base: Option<&Path>, job: &str, port: Option<u16>) -> Result<PathBuf> {
    let directory = match base {
        Some(base) => base.to_owned(),
        None => usual_directory()?,
    };
    private_directory(&directory)?;
    let kept = job.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40);
    let readable = kept.collect::<String>();
    let hash = blake3::hash(job.as_bytes()).to_hex();
    let hash = hash.chars().take(16).collect::<String>();
    Ok(directory.join(format!("{readable}-{hash}-{}.rendezvous", port.unwrap_or(0))))
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn usual_directory() -> Result<PathBuf> {
    if let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR") {
        let runtime = PathBuf::from(runtime);
        let ours = fs::symlink_metadata(&runtime)
            .is_ok_and(|meta| meta.is_dir() && meta.uid() == user() && meta.mode() & 0o077 == 0);
        if ours {
            return Ok(runtime.join("gather8"));
        }
    }
    Ok(std::env::temp_dir().join(format!("gather8-{}", user())))
}

/// Makes the directory, or makes sure that it is ours alone.
fn private_directory(directory: &Path) -> Result<()> {
    let refuse = |why: String| Err(failed(format!("the directory {} {why}", directory.display())));
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return refuse(format!("cannot be made: {error}")),
    }
    let meta = match fs::symlink_metadata(directory) {
        Ok(meta) => meta,
        Err(error) => return refuse(format!("cannot be looked at: {error}")),
    };
    if !meta.is_dir() {
        return refuse("is no directory: remove it".to_owned());
    }
    if meta.uid() != user() {
        return refuse(format!(
            "belongs to user {}: remove it, or set XDG_RUNTIME_DIR",
            meta.uid()
        ));
    }
    if meta.mode() & 0o077 != 0 {
        return refuse(format!(
            "lets other users in (mode {:o}): chmod 700 it",
            meta.mode() & 0o777
        ));
    }
    Ok(())
}

/// A file in its place, and the lock that says that its writer lives: the system lets go of it when
/// the process ends, however it ends. Dropped, it removes the file.
#[derive(Debug)]
pub(crate) struct Published {
    path: PathBuf,
    file: File,
}

impl Drop for Published {
    fn drop(&mut self) {
        // Somebody may have removed it by hand, and another job put its own there.
        let there = fs::symlink_metadata(&self.path);
        if let (Ok(there), Ok(ours)) = (there, self.file.metadata())
            && (there.dev(), there.ino()) == (ours.dev(), ours.ino())
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Puts the file of the job `job` in its place. One that a dead rank 0 has left behind is replaced.
///
/// # Errors
/// If the rank 0 of another job lives and has one there, if somebody else has put it there, or if
/// the file system does not let us.
pub(crate) fn publish(path: &Path, job: &str, invitation: &Invitation) -> Result<Published> {
    let mut token = String::new();
    for byte in invitation.token {
        let _ = write!(token, "{byte:02x}");
    }
    let text = format!("{HEAD}\n{}\n{token}\n{}\nend\n", invitation.address, invitation.process);
    // One at a time, so that nobody removes what another has just put in place of a dead one.
    let directory = path.parent().unwrap_or(Path::new("."));
    let _one_at_a_time = lock_directory(directory)?;
    sweep(directory);
    for _ in 0..3 {
        match write_new(path, &text) {
            Ok(file) => return Ok(Published { path: path.to_owned(), file }),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                taken(path, job)?;
                sweep(directory);
            }
            Err(error) => {
                return Err(failed(format!("{} cannot be written: {error}", path.display())));
            }
        }
    }
    Err(failed(format!(
        "{} comes back whenever it is removed: set GATHER8_JOB to a name of this job's own",
        path.display()
    )))
}

/// Removes what processes that were killed have left in a directory that is locked.
fn sweep(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let dead = match path.extension().and_then(|extension| extension.to_str()) {
            Some("rendezvous") => matches!(read(&path), Ok(Found::Dead)),
            // Nobody writes one but under the lock.
            Some("draft") => true,
            _ => false,
        };
        if dead {
            tracing::debug!(path = %path.display(), "removing what an earlier job has left behind");
            let _ = fs::remove_file(&path);
        }
    }
}

fn lock_directory(directory: &Path) -> Result<File> {
    let unlockable = |error: std::io::Error| unlockable(directory, &error);
    let file = File::open(directory).map_err(unlockable)?;
    let until = Instant::now() + Duration::from_secs(2);
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            // Who holds it writes a few bytes, unless it was stopped while it did.
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(unlockable(error.into())),
        }
    }
}

/// The file, locked.
fn write_new(path: &Path, text: &str) -> std::io::Result<File> {
    // Written under another name, locked, then linked: nobody reads half of it, or takes it for a
    // dead one's. None of this follows a link or replaces what is there.
    let draft = path.with_extension(format!("{}.draft", std::process::id()));
    let _ = fs::remove_file(&draft);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(&draft)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| Ok(flock(&file, FlockOperation::NonBlockingLockExclusive)?))
        .and_then(|()| fs::hard_link(&draft, path));
    let _ = fs::remove_file(&draft);
    written.map(|()| file)
}

/// What to say of the file that is there, after [`sweep`].
fn taken(path: &Path, job: &str) -> Result<()> {
    if let Found::Living(old) = read(path)? {
        return Err(failed(format!(
            "process {} is rank 0 of a job `{}` that is starting on this host ({}): wait until it has started, or set GATHER8_JOB to tell the two apart",
            old.process,
            job.escape_debug(),
            path.display()
        )));
    }
    Ok(())
}

/// What lies where rank 0 puts its file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing yet.
    Nothing,
    /// What a process has left behind that is gone, or that no version of ours has written.
    Dead,
    /// An invitation whose writer lives.
    Living(Invitation),
}

/// Reads the file.
///
/// # Errors
/// If somebody else could have written it.
pub(crate) fn read(path: &Path) -> Result<Found> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => {
            return Err(failed(format!(
                "{} is not what rank 0 writes ({error}): remove it",
                path.display()
            )));
        }
    };
    let text = check_and_read(&file).map_err(|why| {
        failed(format!("{} {why}: somebody else has put it there; remove it", path.display()))
    })?;
    // The writer holds the lock alone as long as it lives. Process numbers would not do: they come
    // again, and in another container they mean another process.
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(Found::Dead),
        Err(Errno::WOULDBLOCK) => Ok(parse(&text).map_or(Found::Dead, Found::Living)),
        Err(error) => Err(unlockable(path, &error.into())),
    }
}

fn unlockable(path: &Path, error: &std::io::Error) -> Error {
    failed(format!(
        "{} cannot be locked ({error}): let XDG_RUNTIME_DIR name a private directory on a local file system",
        path.display()
    ))
}

fn check_and_read(file: &File) -> std::result::Result<String, String> {
    let meta = file.metadata().map_err(|error| format!("cannot be looked at ({error})"))?;
    if !meta.is_file() {
        return Err("is no ordinary file".to_owned());
    }
    if meta.uid() != user() {
        return Err(format!("belongs to user {}", meta.uid()));
    }
    if meta.mode() & 0o077 != 0 {
        return Err(format!("can be reached by others (mode {:o})", meta.mode() & 0o777));
    }
    let mut text = String::new();
    let read = file.take(LONGEST + 1).read_to_string(&mut text);
    read.map_err(|error| format!("cannot be read ({error})"))?;
    if text.len() as u64 > LONGEST {
        return Err(format!("is longer than {LONGEST} bytes"));
    }
    Ok(text)
}

fn parse(text: &str) -> Option<Invitation> {
    let mut lines = text.lines();
    let [head, address, token, process, end] = [(); 5].map(|()| lines.next().unwrap_or_default());
    if head != HEAD || end != "end" || token.len() != 2 * TOKEN || !token.is_ascii() {
        return None;
    }
    let mut bytes = [0; TOKEN];
    for (byte, digits) in bytes.iter_mut().zip(token.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(Invitation {
        address: address.parse().ok()?,
        token: bytes,
        process: process.parse().ok()?,
    })
}

fn failed(problem: String) -> Error {
    Error::Rendezvous { problem }
}

#[cfg(test)]
mod tests;

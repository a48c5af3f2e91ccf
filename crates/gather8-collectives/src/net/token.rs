//! The file by which ranks of one host find rank 0: its address and a random token, readable by
//! nobody else.
//!
//! It lies in a directory that belongs to us and that no other user may enter, is created anew
//! (never over something that is there, never through a link), and is removed when the ranks have
//! met.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::{Error, Result};
use crate::net::proof::TOKEN;

/// The longest file that is read.
const LONGEST: u64 = 512;

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

/// Puts the file in its place. One that a dead rank 0 has left behind is replaced.
pub(crate) fn publish(path: &Path, invitation: &Invitation) -> Result<()> {
    let mut token = String::new();
    for byte in invitation.token {
        let _ = write!(token, "{byte:02x}");
    }
    let text = format!("gather8 1\n{}\n{token}\n{}\nend\n", invitation.address, invitation.process);
    for _ in 0..3 {
        match write_new(path, &text) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => clear_dead(path)?,
            Err(error) => {
                return Err(failed(format!("{} cannot be written: {error}", path.display())));
            }
        }
    }
    Err(failed(format!(
        "{} comes back whenever it is removed: is another job of this name starting?",
        path.display()
    )))
}

fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    // Written under another name and linked, so that nobody reads half of it; neither step follows
    // a link or replaces what is there.
    let draft = path.with_extension(format!("{}.draft", std::process::id()));
    let _ = fs::remove_file(&draft);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(&draft)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| fs::hard_link(&draft, path));
    let _ = fs::remove_file(&draft);
    written
}

/// Removes a file whose writer is dead; an error if it lives, or if the file is not ours.
fn clear_dead(path: &Path) -> Result<()> {
    let old = match open_ours(path) {
        Ok(Some(text)) => parse(&text),
        Ok(None) => return Ok(()),
        Err(error) => return Err(error),
    };
    if let Some(old) = old
        && old.process != std::process::id()
        && Path::new(&format!("/proc/{}", old.process)).exists()
    {
        return Err(failed(format!(
            "{} belongs to process {}, which is running: another job has the same name; set GATHER8_JOB to tell them apart",
            path.display(),
            old.process
        )));
    }
    tracing::warn!(path = %path.display(), "removing what an earlier job has left behind");
    remove(path);
    Ok(())
}

/// Reads the file: `None` if it is not there yet.
///
/// # Errors
/// If somebody else could have written it.
pub(crate) fn read(path: &Path) -> Result<Option<Invitation>> {
    Ok(open_ours(path)?.and_then(|text| parse(&text)))
}

fn open_ours(path: &Path) -> Result<Option<String>> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(failed(format!(
                "{} is not what rank 0 writes ({error}): remove it",
                path.display()
            )));
        }
    };
    let text = check_and_read(&file);
    text.map(Some).map_err(|why| {
        failed(format!("{} {why}: somebody else has put it there; remove it", path.display()))
    })
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
    if head != "gather8 1" || end != "end" || token.len() != 2 * TOKEN || !token.is_ascii() {
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

/// Removes the file; that it is gone already is no matter.
pub(crate) fn remove(path: &Path) {
    let _ = fs::remove_file(path);
}

fn failed(problem: String) -> Error {
    Error::Rendezvous { problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn invitation() -> Invitation {
        Invitation {
            address: "127.0.0.1:4000".parse().unwrap(),
            token: std::array::from_fn(|i| i as u8 * 7),
            process: std::process::id(),
        }
    }

    /// A private directory, and a path in it.
    fn place() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = path(Some(&directory.path().join("g8")), "job/../x 1", Some(80)).unwrap();
        (directory, path)
    }

    #[test]
    fn what_is_published_is_read_and_private() {
        let (_directory, path) = place();
        assert_eq!(read(&path).unwrap(), None);
        publish(&path, &invitation()).unwrap();
        assert_eq!(read(&path).unwrap(), Some(invitation()));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("jobx1-") && name.ends_with("-80.rendezvous"), "{name}");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
        remove(&path);
        assert_eq!(read(&path).unwrap(), None);
    }

    #[test]
    fn a_dead_job_gives_way_and_a_live_one_does_not() {
        let (_directory, path) = place();
        let with = |process| Invitation { process, ..invitation() };
        // No process has this number: Linux stops at 2^22.
        publish(&path, &with(u32::MAX)).unwrap();
        publish(&path, &with(1)).unwrap();
        let error = publish(&path, &invitation()).unwrap_err().to_string();
        assert!(error.contains("belongs to process 1, which is running"), "{error}");
        assert!(error.contains("GATHER8_JOB"));
    }

    #[test]
    fn a_strangers_file_is_refused() {
        let (directory, path) = place();
        // A link, even to a good file.
        let elsewhere = directory.path().join("elsewhere");
        publish(&elsewhere, &invitation()).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is not what rank 0 writes"));
        assert!(publish(&path, &invitation()).is_err());
        remove(&path);
        // A file that others can write.
        publish(&path, &invitation()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("can be reached by others (mode 666)"), "{error}");
        assert!(publish(&path, &invitation()).is_err());
        remove(&path);
        // Another user's, where this test may make one.
        publish(&path, &invitation()).unwrap();
        if std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains("belongs to user 12345"), "{error}");
        }
        remove(&path);
        // Nothing that would block, and nothing huge.
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is no ordinary file"));
        remove(&path);
        fs::write(&path, vec![b'x'; 1000]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("longer than 512 bytes"));
    }

    #[test]
    fn a_directory_that_others_can_enter_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let open = directory.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        let error = path(Some(&open), "job", None).unwrap_err().to_string();
        assert!(error.contains("lets other users in (mode 755)"), "{error}");
        let link = directory.path().join("link");
        symlink(&open, &link).unwrap();
        assert!(
            path(Some(&link), "job", None).unwrap_err().to_string().contains("is no directory")
        );
    }

    #[test]
    fn half_a_file_is_no_invitation() {
        let (_directory, path) = place();
        publish(&path, &invitation()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        for end in 0..text.len() - 1 {
            assert_eq!(parse(&text[..end]), None, "cut at {end}");
        }
        assert!(parse(&text.replace("gather8 1", "gather8 2")).is_none());
    }
}

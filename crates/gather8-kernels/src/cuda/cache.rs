//! Compiled kernels on disk, shared by all ranks of all runs.
//!
//! A file is written under a temporary name and renamed, so that a reader sees all of it or
//! nothing; ranks that compile the same kernel at the same time write the same bytes, and the last
//! rename wins. A file that does not fit its checksum is compiled again. No failure to read or write
//! here is an error: the cache saves a second, no more.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The variable that names the cache's folder; empty turns the cache off.
pub const CACHE_VARIABLE: &str = "GATHER8_CACHE";

/// The first bytes of a file; the checksum of what follows comes next.
const MAGIC: &[u8; 8] = b"g8cubin1";
const HEADER: usize = MAGIC.len() + blake3::OUT_LEN;

/// The folder: `GATHER8_CACHE`, else `gather8` in `XDG_CACHE_HOME` or `~/.cache`.
pub(super) fn folder() -> Option<PathBuf> {
    folder_from(|name| std::env::var_os(name).map(PathBuf::from))
}

fn folder_from(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|path| !path.as_os_str().is_empty());
    if variable(CACHE_VARIABLE).is_some() {
        return set(CACHE_VARIABLE);
    }
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("gather8"))
}

/// The file's content, if it is there and whole.
pub(super) fn load(folder: &Path, name: &str) -> Option<Vec<u8>> {
    let bytes = fs::read(folder.join(name)).ok()?;
    let (header, body) = bytes.split_at_checked(HEADER)?;
    let (magic, sum) = header.split_at_checked(MAGIC.len())?;
    (magic == MAGIC && sum == blake3::hash(body).as_bytes()).then(|| body.to_vec())
}

/// Stores a file for later runs; a failure is logged.
pub(super) fn store(folder: &Path, name: &str, body: &[u8]) {
    if let Err(error) = try_store(folder, name, body) {
        tracing::debug!(folder = %folder.display(), %error, "a compiled kernel was not cached");
    }
}

fn try_store(folder: &Path, name: &str, body: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    fs::create_dir_all(folder)?;
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(".{name}.{}.{number}", std::process::id()));
    let written = (|| {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&temporary)?;
        file.write_all(MAGIC)?;
        file.write_all(blake3::hash(body).as_bytes())?;
        file.write_all(body)?;
        file.sync_all()?;
        fs::rename(&temporary, folder.join(name))
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("gather8-cache-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn what_was_stored_comes_back_and_damage_does_not() {
        let folder = scratch("damage");
        assert_eq!(load(&folder, "a"), None);
        store(&folder, "a", b"kernel");
        assert_eq!(load(&folder, "a").as_deref(), Some(&b"kernel"[..]));
        let whole = fs::read(folder.join("a")).unwrap();
        for cut in 0..whole.len() {
            fs::write(folder.join("a"), &whole[..cut]).unwrap();
            assert_eq!(load(&folder, "a"), None, "cut to {cut} bytes");
        }
        for flip in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[flip] ^= 1;
            fs::write(folder.join("a"), &bytes).unwrap();
            assert_eq!(load(&folder, "a"), None, "byte {flip} flipped");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn many_writers_at_once_leave_one_whole_file() {
        let folder = scratch("race");
        let body = vec![7_u8; 100_000];
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| store(&folder, "a", &body));
                scope.spawn(|| {
                    let seen = load(&folder, "a");
                    assert!(seen.is_none() || seen.as_ref() == Some(&body));
                });
            }
        });
        assert_eq!(load(&folder, "a"), Some(body));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "temporary files are left");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_error() {
        store(Path::new("/proc/no/such/folder"), "a", b"kernel");
        assert_eq!(load(Path::new("/proc/no/such/folder"), "a"), None);
    }

    #[test]
    fn the_folder_follows_the_variables() {
        let from = |pairs: &'static [(&str, &str)]| {
            folder_from(move |name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value))
            })
        };
        assert_eq!(from(&[]), None);
        assert_eq!(from(&[("HOME", "/h")]), Some("/h/.cache/gather8".into()));
        let xdg = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(
            folder_from(|n| xdg.iter().find(|p| p.0 == n).map(|p| p.1.into())),
            Some("/x/gather8".into())
        );
        assert_eq!(from(&[("HOME", "/h"), ("GATHER8_CACHE", "/c")]), Some("/c".into()));
        assert_eq!(from(&[("HOME", "/h"), ("GATHER8_CACHE", "")]), None);
    }
}

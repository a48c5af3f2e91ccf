//! Opening the driver and the compiler at run time.
//!
//! A machine without them must get a sentence, not a panic and not a program that fails to start,
//! so nothing links against CUDA: libraries are opened by name when they are first needed.

use std::error::Error as _;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Error, Result};

/// An opened library and the name or path that opened it.
pub(super) struct Opened {
    pub(super) library: Library,
    pub(super) path: String,
}

/// What has been tried so far, for the error.
#[derive(Default)]
struct Attempts(String);

impl Attempts {
    fn add(&mut self, name: &str, error: &libloading::Error) {
        // The reason stands in the source; the error itself says only that dlopen failed.
        let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        let separator = if self.0.is_empty() { "" } else { "; " };
        // Some loaders begin with the name.
        let reason = reason.trim().trim_start_matches(name).trim_start_matches(": ");
        let _ = write!(self.0, "{separator}{name}: {reason}");
    }
}

/// Opens the first of `names` that there is.
fn open_first(
    device: &str,
    what: &str,
    names: impl IntoIterator<Item = PathBuf>,
    remedy: &str,
) -> Result<Opened> {
    let mut attempts = Attempts::default();
    for name in names {
        let shown = name.display().to_string();
        open_companion(&name);
        // SAFETY: the initialisers of the driver's and the compiler's libraries have no conditions
        // of their own.
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok(Opened { library, path: shown }),
            Err(error) => attempts.add(&shown, &error),
        }
    }
    Err(Error::Device {
        device: device.to_owned(),
        what: format!("opening {what}"),
        reason: format!("{remedy} (tried {})", attempts.0),
    })
}

/// NVRTC opened by a path of its own finds its second library only if that one is open already.
fn open_companion(name: &Path) {
    let (Some(folder), Some(file)) = (name.parent(), name.file_name().and_then(|f| f.to_str()))
    else {
        return;
    };
    if folder.as_os_str().is_empty() || !file.starts_with("libnvrtc.") {
        return;
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let other = entry.file_name();
        let other = other.to_string_lossy();
        if other.starts_with("libnvrtc-builtins.so") {
            // SAFETY: a library of tables without initialisers.
            if let Ok(library) = unsafe { Library::new(entry.path()) } {
                // It must stay open for as long as the compiler may be used.
                std::mem::forget(library);
            }
        }
    }
}

/// The driver, from where the driver's package or a container's runtime puts it.
pub(super) fn driver() -> Result<Opened> {
    let names = ["libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1"];
    open_first(
        "cuda",
        "the driver",
        names.map(PathBuf::from),
        "install the NVIDIA driver, or start the container with its GPUs, or use the CPU",
    )
}

/// The variable that names the compiler's library.
pub const NVRTC_VARIABLE: &str = "GATHER8_NVRTC";

/// The run-time compiler: a file of the user's choice, else by name, else from a toolkit's folder.
pub(super) fn nvrtc() -> Result<Opened> {
    let remedy = "install NVRTC (of the CUDA toolkit, or the Python wheel nvidia-cuda-nvrtc) of the \
                  driver's major version, or name the file in GATHER8_NVRTC";
    if let Some(path) = std::env::var_os(NVRTC_VARIABLE).filter(|path| !path.is_empty()) {
        return open_first("cuda", "the compiler NVRTC", [PathBuf::from(path)], remedy);
    }
    let mut names: Vec<PathBuf> =
        ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(PathBuf::from).into();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(variable).filter(|home| !home.is_empty()) {
            names.push(Path::new(&home).join("lib64/libnvrtc.so"));
        }
    }
    names.push(PathBuf::from("/usr/local/cuda/lib64/libnvrtc.so"));
    open_first("cuda", "the compiler NVRTC", names, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_absent_is_named_with_every_attempt() {
        let names = ["libno-such-thing-1.so", "/nowhere/libno-such-thing-2.so"];
        let error =
            open_first("cuda", "a thing", names.map(PathBuf::from), "get one").err().unwrap();
        let text = error.to_string();
        for part in names.iter().chain(&["cuda: opening a thing: get one", "No such file"]) {
            assert!(text.contains(part), "`{part}` is missing in: {text}");
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        let text =
            open_first("cuda", "a thing", [PathBuf::from("/dev/null")], "get one").err().unwrap();
        assert!(text.to_string().contains("/dev/null: "), "{text}");
    }
}

//! NCCL through a table of our own: opened by name or path, checked for every function, logged.
//!
//! Result, type and operation codes are integers here: a newer library may return codes that no
//! enum knows.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::communicator::Reduce;
use crate::error::{Error, Result};

/// The variable that names NCCL's file.
pub const NCCL_VARIABLE: &str = "GATHER8_NCCL";

/// A communicator of NCCL.
pub(super) type Comm = *mut c_void;
/// A stream of the driver.
pub(super) type Stream = *mut c_void;

/// What a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Code(pub(super) c_int);

impl Code {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const IN_PROGRESS: Self = Self(7);
}

/// The elements' type of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Type(c_int);

impl Type {
    pub(super) const UINT8: Self = Self(1);
    const UINT32: Self = Self(3);
    const FLOAT32: Self = Self(7);
    const FLOAT64: Self = Self(8);
    const BFLOAT16: Self = Self(9);
}

/// How a collective combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Combine(c_int);

impl Combine {
    const SUM: Self = Self(0);
    const MAX: Self = Self(2);
}

/// The pair of codes for a reduction.
pub(super) const fn codes(reduce: Reduce) -> (Type, Combine) {
    match reduce {
        Reduce::MaxU32 => (Type::UINT32, Combine::MAX),
        Reduce::SumF32 => (Type::FLOAT32, Combine::SUM),
        Reduce::SumBf16 => (Type::BFLOAT16, Combine::SUM),
        Reduce::SumF64 => (Type::FLOAT64, Combine::SUM),
    }
}

/// What the ranks of a new communicator must share.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// NCCL's configuration in the layout of 2.17. The size says where it ends, so that every later
/// version takes it and fills in what has come since.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
}

impl Config {
    /// Everything as NCCL chooses it, but whether calls wait.
    pub(super) const fn new(blocking: bool) -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: blocking as c_int,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
        }
    }
}

macro_rules! table {
    ($($field:ident = $name:literal : fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// NCCL's functions.
        pub(super) struct Nccl {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            path: String,
            version: u32,
            // Last: the functions above live in it.
            _library: Library,
        }

        impl Nccl {
            fn from_library(library: Library, path: String) -> Result<Self> {
                let missing = |name: &str| refused(&format!(
                    "{path} has no function {name}: NCCL 2.18 or newer is needed"
                ));
                $(
                    // SAFETY: the function of NCCL's C interface with its type there.
                    let $field = *unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>($name)
                    }
                    .map_err(|_| missing(&String::from_utf8_lossy($name)))?;
                )*
                Ok(Self { $($field,)* version: 0, path, _library: library })
            }
        }
    };
}

table! {
    get_version = b"ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = b"ncclGetUniqueId": fn(*mut UniqueId) -> Code;
    init_rank_config = b"ncclCommInitRankConfig": fn(*mut Comm, c_int, UniqueId, c_int, *const Config) -> Code;
    split = b"ncclCommSplit": fn(Comm, c_int, c_int, *mut Comm, *const Config) -> Code;
    async_error = b"ncclCommGetAsyncError": fn(Comm, *mut Code) -> Code;
    count = b"ncclCommCount": fn(Comm, *mut c_int) -> Code;
    user_rank = b"ncclCommUserRank": fn(Comm, *mut c_int) -> Code;
    device = b"ncclCommCuDevice": fn(Comm, *mut c_int) -> Code;
    abort = b"ncclCommAbort": fn(Comm) -> Code;
    destroy = b"ncclCommDestroy": fn(Comm) -> Code;
    error_string = b"ncclGetErrorString": fn(Code) -> *const c_char;
    last_error = b"ncclGetLastError": fn(Comm) -> *const c_char;
    group_start = b"ncclGroupStart": fn() -> Code;
    group_end = b"ncclGroupEnd": fn() -> Code;
    all_gather = b"ncclAllGather": fn(*const c_void, *mut c_void, usize, Type, Comm, Stream) -> Code;
    all_reduce = b"ncclAllReduce": fn(*const c_void, *mut c_void, usize, Type, Combine, Comm, Stream) -> Code;
    reduce_scatter = b"ncclReduceScatter": fn(*const c_void, *mut c_void, usize, Type, Combine, Comm, Stream) -> Code;
    broadcast = b"ncclBroadcast": fn(*const c_void, *mut c_void, usize, Type, c_int, Comm, Stream) -> Code;
}

/// An error of the library itself.
pub(super) fn refused(reason: &str) -> Error {
    Error::Backend(gather8_kernels::Error::Device {
        device: "nccl".to_owned(),
        what: "opening NCCL".to_owned(),
        reason: reason.to_owned(),
    })
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: NCCL returns static or per-communicator C strings.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

impl Nccl {
    /// The file that `GATHER8_NCCL` names, else by the usual names, else from a toolkit's folder.
    pub(super) fn open() -> Result<Self> {
        let named = std::env::var_os(NCCL_VARIABLE).filter(|path| !path.is_empty());
        let names: Vec<PathBuf> = match named {
            Some(path) => vec![PathBuf::from(path)],
            None => {
                let mut names = vec![PathBuf::from("libnccl.so.2"), PathBuf::from("libnccl.so")];
                for variable in ["NCCL_HOME", "CUDA_HOME"] {
                    let home = std::env::var_os(variable).filter(|home| !home.is_empty());
                    for folder in ["lib", "lib64"] {
                        names.extend(
                            home.iter()
                                .map(|home| Path::new(home).join(folder).join("libnccl.so.2")),
                        );
                    }
                }
                names
            }
        };
        Self::open_first(&names)
    }

    /// The library that a host program has loaded and that its communicators belong to: never
    /// another copy, which could do nothing with them.
    #[cfg(unix)]
    pub(super) fn loaded() -> Result<Self> {
        use libloading::os::unix;
        /// Finds what is loaded already, and loads nothing.
        #[cfg(target_os = "linux")]
        const NO_LOAD: std::ffi::c_int = 4;
        #[cfg(not(target_os = "linux"))]
        const NO_LOAD: std::ffi::c_int = 0x10;
        let this = Library::from(unix::Library::this());
        // SAFETY: the function of NCCL's C interface with its type there; it is not called here.
        let linked = unsafe {
            this.get::<unsafe extern "C" fn(*mut c_int) -> Code>(b"ncclGetVersion").is_ok()
        };
        if linked {
            return Self::taken(this, "the program itself".to_owned());
        }
        let named = std::env::var_os(NCCL_VARIABLE).filter(|path| !path.is_empty());
        let names = [named, Some("libnccl.so.2".into()), Some("libnccl.so".into())];
        for name in names.into_iter().flatten() {
            // SAFETY: with this flag nothing is loaded, so no initialiser runs.
            let library = unsafe { unix::Library::open(Some(&name), unix::RTLD_NOW | NO_LOAD) };
            if let Ok(library) = library {
                return Self::taken(library.into(), name.to_string_lossy().into_owned());
            }
        }
        Err(refused(&format!(
            "a communicator was lent, but no NCCL is loaded here: load the library that made it \
             under the name libnccl.so.2, or name its file in {NCCL_VARIABLE}"
        )))
    }

    /// A library that is open, with its version.
    fn taken(library: Library, path: String) -> Result<Self> {
        let mut nccl = Self::from_library(library, path)?;
        let mut version = 0;
        // SAFETY: a valid integer to write to.
        let code = unsafe { (nccl.get_version)(&mut version) };
        nccl.check("asking for the version", std::ptr::null_mut(), code)?;
        nccl.version = version.unsigned_abs();
        tracing::info!(path = nccl.path, version = %nccl.version(), "opened NCCL");
        Ok(nccl)
    }

    fn open_first(names: &[PathBuf]) -> Result<Self> {
        let mut attempts = String::new();
        for name in names {
            let shown = name.display().to_string();
            // SAFETY: NCCL's initialisers read the environment and start nothing.
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::taken(library, shown),
                Err(error) => {
                    // The reason stands in the source.
                    let reason =
                        error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    let separator = if attempts.is_empty() { "" } else { "; " };
                    let _ = write!(attempts, "{separator}{shown}: {}", reason.trim());
                }
            }
        }
        Err(refused(&format!(
            "install NCCL (the package libnccl2, or the Python wheel nvidia-nccl-cu13), or name its \
             file in {NCCL_VARIABLE} (tried {attempts})"
        )))
    }

    /// The name or path that it was opened by.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Such as `2.28.3`.
    pub(super) fn version(&self) -> String {
        let v = self.version;
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// A code as an error; in progress is none.
    pub(super) fn check(&self, what: &str, comm: Comm, code: Code) -> Result<()> {
        if code == Code::SUCCESS || code == Code::IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: any code is allowed, and a null communicator too.
        let (error, last) = unsafe { ((self.error_string)(code), (self.last_error)(comm)) };
        let (error, last) = (text(error), text(last));
        let last =
            if last.trim().is_empty() { String::new() } else { format!(": {}", last.trim()) };
        Err(Error::Backend(gather8_kernels::Error::Device {
            device: "nccl".to_owned(),
            what: what.to_owned(),
            reason: format!("{error} ({}){last}", code.0),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_every_attempt() {
        let names = ["libno-nccl.so.2", "/nowhere/libnccl.so.2"].map(PathBuf::from);
        let error = Nccl::open_first(&names).err().unwrap().to_string();
        for part in ["libno-nccl.so.2: ", "/nowhere/libnccl.so.2: ", "GATHER8_NCCL", "libnccl2"] {
            assert!(error.contains(part), "`{part}` is missing in: {error}");
        }
    }

    #[test]
    fn a_library_without_a_needed_function_is_refused_by_name() {
        // The C library is there on every Unix, and is no NCCL.
        let error = Nccl::open_first(&[PathBuf::from("libc.so.6")]).err().unwrap().to_string();
        assert!(error.contains("libc.so.6 has no function nccl"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_host_programs_library_must_be_loaded_already() {
        let error = Nccl::loaded().err().unwrap().to_string();
        assert!(error.contains("no NCCL is loaded here"), "{error}");
    }

    #[test]
    fn the_configuration_has_the_layout_of_2_17() {
        assert_eq!(size_of::<Config>(), 40);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(size_of::<UniqueId>(), 128);
    }
}

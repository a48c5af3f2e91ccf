//! NVRTC through a small table of its own: nine functions, opened from a path that can be logged.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use libloading::Library;

use super::library::{self, Opened};
use crate::error::{Error, Result};

type Program = *mut std::ffi::c_void;
/// NVRTC's result as the integer it is: a newer library may return codes that no enum knows.
type Code = c_int;

/// The compiler.
pub struct Nvrtc {
    path: String,
    version: (u32, u32),
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    destroy: unsafe extern "C" fn(*mut Program) -> Code,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    // Last: the functions above live in it.
    _library: Library,
}

/// A text file that a program may include.
pub struct Header<'a> {
    /// The name in `#include "..."`.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
}

fn symbol<T: Copy>(opened: &Opened, name: &str) -> Result<T> {
    // SAFETY: every caller names a function of NVRTC's C interface with its type there.
    let symbol = unsafe { opened.library.get::<T>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| Error::Device {
        device: "cuda".to_owned(),
        what: format!("opening the compiler NVRTC ({})", opened.path),
        reason: format!("it has no function {name}: a version of 11.2 or newer is needed"),
    })
}

impl Nvrtc {
    /// Opens the compiler: the file that the variable `GATHER8_NVRTC` names, else by the usual
    /// names.
    ///
    /// # Errors
    /// [`Error::Device`] with every name that was tried.
    pub fn open() -> Result<Self> {
        let opened = library::nvrtc()?;
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code =
            symbol(&opened, "nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two valid integers.
        let code = unsafe { version(&mut major, &mut minor) };
        if code != 0 {
            return Err(Error::Device {
                device: "cuda".to_owned(),
                what: format!("asking the compiler NVRTC ({}) for its version", opened.path),
                reason: format!("it answered {code}"),
            });
        }
        let nvrtc = Self {
            version: (major.unsigned_abs(), minor.unsigned_abs()),
            error_string: symbol(&opened, "nvrtcGetErrorString")?,
            create: symbol(&opened, "nvrtcCreateProgram")?,
            destroy: symbol(&opened, "nvrtcDestroyProgram")?,
            compile: symbol(&opened, "nvrtcCompileProgram")?,
            log_size: symbol(&opened, "nvrtcGetProgramLogSize")?,
            log: symbol(&opened, "nvrtcGetProgramLog")?,
            cubin_size: symbol(&opened, "nvrtcGetCUBINSize")?,
            cubin: symbol(&opened, "nvrtcGetCUBIN")?,
            path: opened.path,
            _library: opened.library,
        };
        tracing::debug!(path = nvrtc.path, version = ?nvrtc.version, "opened the compiler NVRTC");
        Ok(nvrtc)
    }

    /// Major and minor version.
    pub const fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The name or path that it was opened by.
    pub fn path(&self) -> &str {
        &self.path
    }

    fn check(&self, what: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC returns a static string for any code.
        let text = unsafe { (self.error_string)(code) };
        let text = if text.is_null() {
            String::new()
        } else {
            // SAFETY: not null, and static, as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Error::Device {
            device: "cuda".to_owned(),
            what: what.to_owned(),
            reason: format!("NVRTC {}.{}: {text} ({code})", self.version.0, self.version.1),
        })
    }

    /// Compiles one source to a CUBIN, which is machine code for the architecture that `options`
    /// names. Returns it with the compiler's log, which may hold warnings.
    ///
    /// # Errors
    /// [`Error::Device`] with the log.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[Header<'_>],
        options: &[String],
    ) -> Result<(Vec<u8>, String)> {
        let what = format!("compiling {name}");
        let text = |text: &str| {
            CString::new(text).map_err(|_| Error::Device {
                device: "cuda".to_owned(),
                what: what.clone(),
                reason: "the source holds a zero byte".to_owned(),
            })
        };
        let texts: Vec<_> =
            headers.iter().map(|header| text(header.text)).collect::<Result<_>>()?;
        let names: Vec<_> =
            headers.iter().map(|header| text(header.name)).collect::<Result<_>>()?;
        let options: Vec<_> = options.iter().map(|option| text(option)).collect::<Result<_>>()?;
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (source, program_name) = (text(source)?, text(name)?);
        let mut program = Guard { nvrtc: self, program: ptr::null_mut() };
        // SAFETY: as many texts as names, all of them C strings that outlive the call.
        let code = unsafe {
            (self.create)(
                &mut program.program,
                source.as_ptr(),
                program_name.as_ptr(),
                c_int::try_from(headers.len()).unwrap_or(0),
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        self.check(&what, code)?;
        let count = c_int::try_from(options.len()).unwrap_or(0);
        // SAFETY: a live program, and as many options as are counted.
        let code = unsafe { (self.compile)(program.program, count, pointers(&options).as_ptr()) };
        let log = program.log();
        self.check(&what, code).map_err(|error| match error {
            Error::Device { device, what, reason } => {
                Error::Device { device, what, reason: format!("{reason}: {}", log.trim()) }
            }
            other => other,
        })?;
        let mut size = 0;
        // SAFETY: a compiled program and a valid integer.
        self.check(&what, unsafe { (self.cubin_size)(program.program, &mut size) })?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: the vector holds as many bytes as the call above asks for.
        self.check(&what, unsafe { (self.cubin)(program.program, cubin.as_mut_ptr().cast()) })?;
        Ok((cubin, log))
    }
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nvrtc({} {}.{})", self.path, self.version.0, self.version.1)
    }
}

/// Destroys its program.
struct Guard<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Guard<'_> {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: a live program and a valid integer.
        if unsafe { (self.nvrtc.log_size)(self.program, &mut size) } != 0 || size <= 1 {
            return String::new();
        }
        let mut log = vec![0_u8; size];
        // SAFETY: the vector holds as many bytes as the call above asks for.
        if unsafe { (self.nvrtc.log)(self.program, log.as_mut_ptr().cast()) } != 0 {
            return String::new();
        }
        log.pop();
        String::from_utf8_lossy(&log).into_owned()
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: a live program, not used again.
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

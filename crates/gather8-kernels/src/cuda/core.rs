//! What all clones of a backend share: the context, the loaded kernels, and the first failure.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::CString;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use sys::CUresult as Code;

use super::cache;
use super::driver::{self, DeviceInfo, Handle, check, is_fatal};
use super::nvrtc::Nvrtc;
use super::sources::{SOURCES, Source};
use super::staging::Staging;
use super::trial::Observer;
use crate::error::{Error, Result};

/// The oldest architecture that the kernels are compiled and tested for.
const OLDEST_ARCHITECTURE: u32 = 80;

/// Something that a captured graph uses and must not outlive.
pub(super) type Keep = Arc<dyn Any + Send + Sync>;

/// See the module.
pub(super) struct Core {
    pub(super) name: String,
    pub(super) info: DeviceInfo,
    device: sys::CUdevice,
    context: Handle<sys::CUcontext>,
    /// Whether the context is the primary one, retained here.
    retained: bool,
    modules: Vec<Handle<sys::CUmodule>>,
    functions: HashMap<&'static str, Handle<sys::CUfunction>>,
    /// For zeroing, tables and checks; never captured.
    pub(super) service: Handle<sys::CUstream>,
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    events: Mutex<Vec<Handle<sys::CUevent>>>,
    pub(super) staging: Mutex<Staging>,
    /// What is used while a graph is captured.
    pub(super) capture: Mutex<Option<Vec<Keep>>>,
    pub(super) capturing: AtomicBool,
    pub(super) observer: Observer,
}

/// A poisoned lock is taken all the same: what it guards is valid after every statement.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// The primary context of a device, or a host program's context.
    pub(super) fn new(
        ordinal: u32,
        device: sys::CUdevice,
        context: Option<sys::CUcontext>,
        cache: Option<&Path>,
    ) -> Result<Self> {
        let name = format!("cuda:{ordinal}");
        let info = driver::info(device, ordinal)?;
        if info.architecture < OLDEST_ARCHITECTURE {
            return Err(Error::Device {
                device: name,
                what: "starting".to_owned(),
                reason: format!(
                    "{} has compute capability {}.{}, but 8.0 (Ampere) is the oldest that has BF16 \
                     arithmetic: choose another device or the CPU",
                    info.name,
                    info.architecture / 10,
                    info.architecture % 10
                ),
            });
        }
        let retained = context.is_none();
        let context = match context {
            Some(context) => context,
            None => {
                let mut context = std::ptr::null_mut();
                // SAFETY: a valid device and a pointer to write to.
                let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
                check(&name, "starting the device", code)?;
                context
            }
        };
        // From here on Drop gives back whatever has been taken.
        let mut core = Self {
            name,
            info,
            device,
            context: Handle(context),
            retained,
            modules: Vec::new(),
            functions: HashMap::new(),
            service: Handle(std::ptr::null_mut()),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            events: Mutex::default(),
            staging: Mutex::default(),
            capture: Mutex::default(),
            capturing: AtomicBool::new(false),
            observer: Observer::default(),
        };
        core.bind()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current, and the field takes the handle.
        let code = unsafe { sys::cuStreamCreate(&mut core.service.0, flags) };
        check(&core.name, "creating a stream", code)?;
        core.load(cache)?;
        Ok(core)
    }

    /// Compiles, or takes from the cache, and loads every kernel: a first launch in the middle of a
    /// step must not load code.
    fn load(&mut self, cache: Option<&Path>) -> Result<()> {
        let nvrtc = Nvrtc::open()?;
        let architecture = self.info.architecture;
        let images: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
            let nvrtc = &nvrtc;
            let threads: Vec<_> = SOURCES
                .iter()
                .map(|source| scope.spawn(move || image(source, nvrtc, architecture, cache)))
                .collect();
            let panicked = || {
                Err(Error::Device {
                    device: "cuda".to_owned(),
                    what: "compiling the kernels".to_owned(),
                    reason: "the compiling thread panicked".to_owned(),
                })
            };
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| panicked())).collect()
        });
        for (source, image) in SOURCES.iter().zip(images) {
            let image = image?;
            let mut module = std::ptr::null_mut();
            // SAFETY: a whole CUBIN, of this compiler or with its checksum right.
            let code = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
            check(&self.name, &format!("loading {}", source.name), code)?;
            self.modules.push(Handle(module));
            for &kernel in source.kernels {
                let symbol = CString::new(kernel).unwrap_or_default();
                let mut function = std::ptr::null_mut();
                // SAFETY: a loaded module and a C string.
                let code =
                    unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) };
                check(&self.name, &format!("finding {kernel} in {}", source.name), code)?;
                self.functions.insert(kernel, Handle(function));
            }
        }
        Ok(())
    }

    /// A loaded kernel and its name.
    pub(super) fn function(&self, kernel: &str) -> Result<(&'static str, Handle<sys::CUfunction>)> {
        let found = self.functions.get_key_value(kernel);
        found.map(|(name, function)| (*name, *function)).ok_or_else(|| Error::Device {
            device: self.name.clone(),
            what: "planning a pass".to_owned(),
            reason: format!("there is no kernel {kernel}"),
        })
    }

    /// Makes the context the calling thread's current one.
    pub(super) fn bind(&self) -> Result<()> {
        let mut current = std::ptr::null_mut();
        // SAFETY: a pointer to write to.
        check(&self.name, "asking for the context", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        if current == self.context.0 {
            return Ok(());
        }
        // SAFETY: the context lives as long as this value.
        check(&self.name, "entering the context", unsafe { sys::cuCtxSetCurrent(self.context.0) })
    }

    pub(super) fn raw_context(&self) -> sys::CUcontext {
        self.context.0
    }

    /// Fails with the first failure, if there has been one; otherwise binds the context.
    pub(super) fn enter(&self) -> Result<()> {
        self.check_failure()?;
        self.bind()
    }

    pub(super) fn check_failure(&self) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Notes a failure; the first one stays.
    pub(super) fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }

    /// The result of a call; what the context does not survive is noted for every later call.
    pub(super) fn check(&self, what: &str, code: Code) -> Result<()> {
        let result = check(&self.name, what, code);
        if let Err(error) = &result
            && is_fatal(code)
        {
            self.fail(error.clone());
        }
        result
    }

    /// An event from the pool, or a new one.
    pub(super) fn event(&self) -> Result<Handle<sys::CUevent>> {
        if let Some(event) = lock(&self.events).pop() {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; a pointer to write to.
        self.check("creating an event", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Handle(event))
    }

    pub(super) fn return_event(&self, event: Handle<sys::CUevent>) {
        lock(&self.events).push(event);
    }

    /// Keeps what a capture uses alive with its graph.
    pub(super) fn keep(&self, keep: impl FnOnce() -> Keep) {
        if self.capturing.load(Ordering::Acquire)
            && let Some(kept) = lock(&self.capture).as_mut()
        {
            kept.push(keep());
        }
    }

    /// Runs what a capture on this thread would otherwise forbid, such as an allocation.
    pub(super) fn relaxed<T>(&self, run: impl FnOnce() -> T) -> T {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a valid mode, which the call replaces by the former one.
        let swapped = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        let result = run();
        if swapped == Code::CUDA_SUCCESS {
            // SAFETY: as above, with the former mode.
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        }
        result
    }
}

fn image(
    source: &Source,
    nvrtc: &Nvrtc,
    architecture: u32,
    cache: Option<&Path>,
) -> Result<Vec<u8>> {
    let key = source.key(nvrtc.version(), architecture).to_hex();
    let name = format!("{}-sm{architecture}-{}", source.name, key.get(..32).unwrap_or_default());
    if let Some(image) = cache.and_then(|folder| cache::load(folder, &name)) {
        return Ok(image);
    }
    let (image, log) = source.compile(nvrtc, architecture)?;
    if !log.trim().is_empty() {
        tracing::warn!(source = source.name, log = log.trim(), "the compiler warned");
    }
    if let Some(folder) = cache {
        cache::store(folder, &name, &image);
    }
    Ok(image)
}

impl Drop for Core {
    fn drop(&mut self) {
        // Errors have nowhere to go, and a context that has failed refuses every one of these calls.
        if self.bind().is_ok() {
            lock(&self.staging).release();
            for event in lock(&self.events).drain(..) {
                // SAFETY: the pool owns it, and nobody holds it any more.
                unsafe { sys::cuEventDestroy_v2(event.0) };
            }
            if !self.service.0.is_null() {
                // SAFETY: created here, and not used after this.
                unsafe { sys::cuStreamDestroy_v2(self.service.0) };
            }
            for module in self.modules.drain(..) {
                // SAFETY: loaded here; every plan that launches from it holds this core.
                unsafe { sys::cuModuleUnload(module.0) };
            }
        }
        if self.retained {
            // SAFETY: retained once, in `new`.
            unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

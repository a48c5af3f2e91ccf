//! The driver's answers as results, and what it says about its devices.

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use cudarc::driver::sys;
use sys::CUdevice_attribute as Attribute;
use sys::CUresult as Code;

use super::library::{self, Opened};
use crate::error::{Error, Result};

/// A handle of the driver. Its functions may be called from any thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle<T>(pub(super) T);

// SAFETY: a driver handle is a name; the driver locks what stands behind it.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// Names for a code: `CUDA_ERROR_OUT_OF_MEMORY: out of memory`.
pub(super) fn describe(code: Code) -> String {
    let text = |get: unsafe fn(Code, *mut *const c_char) -> Code| {
        let mut text = std::ptr::null();
        // SAFETY: a valid pointer to write to; the driver's strings are static.
        if unsafe { get(code, &mut text) } != Code::CUDA_SUCCESS || text.is_null() {
            return String::new();
        }
        // SAFETY: the call above has set it to a static C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    format!("{}: {}", text(sys::cuGetErrorName), text(sys::cuGetErrorString))
}

/// An error of the driver for a call that did not succeed.
pub(super) fn check(device: &str, what: &str, code: Code) -> Result<()> {
    if code == Code::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Device { device: device.to_owned(), what: what.to_owned(), reason: describe(code) })
}

/// True for the codes after which a context answers nothing else.
pub(super) const fn is_fatal(code: Code) -> bool {
    matches!(
        code,
        Code::CUDA_ERROR_DEINITIALIZED
            | Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_LAUNCH_FAILED
    )
}

/// Opens and initialises the driver, once.
pub(super) fn initialise() -> Result<&'static Opened> {
    static DRIVER: OnceLock<Result<Opened>> = OnceLock::new();
    let opened = DRIVER.get_or_init(|| {
        // cudarc panics where a library is absent, so nothing of it is called before this.
        let opened = library::driver()?;
        // SAFETY: the driver's first call, with the flags that it wants.
        check("cuda", "initialising the driver", unsafe { sys::cuInit(0) })?;
        tracing::debug!(path = opened.path, "opened the driver");
        Ok(opened)
    });
    opened.as_ref().map_err(Clone::clone)
}

/// A device as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its number among the visible devices.
    pub ordinal: u32,
    /// The product's name.
    pub name: String,
    /// The compute capability, times ten: 90 for Hopper.
    pub architecture: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory, free or not.
    pub memory: u64,
}

/// What [`probe`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The name or path by which the driver's library was opened.
    pub driver_path: String,
    /// The CUDA version that the driver serves, such as (13, 0).
    pub driver_version: (u32, u32),
    /// Every visible device.
    pub devices: Vec<DeviceInfo>,
}

/// Looks for the driver and its devices.
///
/// # Errors
/// [`Error::Device`] that says what was tried and what to install.
pub fn probe() -> Result<Report> {
    let driver = initialise()?;
    let mut version = 0;
    // SAFETY: a valid integer to write to.
    check("cuda", "asking the driver for its version", unsafe {
        sys::cuDriverGetVersion(&mut version)
    })?;
    let mut count = 0;
    // SAFETY: a valid integer to write to.
    check("cuda", "counting the devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    let version = version.unsigned_abs();
    Ok(Report {
        driver_path: driver.path.clone(),
        driver_version: (version / 1000, version % 1000 / 10),
        devices: (0..count.unsigned_abs())
            .map(|ordinal| info(device(ordinal)?, ordinal))
            .collect::<Result<_>>()?,
    })
}

/// The device with this number.
pub(super) fn device(ordinal: u32) -> Result<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: a valid integer to write to.
    let code = unsafe { sys::cuDeviceGet(&mut device, c_int::try_from(ordinal).unwrap_or(-1)) };
    check(&format!("cuda:{ordinal}"), "finding the device", code)?;
    Ok(device)
}

fn attribute(device: sys::CUdevice, ordinal: u32, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: a valid integer to write to.
    let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
    check(&format!("cuda:{ordinal}"), "asking for an attribute", code)?;
    Ok(value.unsigned_abs())
}

/// Describes a device.
pub(super) fn info(device: sys::CUdevice, ordinal: u32) -> Result<DeviceInfo> {
    let mut name = [0_u8; 256];
    // SAFETY: the driver writes at most as many bytes as it is told, a zero at the end.
    let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device) };
    check(&format!("cuda:{ordinal}"), "asking for the name", code)?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
    let of = |which| attribute(device, ordinal, which);
    let mut memory = 0;
    // SAFETY: a valid integer to write to.
    let code = unsafe { sys::cuDeviceTotalMem_v2(&mut memory, device) };
    check(&format!("cuda:{ordinal}"), "asking for the memory's size", code)?;
    Ok(DeviceInfo {
        ordinal,
        name,
        architecture: of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory: memory as u64,
    })
}

/// Whether a device reaches another one's memory by itself, over NVLink or PCIe. Where it does not,
/// NCCL's bytes go through host memory.
///
/// # Errors
/// [`Error::Device`].
pub fn can_access_peer(from: u32, to: u32) -> Result<bool> {
    initialise()?;
    let mut can = 0;
    // SAFETY: a valid integer to write to, and two devices.
    let code = unsafe { sys::cuDeviceCanAccessPeer(&mut can, device(from)?, device(to)?) };
    check(&format!("cuda:{from}"), "asking for peer access", code)?;
    Ok(can != 0)
}

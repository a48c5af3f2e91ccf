//! The libraries and devices of CUDA.

use std::path::Path;

use anyhow::{Context, Result, bail};
use gather8_collectives::{Launch, nccl};
use gather8_kernels::cuda::{Cuda, Nvrtc, can_access_peer, probe};
use gather8_kernels::{Backend, Memory};
use libloading::Library;

use super::{Report, Start};
use crate::seat::ordinal;

impl Report {
    pub(super) fn look_for_cuda(&mut self, launch: Option<&Launch>, start: Option<Start>) {
        let devices = self.driver();
        match Nvrtc::open() {
            Ok(nvrtc) => {
                let (major, minor) = nvrtc.version();
                self.add("NVRTC", true, format!("{major}.{minor}, {}", place(nvrtc.path())));
            }
            Err(error) => self.lack("NVRTC", &error),
        }
        match cublas() {
            Ok(text) => self.add("cuBLASLt", true, text),
            Err(error) => self.add(
                "cuBLASLt",
                false,
                format!("{error:#}; gather8 does without, a trainer's matrix products may not"),
            ),
        }
        match nccl::probe() {
            Ok((path, version)) => {
                // Open once more, so that the system can say where it lies.
                // SAFETY: the library was just opened by the same name.
                let _library = unsafe { Library::new(&path) };
                self.add("NCCL", true, format!("{version}, {}", place(&path)));
            }
            Err(error) if launch.is_some_and(|launch| launch.world > 1) => {
                self.lack("NCCL", &error);
            }
            Err(error) => {
                self.add("NCCL", false, format!("{error}; a world of 1 does without"));
            }
        }
        self.peers(devices);
        if self.cuda.is_some() {
            return;
        }
        let Some(launch) = launch else { return };
        match (ordinal(launch, devices, true), start) {
            (Ok(ordinal), Some(start)) => self.start(ordinal, start),
            (Ok(_), None) => {}
            (Err(error), _) => self.lack("GPU", &error),
        }
    }

    fn start(&mut self, ordinal: u32, start: Start) {
        let name = format!("cuda:{ordinal}");
        let cuda = match Cuda::new(ordinal) {
            Ok(cuda) => cuda,
            Err(error) => return self.lack(name, &error),
        };
        self.add(name.clone(), true, "starts, with its kernels");
        if start.memory > 0 {
            match cuda.alloc(start.memory, Memory::Device) {
                Ok(_) => self.add(name, true, format!("has {} bytes free", start.memory)),
                Err(error) => self.lack(name, &error),
            }
        }
    }

    /// The driver and its devices; how many there are.
    fn driver(&mut self) -> u32 {
        let found = match probe() {
            Ok(found) => found,
            Err(error) => {
                self.lack("driver", &error);
                return 0;
            }
        };
        let (major, minor) = found.driver_version;
        let release = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
        let release = match release.trim() {
            "" => String::new(),
            release => format!("{release}, "),
        };
        self.add(
            "driver",
            true,
            format!("{release}serves CUDA {major}.{minor}, {}", place(&found.driver_path)),
        );
        for device in &found.devices {
            let text = format!(
                "{}, sm_{}, {} multiprocessors, {:.1} GB of memory",
                device.name,
                device.architecture,
                device.multiprocessors,
                device.memory as f64 / 1e9
            );
            let name = format!("cuda:{}", device.ordinal);
            if device.architecture < 80 {
                self.lack(
                    name,
                    &format!("{text}: too old, Ampere (sm_80) is the oldest that runs"),
                );
            } else {
                self.add(name, true, text);
            }
        }
        u32::try_from(found.devices.len()).unwrap_or(u32::MAX)
    }

    /// Whether GPUs reach each other's memory.
    fn peers(&mut self, devices: u32) {
        for from in 0..devices {
            for to in from + 1..devices {
                let pair = format!("cuda:{from} and cuda:{to}");
                match can_access_peer(from, to) {
                    Ok(true) => self.add("peers", true, format!("{pair} reach each other")),
                    Ok(false) => self.add(
                        "peers",
                        false,
                        format!("{pair} do not reach each other: bytes go through host memory"),
                    ),
                    Err(error) => self.add("peers", false, error.to_string()),
                }
            }
        }
    }
}

fn cublas() -> Result<String> {
    let mut attempts = Vec::new();
    for name in ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"] {
        // SAFETY: cuBLASLt's initialisers start nothing.
        let library = match unsafe { Library::new(name) } {
            Ok(library) => library,
            Err(_) => {
                attempts.push(name);
                continue;
            }
        };
        // SAFETY: the function of its C interface with its type there.
        let version =
            unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0") };
        let version = version.with_context(|| format!("{name} is no cuBLASLt"))?;
        // SAFETY: a function without arguments.
        let version = unsafe { version() };
        return Ok(format!(
            "{}.{}.{}, {}",
            version / 10_000,
            version / 100 % 100,
            version % 100,
            place(name)
        ));
    }
    bail!(
        "install cuBLAS (of the CUDA toolkit, or the Python wheel nvidia-cublas) (tried {})",
        attempts.join(", ")
    )
}

/// The file of an open library, of which its name is known.
fn place(name: &str) -> String {
    let file = Path::new(name).file_name().and_then(|file| file.to_str()).unwrap_or(name);
    // The name is a link, often to a file with a longer version, or another one.
    let stem = file.find(".so").and_then(|at| file.get(..at + 3)).unwrap_or(file);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps.lines().filter_map(|line| line.split_once('/')).find_map(|(_, path)| {
        let file = path.rsplit('/').next()?;
        file.starts_with(stem).then(|| format!("/{path}"))
    });
    path.unwrap_or_else(|| name.to_owned())
}

//! What the numbers were measured on.

use serde::Serialize;

/// A machine, as far as its CPU goes.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name as the system gives it.
    pub cpu: String,
    /// Threads that this process may run at once.
    pub cores: usize,
    /// Vector instructions that it has, of those that the passes can use.
    pub features: Vec<&'static str>,
    /// Operating system and architecture.
    pub system: String,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = info.lines().find_map(|line| line.strip_prefix("model name"));
        let name = name.map(|rest| rest.trim_start_matches([' ', '\t', ':']).trim().to_owned());
        Self {
            cpu: name.unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            features: features(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    macro_rules! detected {
        ($($name:tt),*) => {
            [$(($name, std::arch::is_x86_feature_detected!($name))),*]
        };
    }
    let all = detected!(
        "sse4.2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "bmi2",
        "avx512f",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512vl",
        "avx512vbmi",
        "avx512bf16",
        "avx512fp16"
    );
    all.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

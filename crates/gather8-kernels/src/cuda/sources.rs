//! The kernels' sources and how they are compiled.

use super::nvrtc::{Header, Nvrtc};
use crate::error::Result;

/// What the sources include, under these names.
const HEADERS: [Header<'static>; 3] = [
    Header { name: "numerics.cuh", text: include_str!("../../kernels/numerics.cuh") },
    Header { name: "ptx.cuh", text: include_str!("../../kernels/ptx.cuh") },
    Header { name: "table.cuh", text: include_str!("../../kernels/table.cuh") },
];

/// One module: a source and the kernels in it.
pub struct Source {
    /// The file's name.
    pub name: &'static str,
    text: &'static str,
    /// Every kernel that is looked up in it.
    pub kernels: &'static [&'static str],
}

/// Every module, in the order in which they are compiled.
pub const SOURCES: [Source; 8] = [
    Source {
        name: "amax.cu",
        text: include_str!("../../kernels/amax.cu"),
        kernels: &["amax_bf16", "amax_f16", "amax_f32"],
    },
    Source {
        name: "cast.cu",
        text: include_str!("../../kernels/cast.cu"),
        kernels: &[
            "cast_bf16",
            "cast_f16",
            "cast_f32",
            "cast_bf16_extra",
            "cast_f16_extra",
            "cast_f32_extra",
        ],
    },
    Source { name: "delay.cu", text: include_str!("../../kernels/delay.cu"), kernels: &["delay"] },
    Source {
        name: "elementwise.cu",
        text: include_str!("../../kernels/elementwise.cu"),
        kernels: &[
            "decode_bf16",
            "decode_f32",
            "divide_bf16_bf16",
            "divide_bf16_f32",
            "divide_f32_bf16",
            "divide_f32_f32",
            "accumulate_bf16",
            "accumulate_f32",
        ],
    },
    Source {
        name: "norm.cu",
        text: include_str!("../../kernels/norm.cu"),
        kernels: &["norm_bf16", "norm_f32", "sum_norms", "control"],
    },
    Source {
        name: "optimize.cu",
        text: include_str!("../../kernels/optimize.cu"),
        kernels: &[
            "optimize_bf16_f32_remainder",
            "optimize_bf16_f32_copy",
            "optimize_bf16_f32_itself",
            "optimize_bf16_bf16_remainder",
            "optimize_bf16_bf16_copy",
            "optimize_bf16_bf16_itself",
            "optimize_f32_f32_remainder",
            "optimize_f32_f32_copy",
            "optimize_f32_f32_itself",
            "optimize_f32_bf16_remainder",
            "optimize_f32_bf16_copy",
            "optimize_f32_bf16_itself",
        ],
    },
    Source {
        name: "transpose.cu",
        text: include_str!("../../kernels/transpose.cu"),
        kernels: &["transpose"],
    },
    Source {
        name: "update_scales.cu",
        text: include_str!("../../kernels/update_scales.cu"),
        kernels: &["update_scales"],
    },
];

/// The options that the numbers depend on: no contraction, no flush to zero, exact division and
/// root; and the architecture, such as 90.
pub fn options(architecture: u32) -> Vec<String> {
    [
        format!("--gpu-architecture=sm_{architecture}"),
        "--std=c++17".to_owned(),
        "--fmad=false".to_owned(),
        "--ftz=false".to_owned(),
        "--prec-div=true".to_owned(),
        "--prec-sqrt=true".to_owned(),
    ]
    .into()
}

impl Source {
    /// Machine code for an architecture, and the compiler's log.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) with the log.
    pub fn compile(&self, nvrtc: &Nvrtc, architecture: u32) -> Result<(Vec<u8>, String)> {
        nvrtc.compile(self.name, self.text, &HEADERS, &options(architecture))
    }

    /// What decides the machine code: source, headers, options, compiler version.
    pub(super) fn key(&self, version: (u32, u32), architecture: u32) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(self.name.as_bytes());
        part(self.text.as_bytes());
        for header in &HEADERS {
            part(header.name.as_bytes());
            part(header.text.as_bytes());
        }
        for option in options(architecture) {
            part(option.as_bytes());
        }
        part(&version.0.to_le_bytes());
        part(&version.1.to_le_bytes());
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_kernel_is_in_its_source() {
        for source in &SOURCES {
            for kernel in source.kernels {
                // Some names are put together by macros from their parts.
                let direct = source.text.contains(&format!("{kernel}("))
                    || source.text.contains(&format!("({kernel},"));
                let parts = kernel.split('_').all(|part| source.text.contains(part));
                assert!(direct || parts, "{kernel} is not in {}", source.name);
            }
        }
    }

    #[test]
    fn the_key_depends_on_everything() {
        let [first, second, ..] = &SOURCES;
        let key = first.key((13, 0), 90);
        assert_eq!(key, first.key((13, 0), 90));
        for other in [first.key((13, 1), 90), first.key((13, 0), 89), second.key((13, 0), 90)] {
            assert_ne!(key, other);
        }
    }
}

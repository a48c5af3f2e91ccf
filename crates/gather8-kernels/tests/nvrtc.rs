//! Every kernel compiles for every architecture that is promised, with the code that compiles it on
//! a user's machine. Needs the compiler but no GPU; `.ci/kernels` gets one and runs this.
#![cfg(feature = "cuda")]

use gather8_kernels::cuda::{Nvrtc, SOURCES};

#[test]
#[ignore = "needs NVRTC: run .ci/kernels"]
fn every_kernel_compiles_without_a_warning() {
    let nvrtc = Nvrtc::open().unwrap();
    let mut compiled = 0;
    for architecture in [80, 89, 90, 100] {
        for source in &SOURCES {
            let (cubin, log) = source.compile(&nvrtc, architecture).unwrap();
            assert_eq!(log.trim(), "", "{} for sm_{architecture}", source.name);
            for kernel in source.kernels {
                let section = format!(".text.{kernel}\0");
                let found = cubin.windows(section.len()).any(|window| window == section.as_bytes());
                assert!(found, "{kernel} is missing in {} for sm_{architecture}", source.name);
            }
            compiled += 1;
        }
    }
    println!("{nvrtc:?}: {compiled} modules");
}

#[test]
#[ignore = "needs NVRTC: run .ci/kernels"]
fn an_unknown_architecture_is_an_error_with_the_compilers_words() {
    let nvrtc = Nvrtc::open().unwrap();
    let [source, ..] = &SOURCES;
    let text = source.compile(&nvrtc, 7).unwrap_err().to_string();
    assert!(text.starts_with("cuda: compiling amax.cu: NVRTC "), "{text}");
    assert!(text.contains("gpu-architecture"), "{text}");
}

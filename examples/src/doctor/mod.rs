//! What a machine has of what gather8 wants, and what keeps it from running.

#[cfg(feature = "cuda")]
mod cuda;

use std::fmt;

use gather8_collectives::Launch;
use gather8_kernels::simd::Level;
use serde::Serialize;

use crate::bench::Machine;

/// Why `--device cuda` ends at once in a build without it.
pub const NOT_COMPILED_IN: &str = "this program is built without CUDA: build it with `--features cuda` (which needs no CUDA on the building machine), or use --device cpu";

/// What this rank's GPU is started for.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// Bytes that it must have free.
    pub memory: u64,
}

/// One thing that was looked for.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// What, such as `NCCL`.
    pub what: String,
    /// Whether it is there.
    pub there: bool,
    /// Where and which, or why not and what to install.
    pub text: String,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Everything that was looked for, in the order in which it is needed.
    pub findings: Vec<Finding>,
    /// What keeps ranks on the CPU from running.
    pub cpu: Option<String>,
    /// What keeps ranks on GPUs from running.
    pub cuda: Option<String>,
}

impl Report {
    fn add(&mut self, what: impl Into<String>, there: bool, text: impl Into<String>) {
        self.findings.push(Finding { what: what.into(), there, text: text.into() });
    }

    /// Notes what something fails with; the first problem of the GPUs stays.
    #[cfg(feature = "cuda")]
    fn lack(&mut self, what: impl Into<String>, problem: &dyn fmt::Display) {
        let text = problem.to_string();
        self.cuda.get_or_insert(text.clone());
        self.add(what, false, text);
    }

    /// Looks at this machine. With `start` this rank's GPU is started too, which compiles the
    /// kernels.
    pub fn here(start: Option<Start>) -> Self {
        let mut report = Self { findings: Vec::new(), cpu: None, cuda: None };
        let compiled_in = cfg!(feature = "cuda");
        let build = if compiled_in { "CUDA is compiled in" } else { "CUDA is not compiled in" };
        report.add("gather8", true, format!("{}, {build}", env!("CARGO_PKG_VERSION")));
        let machine = Machine::here();
        let level = Level::best().name();
        report.add(
            "CPU",
            true,
            format!(
                "{}, {} cores, {}; passes use {level} instructions",
                machine.cpu, machine.cores, machine.system
            ),
        );
        let launch = Launch::from_env();
        match &launch {
            Ok(launch) => report.add("ranks", true, launch.said()),
            Err(error) => {
                report.add("ranks", false, error.to_string());
                report.cpu = Some(error.to_string());
                report.cuda = Some(error.to_string());
            }
        }
        report.look_for_cuda(launch.as_ref().ok(), start);
        report
    }

    #[cfg(not(feature = "cuda"))]
    fn look_for_cuda(&mut self, _: Option<&Launch>, _: Option<Start>) {
        self.cuda.get_or_insert_with(|| NOT_COMPILED_IN.to_owned());
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { what, there, text } in &self.findings {
            let mark = if *there { "" } else { "MISSING: " };
            writeln!(f, "{what:<10} {mark}{text}")?;
        }
        for (device, problem) in [("cpu", &self.cpu), ("cuda", &self.cuda)] {
            match problem {
                None => writeln!(f, "--device {device} can run")?,
                Some(_) => writeln!(f, "--device {device} cannot run")?,
            }
        }
        Ok(())
    }
}

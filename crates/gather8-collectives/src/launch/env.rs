//! Variables of an environment, read.

use super::{Family, Meeting, launch_error};
use crate::error::Result;

/// Step numbers from here on are Slurm's own, such as the batch script's.
const SLURM_RESERVED_STEPS: u32 = 0xffff_fff0;

pub(super) struct Env<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<u32>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(launch_error(format!(
                "{name} is `{}`, which is no number from 0 on",
                shown(&text)
            ))),
        }
    }

    /// Inside a step that srun started; the batch script itself is a step with a reserved number,
    /// or none.
    pub(super) fn in_slurm_step(&self) -> bool {
        let step = self.text("SLURM_STEP_ID").and_then(|step| step.trim().parse::<u32>().ok());
        step.is_some_and(|step| step < SLURM_RESERVED_STEPS)
    }

    pub(super) fn job(&self, family: Family, parent: Option<u32>) -> String {
        let text = |name: &str| self.text(name);
        let slurm = || {
            // The parts of a heterogeneous job have numbers of their own.
            let job = text("SLURM_HET_JOB_ID").or_else(|| text("SLURM_JOB_ID"))?;
            Some(format!("slurm-{job}.{}", text("SLURM_STEP_ID")?))
        };
        let torch = || {
            let restart = text("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
            let id = text("TORCHELASTIC_RUN_ID").filter(|id| id != "none").unwrap_or_default();
            let address = text("MASTER_ADDR").unwrap_or_default();
            let port = text("MASTER_PORT")?;
            Some(format!("torch-{id}-{address}-{port}-{restart}"))
        };
        let named = match family {
            Family::Torchrun => torch(),
            Family::Slurm => slurm(),
            Family::Pmi => text("PMI_JOBID").or_else(|| text("PMI_PORT")),
            Family::OpenMpi => text("PMIX_NAMESPACE"),
            _ => None,
        };
        // These two give one name to all ranks of a start, and to no other start: two starts with
        // the same GATHER8_JOB stay apart.
        let unique = matches!(family, Family::OpenMpi | Family::Slurm);
        match (text("GATHER8_JOB"), named) {
            (Some(own), Some(named)) if unique => format!("{own}-{named}"),
            (Some(name), _) | (None, Some(name)) => name,
            (None, None) => text("PMIX_NAMESPACE")
                .or_else(|| parent.map(|parent| format!("parent-{parent}")))
                .unwrap_or_else(|| "default".to_owned()),
        }
    }

    /// `GATHER8_ADDR` if it is set; torchrun's master if there are several hosts.
    pub(super) fn meeting(
        &self,
        family: Family,
        port: Option<u16>,
        one_host: bool,
    ) -> Result<Option<Meeting>> {
        if let Some(address) = self.text("GATHER8_ADDR") {
            return meeting_of(&address, port).map(Some);
        }
        if family != Family::Torchrun || one_host {
            return Ok(None);
        }
        let Some(host) = self.text("MASTER_ADDR") else { return Ok(None) };
        let port = match (port, self.number("MASTER_PORT")?) {
            (Some(port), _) => port,
            // The agent itself listens on MASTER_PORT.
            (None, Some(port)) => port_of("MASTER_PORT", port.saturating_add(1))?,
            (None, None) => return Ok(None),
        };
        Ok(Some(Meeting { host, port }))
    }
}

/// `host:port`, `[v6]:port`, or a host whose port stands in `GATHER8_PORT`.
fn meeting_of(address: &str, port: Option<u16>) -> Result<Meeting> {
    let refuse = |why: &str| {
        Err(launch_error(format!(
            "GATHER8_ADDR is `{}`: {why} (host:port, or a host with GATHER8_PORT)",
            shown(address)
        )))
    };
    let (host, after) = match address.rsplit_once(':') {
        Some((host, after)) if !host.contains(':') || host.ends_with(']') => (host, Some(after)),
        _ => (address, None),
    };
    let port = match after {
        Some(text) => match text.parse::<u16>() {
            Ok(port) if port > 0 => Some(port),
            _ => return refuse("its port is no number from 1 to 65535"),
        },
        None => port,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match port {
        _ if host.is_empty() => refuse("it names no host"),
        Some(port) => Ok(Meeting { host: host.to_owned(), port }),
        None => refuse("it names no port"),
    }
}

pub(super) fn port_of(name: &str, number: u32) -> Result<u16> {
    match u16::try_from(number) {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(launch_error(format!("{name} gives port {number}, which is not in 1 to 65535"))),
    }
}

/// A value for an error text: short, and without control characters.
fn shown(text: &str) -> String {
    text.chars().take(64).map(|c| if c.is_control() { '?' } else { c }).collect()
}

//! A pass, checked once and launched often.

use std::fmt;
use std::sync::Arc;

use crate::check::check_all;
use crate::error::Result;
use crate::job::Job;

use super::access::{Touches, of_jobs};
use super::lane::Work;
use super::{Cpu, passes};

/// A pass over a list of tensors, ready to launch.
#[derive(Clone)]
pub struct Plan {
    owner: u64,
    label: Arc<str>,
    touches: Touches,
    jobs: Arc<[Job<Cpu>]>,
    threads: usize,
}

impl Plan {
    pub(super) fn new(owner: u64, threads: usize, jobs: &[Job<Cpu>]) -> Result<Self> {
        let pass = check_all(jobs)?.unwrap_or("pass");
        Ok(Self {
            owner,
            label: label(pass, jobs).into(),
            touches: Touches::new(owner, pass, "job", of_jobs(jobs))?,
            jobs: jobs.into(),
            threads,
        })
    }

    pub(super) fn owner(&self) -> u64 {
        self.owner
    }

    pub(super) fn label(&self) -> Arc<str> {
        Arc::clone(&self.label)
    }

    pub(super) fn touches(&self) -> &Touches {
        &self.touches
    }

    /// True if there is nothing to launch.
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// One launch, to be issued with [`touches`](Self::touches).
    pub(super) fn work(&self) -> Work {
        let (jobs, threads) = (Arc::clone(&self.jobs), self.threads);
        Box::new(move || {
            // SAFETY: this operation is admitted with what `of_jobs` lists for these jobs, and the
            // list is disjoint, as `Touches::new` has found.
            unsafe { passes::run(&jobs, threads) }
        })
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plan({})", self.label)
    }
}

fn label(pass: &str, jobs: &[Job<Cpu>]) -> String {
    match jobs {
        [] => "empty pass".to_owned(),
        [Job::UpdateScales(job)] => format!("{pass} of {} slots", job.slots),
        [Job::Control(_) | Job::SumNorms(_)] => pass.to_owned(),
        [_] => format!("{pass} of 1 tensor"),
        _ => format!("{pass} of {} tensors", jobs.len()),
    }
}

//! Who am I? Rank, world and meeting place, from what the launcher has put into the environment.

mod device;
mod env;
mod families;

use crate::error::{Error, Result};
use env::{Env, port_of};
use families::{FAMILIES, Names};

pub use families::Family;

/// Where ranks that may be on several hosts meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Host name or address of rank 0.
    pub host: String,
    /// Its port.
    pub port: u16,
}

/// What a process knows of its place among the others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// This rank, from 0.
    pub rank: u32,
    /// Ranks in the world.
    pub world: u32,
    /// This rank among those of its host, if the launcher says.
    pub local_rank: Option<u32>,
    /// Ranks on this host, if the launcher says.
    pub local_world: Option<u32>,
    /// What tells this job from others on the same host.
    pub job: String,
    /// Where the ranks meet, if they may be on several hosts; else through a file on this one.
    pub meeting: Option<Meeting>,
    /// `GATHER8_PORT`: the port to meet on.
    pub port: Option<u16>,
    /// Which variables were used.
    pub family: Family,
}

impl Launch {
    /// A world of one.
    pub fn alone() -> Self {
        Self {
            rank: 0,
            world: 1,
            local_rank: Some(0),
            local_world: Some(1),
            job: "alone".to_owned(),
            meeting: None,
            port: None,
            family: Family::Alone,
        }
    }

    /// A rank of a world that the caller knows, on this host.
    pub fn explicit(rank: u32, world: u32, job: impl Into<String>) -> Result<Self> {
        let launch = Self {
            rank,
            world,
            local_rank: Some(rank),
            local_world: Some(world),
            job: job.into(),
            meeting: None,
            port: None,
            family: Family::Explicit,
        };
        launch.check()?;
        Ok(launch)
    }

    /// Reads this process's environment; says at INFO what it found.
    ///
    /// # Errors
    /// [`Error::Launch`], as [`discover`](Self::discover).
    pub fn from_env() -> Result<Self> {
        // Values that are no Unicode name no rank.
        let launch = Self::discover(&|name| std::env::var(name).ok(), parent())?;
        tracing::info!("{}", launch.said());
        Ok(launch)
    }

    /// Reads an environment: the first complete family of variables in the order of [`Family`].
    /// `parent` tells jobs apart whose launcher gives them no name: the parent process's number.
    ///
    /// # Errors
    /// [`Error::Launch`] if no family is complete and one is partial (its variables are named), if
    /// a variable is no number, or if the numbers of the family that is used contradict each other.
    pub fn discover(env: &dyn Fn(&str) -> Option<String>, parent: Option<u32>) -> Result<Self> {
        let env = Env(env);
        let mut partial = Vec::new();
        for (family, names) in FAMILIES {
            if *family == Family::Slurm && !env.in_slurm_step() {
                continue;
            }
            let missing = names.required.iter().filter(|name| env.text(name).is_none());
            let missing = missing.copied().collect::<Vec<_>>();
            if missing.is_empty() {
                return Self::of_family(&env, *family, names, parent);
            }
            if missing.len() < names.required.len() {
                let set = names.required.iter().filter(|name| !missing.contains(name));
                partial.push(format!(
                    "{} {} set but {} {} not",
                    list(&set.copied().collect::<Vec<_>>()),
                    if names.required.len() - missing.len() == 1 { "is" } else { "are" },
                    list(&missing),
                    if missing.len() == 1 { "is" } else { "are" },
                ));
            }
        }
        if !partial.is_empty() {
            return Err(launch_error(format!(
                "{}: set all of them, or none for a world of 1",
                partial.join("; ")
            )));
        }
        let in_batch = env.text("SLURM_JOB_ID").is_some();
        Ok(Self {
            family: if in_batch { Family::SlurmBatch } else { Family::Alone },
            ..Self::alone()
        })
    }

    fn of_family(
        env: &Env<'_>,
        family: Family,
        names: &Names,
        parent: Option<u32>,
    ) -> Result<Self> {
        let number = |name: Option<&&str>| -> Result<Option<u32>> {
            name.map_or(Ok(None), |name| env.number(name))
        };
        let [rank, world, rest @ ..] = names.required else {
            return Err(launch_error("a family names rank and world".to_owned()));
        };
        let needed = |name: &str| -> Result<u32> {
            env.number(name)?.ok_or_else(|| launch_error(format!("{name} is not set")))
        };
        let world_size = needed(world)?;
        let mut local_world = number(names.local_world.as_ref())?;
        if family == Family::Slurm && env.number("SLURM_STEP_NUM_NODES")? == Some(1) {
            local_world = Some(world_size);
        }
        let local_rank = number(rest.first().or(names.local_rank.as_ref()))?;
        let port =
            env.number("GATHER8_PORT")?.map(|port| port_of("GATHER8_PORT", port)).transpose()?;
        let launch = Self {
            rank: needed(rank)?,
            world: world_size,
            local_rank,
            local_world,
            job: env.job(family, parent),
            meeting: env.meeting(family, port, local_world == Some(world_size))?,
            port,
            family,
        };
        launch.check()?;
        Ok(launch)
    }

    /// True if the launcher says that all ranks are on this host.
    pub fn one_host(&self) -> bool {
        self.local_world == Some(self.world)
    }

    /// What was found, in one line.
    pub fn said(&self) -> String {
        match self.family {
            Family::Alone => {
                "no launcher's variables are set: a world of 1 (start with mpirun, srun or torchrun for more)".to_owned()
            }
            Family::SlurmBatch => {
                "a Slurm batch script outside of any step: a world of 1 (start the ranks with srun or mpirun)".to_owned()
            }
            family => format!(
                "rank {} of {} from {family}, job `{}`{}",
                self.rank,
                self.world,
                self.job,
                self.local_rank.map_or(String::new(), |rank| format!(", local rank {rank}"))
            ),
        }
    }

    fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(launch_error(format!("{problem} ({})", self.family)));
        if self.world == 0 {
            return refuse("the world has 0 ranks".to_owned());
        }
        if self.rank >= self.world {
            return refuse(format!("rank {} lies outside a world of {}", self.rank, self.world));
        }
        if let (Some(rank), Some(world)) = (self.local_rank, self.local_world)
            && rank >= world
        {
            return refuse(format!("local rank {rank} lies outside {world} local ranks"));
        }
        if let Some(local) = self.local_world
            && (local > self.world || local == 0)
        {
            return refuse(format!("{local} local ranks in a world of {}", self.world));
        }
        if let Some(local) = self.local_rank
            && local >= self.world
        {
            return refuse(format!("local rank {local} in a world of {}", self.world));
        }
        Ok(())
    }
}

fn parent() -> Option<u32> {
    #[cfg(unix)]
    return Some(std::os::unix::process::parent_id());
    #[cfg(not(unix))]
    None
}

fn list(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [init @ .., last] => format!("{} and {last}", init.join(", ")),
    }
}

fn launch_error(problem: String) -> Error {
    Error::Launch { problem }
}

//! Who am I? Rank, world and meeting place, from what the launcher has put into the environment.

use std::fmt;

use crate::error::{Error, Result};

/// Step numbers from here on are Slurm's own, such as the batch script's.
const SLURM_RESERVED_STEPS: u32 = 0xffff_fff0;

/// Which launcher's variables were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// `GATHER8_RANK`, `GATHER8_WORLD`.
    Explicit,
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`: torchrun, and who imitates it.
    Torchrun,
    /// `OMPI_COMM_WORLD_*`: Open MPI.
    OpenMpi,
    /// `PMI_RANK`, `PMI_SIZE`: MPICH and its relatives.
    Pmi,
    /// `SLURM_*` inside a job step: srun.
    Slurm,
    /// A Slurm batch script outside of any step: a world of 1.
    SlurmBatch,
    /// Nothing was set: a world of 1.
    Alone,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => "GATHER8_RANK and GATHER8_WORLD",
            Self::Torchrun => "torchrun's variables",
            Self::OpenMpi => "Open MPI's variables",
            Self::Pmi => "PMI variables (MPICH)",
            Self::Slurm => "Slurm's variables",
            Self::SlurmBatch => "Slurm's batch script",
            Self::Alone => "no launcher",
        })
    }
}

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

    /// Which of the `visible` devices this rank uses: the only one, else the one of its local rank.
    /// With `share`, ranks beyond the last device start again from the first.
    ///
    /// # Errors
    /// [`Error::Launch`] if no device is visible, if there is none for this rank, or if there are
    /// several and the launcher has not said which local rank this is.
    pub fn device(&self, visible: u32, share: bool) -> Result<u32> {
        match (visible, self.local_rank) {
            (0, _) => Err(launch_error("no device is visible".to_owned())),
            (1, _) => Ok(0),
            (_, Some(local)) if local < visible => Ok(local),
            (_, Some(local)) if share => Ok(local % visible),
            (_, Some(local)) => Err(launch_error(format!(
                "local rank {local} has no device among {visible}: start fewer ranks per host, or let them share"
            ))),
            (_, None) => Err(launch_error(format!(
                "{visible} devices are visible and {} give no local rank: set GATHER8_LOCAL_RANK, or make one device visible to each rank",
                self.family
            ))),
        }
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

/// The variables of a family: rank and world come first.
struct Names {
    required: &'static [&'static str],
    local_rank: Option<&'static str>,
    local_world: Option<&'static str>,
}

const FAMILIES: &[(Family, Names)] = &[
    (
        Family::Explicit,
        Names {
            required: &["GATHER8_RANK", "GATHER8_WORLD"],
            local_rank: Some("GATHER8_LOCAL_RANK"),
            local_world: Some("GATHER8_LOCAL_WORLD"),
        },
    ),
    (
        Family::Torchrun,
        Names {
            required: &["RANK", "WORLD_SIZE", "LOCAL_RANK"],
            local_rank: None,
            local_world: Some("LOCAL_WORLD_SIZE"),
        },
    ),
    (
        Family::OpenMpi,
        Names {
            required: &[
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
            ],
            local_rank: None,
            local_world: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        },
    ),
    (
        Family::Pmi,
        Names {
            required: &["PMI_RANK", "PMI_SIZE"],
            local_rank: Some("MPI_LOCALRANKID"),
            local_world: Some("MPI_LOCALNRANKS"),
        },
    ),
    (
        Family::Slurm,
        Names {
            required: &["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],
            local_rank: None,
            local_world: None,
        },
    ),
];

struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<u32>> {
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
    fn in_slurm_step(&self) -> bool {
        let step = self.text("SLURM_STEP_ID").and_then(|step| step.trim().parse::<u32>().ok());
        step.is_some_and(|step| step < SLURM_RESERVED_STEPS)
    }

    fn job(&self, family: Family, parent: Option<u32>) -> String {
        let text = |name: &str| self.text(name);
        let slurm = || Some(format!("slurm-{}.{}", text("SLURM_JOB_ID")?, text("SLURM_STEP_ID")?));
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
            _ => None,
        };
        text("GATHER8_JOB")
            .or(named)
            .or_else(|| text("PMIX_NAMESPACE"))
            .or_else(|| parent.map(|parent| format!("parent-{parent}")))
            .unwrap_or_else(|| "default".to_owned())
    }

    /// `GATHER8_ADDR` if it is set; torchrun's master if there are several hosts.
    fn meeting(
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

fn port_of(name: &str, number: u32) -> Result<u16> {
    match u16::try_from(number) {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(launch_error(format!("{name} gives port {number}, which is not in 1 to 65535"))),
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

/// A value for an error text: short, and without control characters.
fn shown(text: &str) -> String {
    text.chars().take(64).map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn launch_error(problem: String) -> Error {
    Error::Launch { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn discover(vars: &[(&str, &str)]) -> Result<Launch> {
        let find = |name: &str| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        Launch::discover(&find, Some(77))
    }

    const OMPI: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "1234567@1"),
        ("PMIX_RANK", "2"),
    ];
    const BATCH: &[(&str, &str)] = &[
        ("SLURM_JOB_ID", "99"),
        ("SLURM_NTASKS", "16"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "0"),
    ];

    /// Environment; family, rank, world, local rank, local world, job; what is said.
    type Row<'a> =
        (&'a [(&'a str, &'a str)], Family, u32, u32, Option<u32>, Option<u32>, &'a str, &'a str);

    #[test]
    fn each_launcher_is_understood() {
        let torchrun: &[_] = &[
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "node1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "abc"),
        ];
        let mpich: &[_] = &[
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "3"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "3"),
            ("PMI_PORT", "box:40123"),
        ];
        let srun = [
            BATCH,
            &[
                ("SLURM_STEP_ID", "0"),
                ("SLURM_STEP_NUM_TASKS", "16"),
                ("SLURM_STEP_NUM_NODES", "1"),
            ],
        ]
        .concat();
        let sbatch_mpirun =
            [BATCH, &[("SLURM_STEP_ID", "3"), ("SLURM_STEP_NUM_TASKS", "2")], OMPI].concat();
        let sbatch = [BATCH, &[("SLURM_STEP_ID", "4294967291")]].concat();
        #[rustfmt::skip]
        let table: &[Row<'_>] = &[
            (OMPI, Family::OpenMpi, 2, 4, Some(0), Some(2), "1234567@1", "rank 2 of 4 from Open MPI's variables, job `1234567@1`, local rank 0"),
            (mpich, Family::Pmi, 0, 3, Some(0), Some(3), "box:40123", "rank 0 of 3 from PMI variables (MPICH), job `box:40123`, local rank 0"),
            (&mpich[..2], Family::Pmi, 0, 3, None, None, "parent-77", "rank 0 of 3 from PMI variables (MPICH), job `parent-77`"),
            (&srun, Family::Slurm, 0, 16, Some(0), Some(16), "slurm-99.0", "rank 0 of 16 from Slurm's variables, job `slurm-99.0`, local rank 0"),
            (BATCH, Family::SlurmBatch, 0, 1, Some(0), Some(1), "alone", "a Slurm batch script outside of any step: a world of 1 (start the ranks with srun or mpirun)"),
            (&sbatch, Family::SlurmBatch, 0, 1, Some(0), Some(1), "alone", "a Slurm batch script outside of any step: a world of 1 (start the ranks with srun or mpirun)"),
            (&sbatch_mpirun, Family::OpenMpi, 2, 4, Some(0), Some(2), "1234567@1", "rank 2 of 4 from Open MPI's variables, job `1234567@1`, local rank 0"),
            (torchrun, Family::Torchrun, 5, 8, Some(1), Some(4), "torch-abc-node1-29500-", "rank 5 of 8 from torchrun's variables, job `torch-abc-node1-29500-`, local rank 1"),
            (&[], Family::Alone, 0, 1, Some(0), Some(1), "alone", "no launcher's variables are set: a world of 1 (start with mpirun, srun or torchrun for more)"),
            (&[("PMIX_NAMESPACE", "x"), ("PMIX_RANK", "3")], Family::Alone, 0, 1, Some(0), Some(1), "alone", "no launcher's variables are set: a world of 1 (start with mpirun, srun or torchrun for more)"),
        ];
        for (vars, family, rank, world, local_rank, local_world, job, said) in table {
            let launch = discover(vars).unwrap();
            assert_eq!(
                (launch.family, launch.rank, launch.world),
                (*family, *rank, *world),
                "{vars:?}"
            );
            assert_eq!(
                (launch.local_rank, launch.local_world),
                (*local_rank, *local_world),
                "{vars:?}"
            );
            assert_eq!((launch.job.as_str(), launch.said().as_str()), (*job, *said));
        }
        let meeting = discover(torchrun).unwrap().meeting.unwrap();
        assert_eq!((meeting.host.as_str(), meeting.port), ("node1", 29501));
        assert!(discover(OMPI).unwrap().meeting.is_none());
    }

    #[test]
    fn partial_and_contradictory_environments_are_named() {
        let cases: &[(&[(&str, &str)], &str)] = &[
            (
                &[("RANK", "0")],
                "launch: RANK is set but WORLD_SIZE and LOCAL_RANK are not: set all of them, or none for a world of 1",
            ),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2")],
                "launch: RANK and WORLD_SIZE are set but LOCAL_RANK is not: set all of them, or none for a world of 1",
            ),
            (
                &[("PMI_SIZE", "2"), ("WORLD_SIZE", "2")],
                "launch: WORLD_SIZE is set but RANK and LOCAL_RANK are not; PMI_SIZE is set but PMI_RANK is not: set all of them, or none for a world of 1",
            ),
            (
                &[("PMI_SIZE", "2"), ("PMI_RANK", "2")],
                "launch: rank 2 lies outside a world of 2 (PMI variables (MPICH))",
            ),
            (
                &[("PMI_SIZE", "0"), ("PMI_RANK", "0")],
                "launch: the world has 0 ranks (PMI variables (MPICH))",
            ),
            (
                &[("PMI_SIZE", "2"), ("PMI_RANK", "-1")],
                "launch: PMI_RANK is `-1`, which is no number from 0 on",
            ),
            (
                &[
                    ("PMI_SIZE", "2"),
                    ("PMI_RANK", "0"),
                    ("MPI_LOCALRANKID", "1"),
                    ("MPI_LOCALNRANKS", "1"),
                ],
                "launch: local rank 1 lies outside 1 local ranks (PMI variables (MPICH))",
            ),
            (
                &[("PMI_SIZE", "2"), ("PMI_RANK", "0"), ("MPI_LOCALNRANKS", "3")],
                "launch: 3 local ranks in a world of 2 (PMI variables (MPICH))",
            ),
            (
                &[("GATHER8_RANK", "0"), ("GATHER8_WORLD", "2"), ("GATHER8_ADDR", "node")],
                "launch: GATHER8_ADDR is `node`: it names no port (host:port, or a host with GATHER8_PORT)",
            ),
            (
                &[("GATHER8_RANK", "0"), ("GATHER8_WORLD", "2"), ("GATHER8_ADDR", "node:0")],
                "launch: GATHER8_ADDR is `node:0`: its port is no number from 1 to 65535 (host:port, or a host with GATHER8_PORT)",
            ),
            (
                &[("GATHER8_RANK", "0"), ("GATHER8_WORLD", "2"), ("GATHER8_PORT", "70000")],
                "launch: GATHER8_PORT gives port 70000, which is not in 1 to 65535",
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("LOCAL_RANK", "0"),
                    ("MASTER_ADDR", "n"),
                    ("MASTER_PORT", "65535"),
                ],
                "launch: MASTER_PORT gives port 65536, which is not in 1 to 65535",
            ),
        ];
        for (vars, text) in cases {
            assert_eq!(discover(vars).unwrap_err().to_string(), *text, "{vars:?}");
        }
    }

    #[test]
    fn the_first_complete_family_wins() {
        // A stray variable of another family does not matter.
        let stray = [OMPI, &[("WORLD_SIZE", "64"), ("PMI_RANK", "9")]].concat();
        assert_eq!(discover(&stray).unwrap().family, Family::OpenMpi);
        let explicit =
            [OMPI, &[("GATHER8_RANK", "1"), ("GATHER8_WORLD", "3"), ("GATHER8_JOB", "mine")]]
                .concat();
        let launch = discover(&explicit).unwrap();
        assert_eq!(
            (launch.family, launch.rank, launch.job.as_str()),
            (Family::Explicit, 1, "mine")
        );
        // Empty is not set.
        assert_eq!(discover(&[("RANK", ""), ("WORLD_SIZE", " ")]).unwrap().family, Family::Alone);
    }

    #[test]
    fn each_rank_has_a_device_or_an_error() {
        let mut launch = Launch::explicit(5, 8, "job").unwrap();
        assert_eq!(launch.device(1, false).unwrap(), 0);
        assert_eq!(launch.device(8, false).unwrap(), 5);
        assert_eq!(launch.device(4, true).unwrap(), 1);
        let text =
            |launch: &Launch, visible| launch.device(visible, false).unwrap_err().to_string();
        assert!(text(&launch, 4).contains("local rank 5 has no device among 4"));
        assert_eq!(text(&launch, 0), "launch: no device is visible");
        launch.local_rank = None;
        assert!(text(&launch, 2).contains("set GATHER8_LOCAL_RANK"));
        assert_eq!(launch.device(1, false).unwrap(), 0);
    }

    #[test]
    fn meeting_places_are_parsed() {
        let of = |address: &str, port| meeting_of(address, port).map(|m| (m.host, m.port));
        assert_eq!(of("node:29400", None).unwrap(), ("node".to_owned(), 29400));
        assert_eq!(of("node", Some(5)).unwrap(), ("node".to_owned(), 5));
        assert_eq!(of("[fe80::1]:80", None).unwrap(), ("fe80::1".to_owned(), 80));
        assert_eq!(of("fe80::1", Some(80)).unwrap(), ("fe80::1".to_owned(), 80));
        assert!(of(":80", None).is_err() && of("fe80::1", None).is_err());
    }
}

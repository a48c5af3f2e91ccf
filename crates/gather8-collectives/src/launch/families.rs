//! The launchers that are understood, and their variables.

use std::fmt;

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

/// The variables of a family: rank and world come first.
pub(super) struct Names {
    pub(super) required: &'static [&'static str],
    pub(super) local_rank: Option<&'static str>,
    pub(super) local_world: Option<&'static str>,
}

pub(super) const FAMILIES: &[(Family, Names)] = &[
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

//! Rank discovery, launcher by launcher.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use gather8_collectives::launch::Family;
use gather8_collectives::{Launch, Result};

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
        &[("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "16"), ("SLURM_STEP_NUM_NODES", "1")],
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
        [OMPI, &[("GATHER8_RANK", "1"), ("GATHER8_WORLD", "3"), ("GATHER8_JOB", "mine")]].concat();
    let launch = discover(&explicit).unwrap();
    assert_eq!((launch.family, launch.rank, launch.job.as_str()), (Family::Explicit, 1, "mine"));
    // Empty is not set.
    assert_eq!(discover(&[("RANK", ""), ("WORLD_SIZE", " ")]).unwrap().family, Family::Alone);
}

#[test]
fn each_rank_has_a_device_or_an_error() {
    let mut launch = Launch::explicit(5, 8, "job").unwrap();
    assert_eq!(launch.device(1, false).unwrap(), 0);
    assert_eq!(launch.device(8, false).unwrap(), 5);
    assert_eq!(launch.device(4, true).unwrap(), 1);
    let text = |launch: &Launch, visible| launch.device(visible, false).unwrap_err().to_string();
    assert!(text(&launch, 4).contains("local rank 5 has no device among 4"));
    assert_eq!(text(&launch, 0), "launch: no device is visible");
    launch.local_rank = None;
    assert!(text(&launch, 2).contains("set GATHER8_LOCAL_RANK"));
    assert_eq!(launch.device(1, false).unwrap(), 0);
}

#[test]
fn meeting_places_are_parsed() {
    let of = |address: &str, port: Option<&str>| {
        let mut vars =
            vec![("GATHER8_RANK", "0"), ("GATHER8_WORLD", "2"), ("GATHER8_ADDR", address)];
        vars.extend(port.map(|port| ("GATHER8_PORT", port)));
        discover(&vars).map(|launch| launch.meeting.map(|m| (m.host, m.port)))
    };
    assert_eq!(of("node:29400", None).unwrap(), Some(("node".to_owned(), 29400)));
    assert_eq!(of("node", Some("5")).unwrap(), Some(("node".to_owned(), 5)));
    assert_eq!(of("[fe80::1]:80", None).unwrap(), Some(("fe80::1".to_owned(), 80)));
    assert_eq!(of("fe80::1", Some("80")).unwrap(), Some(("fe80::1".to_owned(), 80)));
    assert!(of(":80", None).is_err() && of("fe80::1", None).is_err());
}

#[test]
fn two_starts_with_one_name_stay_apart_where_the_launcher_can_tell() {
    let job = |vars: &[&[(&str, &str)]]| {
        discover(&[&[("GATHER8_JOB", "mine")], vars.concat().as_slice()].concat()).unwrap().job
    };
    assert_eq!(job(&[OMPI]), "mine-1234567@1");
    let step: &[_] = &[("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "16")];
    assert_eq!(job(&[BATCH, step]), "mine-slurm-99.0");
    // What the others give may differ among the ranks of one start: the name decides.
    let torchrun: &[_] =
        &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_PORT", "29500")];
    assert_eq!(job(&[torchrun]), "mine");
    assert_eq!(job(&[&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("PMI_PORT", "box:40123")]]), "mine");
}

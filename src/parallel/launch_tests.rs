use super::*;

/// What is detected where exactly these `NAME=value` are set.
fn found(variables: &str) -> Result<Option<Launch>> {
    let of = |name: &str| {
        let (_, value) = variables.split_whitespace().filter_map(|v| v.split_once('=')).find(|(n, _)| *n == name)?;
        Some(value.to_string())
    };
    detect(of)
}

/// Launcher, rank, number of processes, and both in the node.
type Numbers = (Launcher, usize, usize, Option<usize>, Option<usize>);

fn launch(variables: &str) -> Option<Numbers> {
    let found = found(variables).unwrap_or_else(|e| panic!("{variables}: {e}"));
    found.map(|l| (l.by, l.rank, l.world, l.local_rank, l.local_world))
}

/// Asserts that the error says all `pieces`.
fn refused(variables: &str, pieces: &[&str]) {
    let text = found(variables).err().unwrap_or_else(|| panic!("{variables}: not refused")).to_string();
    assert!(pieces.iter().all(|p| text.contains(p)), "{variables}: {text}");
    assert!(text.to_lowercase().contains("unset"), "says what to do: {text}");
}

#[test]
fn each_launcher_is_known() {
    use Launcher::*;
    for (variables, expected) in [
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", (Torchrun, 5, 8, Some(1), Some(4))),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3",
            (OpenMpi, 3, 4, Some(1), Some(2)),
        ),
        (
            "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2",
            (Mvapich, 0, 2, Some(0), Some(2)),
        ),
        ("PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1", (Mpich, 2, 3, Some(0), Some(1))),
        ("PMI_RANK=2 PMI_SIZE=4 PALS_RANKID=2 PALS_LOCAL_RANKID=0", (Mpich, 2, 4, Some(0), None)),
        ("PMI_RANK=2 PMI_SIZE=4", (Mpich, 2, 4, None, None)),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=7 SLURM_NTASKS=7 SLURM_LOCALID=2 SLURM_NODEID=1 \
             SLURM_STEP_TASKS_PER_NODE=4,3",
            (Slurm, 6, 7, Some(2), Some(3)),
        ),
        ("SLURM_STEP_ID=2 SLURM_PROCID=1 SLURM_NTASKS=4 PMIX_RANK=1", (Slurm, 1, 4, None, None)),
    ] {
        assert_eq!(launch(variables), Some(expected), "{variables}");
    }
}

#[test]
fn a_single_process_is_no_launch() {
    for variables in [
        "",
        "OTHER=8",
        "RANK= WORLD_SIZE=",
        "RANK=0 WORLD_SIZE=1",
        "WORLD_SIZE=1",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMIX_RANK=0",
        "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8",
        // A batch script, and the shells of `salloc`: on the login node, and as a step of its own.
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NNODES=2",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_ID=4294967291",
    ] {
        assert_eq!(launch(variables), None, "{variables}");
    }
}

#[test]
fn the_inner_of_several_launchers_counts() {
    use Launcher::*;
    let slurm = "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0";
    // One of Slurm's tasks a node, each the daemon of a launcher.
    let torchrun = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4";
    let expected = Some((Torchrun, 5, 8, Some(1), Some(4)));
    assert_eq!(launch(&format!("{torchrun} {slurm} PMIX_RANK=1")), expected);
    assert_eq!(launch(&format!("{torchrun} OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=1")), expected);
    assert_eq!(launch(&format!("{slurm} OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8")), Some((OpenMpi, 5, 8, None, None)));
    // All the same processes: what one does not say of the node, another does.
    assert_eq!(launch(&format!("{slurm} PMI_RANK=1 PMI_SIZE=2")), Some((Mpich, 1, 2, Some(0), None)));
    assert_eq!(
        launch("RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        Some((Torchrun, 1, 2, None, Some(2)))
    );
    // A script sets what torchrun would, in part.
    assert_eq!(launch(&format!("WORLD_SIZE=2 {slurm}")), Some((Slurm, 1, 2, Some(0), None)));
}

#[test]
fn contradictions_name_both_variables() {
    refused(
        "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
        &["RANK=1", "OMPI_COMM_WORLD_RANK=0", "disagree on this process's rank"],
    );
    refused(
        "RANK=1 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
        &["WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=2", "number of processes"],
    );
    refused("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=0", &["OMPI_COMM_WORLD_RANK=1", "PMIX_RANK=0"]);
    refused("RANK=4 WORLD_SIZE=4", &["RANK=4", "WORLD_SIZE=4", "count from 0"]);
    refused("RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", &["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]);
    refused("RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=8", &["LOCAL_WORLD_SIZE=8", "WORLD_SIZE=4"]);
    // Four tasks that each take themselves for the only process.
    refused(
        "RANK=0 WORLD_SIZE=1 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4",
        &["WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4", "separate run"],
    );
}

#[test]
fn halves_and_other_things_than_numbers_are_refused() {
    refused("WORLD_SIZE=4", &["WORLD_SIZE=4", "torchrun", "RANK is not set"]);
    refused("RANK=0", &["RANK=0", "WORLD_SIZE is not set"]);
    refused("PMIX_RANK=1", &["PMIX_RANK=1", "number of processes"]);
    refused("SLURM_STEP_NUM_TASKS=4", &["SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID is not set"]);
    refused("RANK=one WORLD_SIZE=2", &["RANK=\"one\"", "whole number"]);
    refused("RANK=-1 WORLD_SIZE=2", &["RANK=\"-1\""]);
    refused("RANK=0 WORLD_SIZE=2 LOCAL_RANK=x", &["LOCAL_RANK=\"x\""]);
    refused("RANK=0 WORLD_SIZE=0", &["WORLD_SIZE=0", "at least 1"]);
}

#[test]
fn tasks_of_slurms_nodes() {
    assert_eq!((0..4).map(|n| tasks_of_node("4(x2),3", Some(n))).collect::<Vec<_>>(), [Some(4), Some(4), Some(3), None]);
    assert_eq!((tasks_of_node("4(x2)", None), tasks_of_node("4,3", None), tasks_of_node("what", Some(0))), (Some(4), None, None));
}

#[test]
fn one_rank_is_fine_and_several_are_not() {
    let refused = |variables: &'static [(&str, &str)], what| {
        let of = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        refuse_many_ranks(of, what).err().map(|e| e.to_string())
    };
    assert_eq!(refused(&[("OTHER", "8")], Alone::Build), None);
    assert_eq!(refused(&[("RANK", "0"), ("WORLD_SIZE", "1")], Alone::Build), None);
    let text = refused(&[("PMI_RANK", "1"), ("PMI_SIZE", "4")], Alone::Build).unwrap();
    for piece in ["MPICH", "rank 1 of 4 processes (PMI_SIZE=4)", "overwrite each other", "--features mpi", "--ranks 4"] {
        assert!(text.contains(piece), "{text}");
    }
    let text = refused(&[("RANK", "1"), ("WORLD_SIZE", "4")], Alone::Command("`zaya eval`")).unwrap();
    assert!(text.contains("torchrun") && text.contains("`zaya eval` is the work of one process"), "{text}");
}

#[test]
fn ranks_of_a_node_are_known_where_the_launcher_tells() {
    let of = |variables| ranks_per_node(&found(variables).unwrap().unwrap());
    assert_eq!(of("RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2"), Some(2));
    assert_eq!(of("RANK=1 WORLD_SIZE=4"), None);
}

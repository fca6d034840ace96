//! A launcher's variables. This build trains on one rank: started as one of several it must not become N separate runs.

use anyhow::Result;

use crate::error::bad_input;

/// Variables that hold the number of processes of a job, by launcher.
const WORLD_SIZES: [(&str, &str); 5] = [
    ("WORLD_SIZE", "torchrun"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_SIZE", "MPICH or Cray PMI"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH"),
    ("SLURM_STEP_NUM_TASKS", "Slurm (srun)"),
];

/// Refuses to start as one of several ranks.
pub fn refuse_many_ranks(variable: impl Fn(&str) -> Option<String>) -> Result<()> {
    for (name, launcher) in WORLD_SIZES {
        let Some(value) = variable(name) else { continue };
        match value.trim().parse::<u64>() {
            Ok(0 | 1) => {}
            Ok(n) => {
                return Err(bad_input(format!(
                    "{launcher} started this as one of {n} processes ({name}={n}), but this build of zaya trains on one rank only: \
                     it would become {n} separate runs that overwrite each other. Start one process, or unset {name}"
                )));
            }
            Err(_) => {
                return Err(bad_input(format!(
                    "the environment has {name}={value:?}, which {launcher} sets to the number of processes: expected a whole \
                     number. Unset it to train on one rank"
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(name: &'static str, value: &'static str) -> Option<String> {
        refuse_many_ranks(|n| (n == name).then(|| value.to_string())).err().map(|e| e.to_string())
    }

    #[test]
    fn one_rank_is_fine_and_several_are_not() {
        assert_eq!(refused("OTHER", "8"), None);
        for (name, launcher) in WORLD_SIZES {
            assert_eq!(refused(name, "1"), None);
            let text = refused(name, "4").unwrap();
            assert!(text.contains(launcher) && text.contains(&format!("{name}=4")), "{text}");
            assert!(refused(name, "four").unwrap().contains("whole number"));
        }
    }
}

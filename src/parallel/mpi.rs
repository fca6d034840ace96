//! Ranks as processes that MPI connects. Only bytes travel: what is summed is summed by `Group`, in its own order.
//!
//! | file | subject |
//! |---|---|
//! | `raw` | the few calls of MPI that are needed |
//! | `trip` | one exchange: requests, waiting, disagreement, time running out |
//! | `alarm` | how a failure reaches all ranks and ends them |

mod alarm;
mod raw;
mod trip;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::launch::{self, Launch};
use super::transport::{Channel, Incoming, Op, Outgoing, Transport};
use crate::error::bad_input;
use alarm::Alarm;
use trip::{Lane, Trip};

/// Longer messages are cut into parts of this many bytes: MPI counts with 32 bits, and half of that is a round number.
const LONGEST_PART: usize = 1 << 30;

/// One rank's end. It is started and dropped on the same thread, and used from any.
///
/// Where a rank fails, an error is returned, all other ranks get one too, and all processes end about a second later. Dropped
/// after a failure, this waits for that end.
pub struct MpiRank {
    alarm: Arc<Alarm>,
    /// By channel.
    lanes: Vec<Mutex<Lane>>,
    timeout: Duration,
    longest_part: usize,
}

impl MpiRank {
    /// Starts MPI. A rank that waits longer than `timeout` for another ends the job. From here on a panic on any thread ends all
    /// ranks.
    ///
    /// # Errors
    /// MPI that cannot start or serve many threads, or that disagrees with the launcher on who this is.
    pub fn start(timeout: Duration) -> Result<Self> {
        Self::start_with(timeout, LONGEST_PART)
    }

    /// As `start`; messages of more than `longest_part` bytes are cut. It is the same at all ranks.
    ///
    /// # Errors
    /// As `start`.
    pub fn start_with(timeout: Duration, longest_part: usize) -> Result<Self> {
        let launch = launch::detect(|name| std::env::var(name).ok())?;
        if raw::is_started() {
            bail!("MPI was started before in this process, and it can be started only once");
        }
        let serves_threads = raw::start()?;
        let world = raw::Comm::world();
        let (rank, size) = world.rank_and_size()?;
        let doubt = match serves_threads {
            true => launch.and_then(|launch| contradiction(&launch, rank, size)),
            false => Some(
                "this MPI cannot be called from several threads at a time (MPI_THREAD_MULTIPLE), which training needs: it computes on \
                 one while another sends. Use an MPI library that was built with support for threads"
                    .to_string(),
            ),
        };
        if let Some(text) = doubt {
            if size == 1 || !serves_threads {
                raw::finish();
                return Err(bad_input(text));
            }
            // The others may be of another opinion, and would wait.
            tell!("error: {text}");
            world.abort();
        }
        let lanes = Channel::ALL.iter().map(|_| Ok(Mutex::new(Lane::new(world.duplicate()?, size)))).collect::<Result<_>>();
        let lanes = lanes.context("connecting the ranks")?;
        let alarm = Alarm::new(world.duplicate().context("connecting the ranks")?)?;
        Alarm::set_current(Some(alarm.clone()));
        Ok(Self { alarm, lanes, timeout, longest_part: longest_part.clamp(1, LONGEST_PART) })
    }
}

/// What is wrong if the launcher and MPI mean different things.
fn contradiction(launch: &Launch, rank: usize, size: usize) -> Option<String> {
    let Launch { rank: told, world, by, .. } = *launch;
    if (told, world) == (rank, size) {
        return None;
    }
    let advice = match size {
        1 => format!(
            "it was not {by} that this MPI was told of. Start zaya with the mpirun of the MPI library that it was built with, or with \
             `srun --mpi=pmix` where Slurm and that library support it; torchrun starts no MPI"
        ),
        _ => format!("the variables of {by} are left over from elsewhere: unset them"),
    };
    Some(format!("{by} says that this is rank {told} of {world}, and MPI says that it is rank {rank} of {size}: {advice}"))
}

impl Transport for MpiRank {
    fn rank(&self) -> usize {
        self.alarm.rank
    }

    fn world(&self) -> usize {
        self.alarm.world
    }

    fn exchange(
        &self,
        op: &Op,
        outgoing: &[Outgoing<'_>],
        incoming: &[Incoming],
        consume: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        if let Some(failure) = self.alarm.listen() {
            return Err(failure);
        }
        let at = Channel::ALL.iter().position(|c| *c == op.channel).expect("all channels stand there");
        // A panic while it is held ends the process.
        let mut lane = self.lanes[at].lock().unwrap_or_else(PoisonError::into_inner);
        Trip::new(&self.alarm, &mut lane, op, outgoing, incoming, self.longest_part).run(self.timeout, consume)
    }

    fn fail(&self, reason: &str) {
        self.alarm.fail_aloud(reason);
    }

    fn leave(&self) {
        self.alarm.leave();
    }

    fn failure(&self) -> Option<String> {
        self.alarm.listen().map(|e| e.to_string())
    }
}

impl Drop for MpiRank {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.alarm.panicked("");
        }
        self.leave();
        if !self.alarm.wait_for_all(self.timeout) {
            self.alarm.wait_for_the_end();
        }
        Alarm::set_current(None);
        raw::finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_that_mpi_knows_nothing_of_is_told() {
        let by = launch::Launcher::Torchrun;
        let launch = Launch { rank: 2, world: 4, local_rank: None, local_world: None, by };
        assert_eq!(contradiction(&launch, 2, 4), None);
        let text = contradiction(&launch, 0, 1).unwrap();
        assert!(text.contains("torchrun says that this is rank 2 of 4") && text.contains("rank 0 of 1: it was not"), "{text}");
        assert!(contradiction(&launch, 3, 4).unwrap().contains("unset them"));
    }
}

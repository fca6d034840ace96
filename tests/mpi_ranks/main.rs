//! The MPI engine, over MPI: run as `mpirun -n 4 <this>`, each process is one rank and checks the collectives. Started alone, it
//! runs itself so, and besides the jobs that must end with a sentence.

mod checks;
mod driver;
mod training;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use zaya::parallel::mpi::MpiRank;
use zaya::parallel::transport::Transport;
use zaya::parallel::{Channel, Comm, Group, Place, Stages, launch};

/// What one process does, by the argument that the driver gives it.
const JOB: &str = "--job=";

fn main() {
    let job = std::env::args().find_map(|a| a.strip_prefix(JOB).map(String::from));
    match job {
        None if !matches!(launch::detect(|name| std::env::var(name).ok()), Ok(Some(_))) => driver::run_all(),
        job => {
            // The driver sees to it that this process is gone in the end.
            println!("pid {}", std::process::id());
            if let Err(e) = run(job.as_deref().unwrap_or("checks")) {
                zaya::tell!("error: {e:#}");
                std::process::exit(1);
            }
        }
    }
}

fn run(job: &str) -> Result<()> {
    let (timeout, longest_part) = match job {
        "late" => (Duration::from_secs(3), 1000),
        "checks" => (Duration::from_secs(60), 1000),
        _ => (Duration::from_secs(60), 1 << 30),
    };
    let rank: Arc<dyn Transport> = Arc::new(MpiRank::start_with(timeout, longest_part)?);
    let me = rank.rank();
    let done = match job {
        "checks" | "whole" => checks::all(&rank),
        _ => fail_somehow(job, &rank),
    };
    match &done {
        Ok(()) => println!("rank {me} is fine"),
        Err(e) => zaya::tell!("rank {me} got: {e:#}"),
    }
    done
}

/// Jobs in which one rank or all do something wrong.
fn fail_somehow(job: &str, rank: &Arc<dyn Transport>) -> Result<()> {
    let comm = Comm::new(rank.clone(), Stages::Flat);
    comm.at(|place| *place = Place { step: 40, layer: Some(7), phase: "backward" });
    let group = Group::new(&comm, Channel::Main, "world", (0..rank.world()).collect());
    group.barrier("start")?;
    // Enough to be on the way for a while.
    let mut numbers = vec![1.0f32; 400_000];
    match (job, rank.rank()) {
        ("other-name", 0) => group.all_reduce("counts", &mut numbers),
        ("other-size", 0) => group.all_reduce("gradients", &mut numbers[..200_000]),
        ("other-short-size", me) => group.all_reduce("gradients", &mut numbers[..if me == 0 { 4 } else { 8 }]),
        ("late", 2) => {
            // Longer than the driver waits.
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        }
        ("fail", 1) => {
            rank.fail("the disk is full");
            group.barrier("second")
        }
        ("panic", 1) => panic!("on purpose"),
        // On a thread that nobody waits for.
        ("panic-aside", 1) => {
            std::thread::spawn(|| panic!("on purpose"));
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        }
        // While another rank computes and does not look for messages.
        ("panic-aside" | "fail", 3) => {
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        }
        ("leave", 3) => Ok(()),
        ("die", 1) => std::process::abort(),
        _ => group.all_reduce("gradients", &mut numbers),
    }
}

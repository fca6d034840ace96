//! Ranks with a device each, on the software GPU: the engine of processes by the checks of the other engines, groups of devices against
//! formulas, and what becomes of ranks that do wrong.

use std::env;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use zaya::parallel::rccl::{Links, Parcel, RcclRank, address};
use zaya::parallel::threads::Hub;
use zaya::parallel::transport::Transport;
use zaya::parallel::zero::Shared;
use zaya::parallel::{Channel, Comm, Group, Layout, Mesh, Place, Stages, launch};
use zaya::tensor::Backend;
use zaya::tensor::hip::{self, Buf, Hip, Kind};

use crate::hip::{has_kernels, software_gpu};

#[path = "../mpi_ranks/checks.rs"]
mod checks;

/// A library is opened once a process, and where it is is told by variables: what is tested runs in children, which find their task here.
const TASK: &str = "ZAYA_TEST_HIP_RANKS_TASK";

/// This executable again, with a task, on a machine with so many GPUs.
fn child(task: &str, devices: usize) -> Command {
    let mut child = Command::new(env::current_exe().unwrap());
    for name in launch::variables().chain(["ZAYA_FAIL", "SWGPU_FAULT"]) {
        child.env_remove(name);
    }
    let name = module_path!().split_once("::").map_or("child_of_ranks".into(), |(_, module)| format!("{module}::child_of_ranks"));
    child.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(TASK, task);
    child.env("ZAYA_HIP_LIB", software_gpu()).env("ZAYA_RCCL_LIB", software_gpu()).env("SWGPU_DEVICES", devices.to_string());
    child.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    child
}

/// Whether it passed, and what it said.
fn finish(child: Child) -> (bool, String) {
    let output = child.wait_with_output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success() && text.contains("1 passed"), text)
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Makes a command one rank of several processes, as torchrun would.
pub fn as_rank(command: &mut Command, rank: usize, world: usize, port: u16) {
    let (rank, world, port) = (rank.to_string(), world.to_string(), port.to_string());
    command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", &world).env("LOCAL_WORLD_SIZE", &world);
    command.env("ZAYA_MASTER_PORT", port);
}

/// A task as so many processes; whether each passed, and what it said.
fn processes(task: &str, world: usize, fault: &str) -> Vec<(bool, String)> {
    let port = free_port();
    let start = |rank| {
        let mut command = child(task, world);
        as_rank(&mut command, rank, world, port);
        command.env("SWGPU_FAULT", fault).spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..world).map(start).collect();
    ranks.into_iter().map(finish).collect()
}

fn on_threads(task: &str, devices: usize) {
    if has_kernels() {
        let (passed, text) = finish(child(task, devices).spawn().unwrap());
        assert!(passed, "{text}");
    }
}

/// The checks that the MPI engine passes, too.
#[test]
fn processes_exchange_messages() {
    for world in [2, 4] {
        for (passed, text) in processes("checks", world, "") {
            assert!(passed, "{text}");
        }
    }
}

#[test]
fn processes_that_do_wrong_end_with_a_sentence() {
    for (task, fault, world, says) in [
        (
            "late",
            "",
            3,
            &["waits in gradients #2 of the test group (step 40, layer 7, backward)", "rank 2 was last in start"][..],
        ),
        ("disagree", "", 2, &["ranks disagree", "gradients #2", "counts #2"]),
        ("fail", "", 3, &["rank 1 failed: the disk is full"]),
        ("die", "", 3, &["rank 1 has ended without a word"]),
        ("hang", "hang=1:9", 2, &["waits in "]),
    ] {
        let ranks = processes(task, world, fault);
        // Who does it may have no word of its own to say.
        let told = ranks.iter().filter(|(_, text)| says.iter().all(|piece| text.contains(piece))).count();
        assert!(told >= 1 && ranks.iter().all(|(passed, _)| !passed), "{task}: {ranks:#?}");
    }
}

#[test]
fn devices_of_threads_form_groups() {
    on_threads("groups of 3", 3);
    on_threads("groups of 4", 4);
}

/// Does what a parent told it; a mere test otherwise.
#[test]
fn child_of_ranks() {
    let Ok(task) = env::var(TASK) else { return };
    println!();
    match task.as_str() {
        "groups of 3" => groups(3),
        "groups of 4" => groups(4),
        task => {
            if let Err(e) = one_process(task) {
                panic!("{e:#}");
            }
        }
    }
}

fn one_process(task: &str) -> Result<()> {
    let variable = |name: &str| env::var(name).ok();
    let launch = launch::detect(variable)?.expect("the parent says which rank this is");
    let timeout = Duration::from_secs(if ["late", "hang"].contains(&task) { 1 } else { 60 });
    let (library, device, _) = hip::place_of(launch.rank)?;
    let address = address(variable, &launch)?;
    let rank: Arc<dyn Transport> = Arc::new(RcclRank::start(&launch, library, device, &address, timeout)?);
    if task == "checks" {
        return checks::all(&rank);
    }
    let comm = Comm::new(rank.clone(), Stages::Flat);
    comm.at(|place| *place = Place { step: 40, layer: Some(7), phase: "backward" });
    let group = Group::new(&comm, Channel::Main, "test", (0..launch.world).collect());
    group.barrier("start")?;
    let numbers = &mut [1.0f32; 1000];
    match (task, launch.rank) {
        ("late", 2) => {
            std::thread::sleep(Duration::from_secs(3));
            group.all_reduce("gradients", numbers)
        }
        ("disagree", 1) => group.all_reduce("counts", numbers),
        ("fail", 1) => {
            rank.fail("the disk is full");
            group.barrier("second")
        }
        ("die", 1) => std::process::abort(),
        _ => (0..50).try_for_each(|_| group.all_reduce("gradients", numbers)),
    }
}

/// A number of a rank: sums of them are exact.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729 + 17) % 1009) as f32
}

fn groups(world: usize) {
    let ranks = Hub::ranks(world, Duration::from_secs(60));
    std::thread::scope(|scope| {
        for transport in ranks {
            scope.spawn(move || {
                let comm = Comm::new(Arc::new(transport), Stages::Flat);
                let mesh = Mesh::new(Layout { world, cp: 1, ep: 1 }, comm);
                let hip = Hip::open(mesh.rank).unwrap();
                assert_eq!(hip.device_number().unwrap() as usize, mesh.rank);
                let links = Links::join(&hip, &mesh, Duration::from_secs(60)).unwrap();
                sums_and_gathers(&links, mesh.rank, world);
                parcels(&links, mesh.rank, world);
                links.settle().unwrap();
                links.finish();
            });
        }
    });
}

/// Even pieces, and such that the first member has nothing and others differ.
fn cuts(n: usize, world: usize) -> [Vec<std::ops::Range<usize>>; 2] {
    let even = n / world;
    let mut at = 0;
    let uneven = (0..world).map(|m| {
        let end = if m + 1 == world { n } else { at + m * even / 2 };
        std::mem::replace(&mut at, end)..end
    });
    let uneven: Vec<_> = uneven.collect();
    [(0..world).map(|m| m * even..(m + 1) * even).collect(), uneven]
}

fn sums_and_gathers(links: &Links, me: usize, world: usize) {
    let (hip, link) = (&links.hip, links.of(Shared::World).unwrap());
    let n = 240;
    let own: Vec<f32> = (0..n).map(|i| value(me, i)).collect();
    for pieces in cuts(n, world) {
        let mut data = hip.upload(&own, 1, n).unwrap();
        let at = data.address_mut(0);
        // SAFETY: a buffer of `n` numbers, used in this stream alone.
        unsafe { link.reduce_scatter("sums", hip.main_stream().unwrap(), at, &pieces) }.unwrap();
        let sums = hip.download(&data).unwrap();
        for i in pieces[me].clone() {
            assert_eq!(sums[i], (0..world).map(|r| value(r, i)).sum::<f32>(), "{i} of {pieces:?}");
        }
        let at = data.address_mut(0);
        // SAFETY: as above.
        unsafe { link.all_gather("gather", hip.main_stream().unwrap(), at, Kind::F32, &pieces) }.unwrap();
        let all = hip.download(&data).unwrap();
        assert!((0..n).all(|i| all[i] == (0..world).map(|r| value(r, i)).sum::<f32>()), "{pieces:?}");
    }
}

/// Each member sends each other as many numbers as their places say, in two parcels.
fn parcels(links: &Links, me: usize, world: usize) {
    let (hip, link) = (&links.hip, links.of(Shared::World).unwrap());
    let count = |from: usize, to: usize| 3 * from + to;
    let others = || (0..world).filter(|m| *m != me);
    let send: Vec<Buf> =
        others().map(|to| hip.upload(&vec![(10 * me + to) as f32; count(me, to)], 1, count(me, to)).unwrap()).collect();
    let mut come: Vec<Buf> = others().map(|from| hip.zeros(1, count(from, me)).unwrap()).collect();
    let cut = |member: usize, at: usize, numbers: usize| {
        let first = numbers / 2;
        [Parcel { member, at, bytes: 4 * first }, Parcel { member, at: at + 4 * first, bytes: 4 * (numbers - first) }]
    };
    let outgoing: Vec<Parcel> = others().zip(&send).flat_map(|(to, b)| cut(to, b.address(0), b.len())).collect();
    let incoming: Vec<Parcel> = others().zip(&mut come).flat_map(|(from, b)| cut(from, b.address_mut(0), b.len())).collect();
    // SAFETY: buffers of those sizes, used in this stream alone.
    unsafe { link.exchange("parcels", hip.main_stream().unwrap(), &outgoing, &incoming) }.unwrap();
    for (from, buf) in others().zip(&come) {
        assert!(hip.download(buf).unwrap().iter().all(|x| *x == (10 * from + me) as f32), "from {from} to {me}");
    }
}

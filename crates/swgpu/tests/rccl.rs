//! RCCL's C interface with ranks as threads and as processes.

mod common;

use std::ffi::{c_int, c_void};
use std::sync::Once;

use common::library::*;

const RANKS: usize = 4;
const I32: c_int = 2;
const F32: c_int = 7;
const SUM: c_int = 0;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const TIMEOUT: c_int = 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// A device for each rank, and little patience.
fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        // SAFETY: every test calls this first, so that no other thread reads the environment meanwhile.
        unsafe {
            std::env::set_var("SWGPU_DEVICES", "4");
            std::env::set_var("SWGPU_TIMEOUT_S", "2");
        }
        library();
    });
}

fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    ok(c_call!(fn ncclGetUniqueId(id: *mut UniqueId = &mut id)));
    id
}

struct Rank {
    number: usize,
    communicator: Handle,
    queue: Handle,
}

impl Rank {
    fn join(id: UniqueId, number: usize, ranks: usize, device: c_int) -> Self {
        set_device(device);
        let mut communicator: Handle = std::ptr::null_mut();
        ok(
            c_call!(fn ncclCommInitRank(communicator: *mut Handle = &mut communicator, ranks: c_int = ranks as c_int, id: UniqueId = id, rank: c_int = number as c_int)),
        );
        Self { number, communicator, queue: stream() }
    }

    fn all_reduce(&self, values: &[f32], count: usize, reduction: c_int) -> (c_int, Handle) {
        let (source, target) = (upload(values), malloc(4 * count));
        let status = c_call!(fn ncclAllReduce(
            source: *const c_void = source.cast_const(), target: Handle = target, count: usize = count, element: c_int = F32,
            reduction: c_int = reduction, communicator: Handle = self.communicator, stream: Handle = self.queue,
        ));
        (status, target)
    }

    fn wait(&self) {
        ok(synchronize(self.queue));
    }

    fn async_error(&self) -> c_int {
        let mut status = -1;
        ok(c_call!(fn ncclCommGetAsyncError(communicator: Handle = self.communicator, status: *mut c_int = &mut status)));
        status
    }
}

/// Runs `work` on a thread for each rank.
fn on_ranks(work: impl Fn(Rank) + Send + Sync) {
    start();
    let id = unique_id();
    std::thread::scope(|scope| {
        for number in 0..RANKS {
            let work = &work;
            scope.spawn(move || work(Rank::join(id, number, RANKS, number as c_int)));
        }
    });
}

#[test]
fn reductions() {
    on_ranks(|rank| {
        let own: Vec<f32> = (0..5).map(|i| (rank.number * 10 + i) as f32).collect();
        for (reduction, expected) in [
            (SUM, [60.0, 64.0, 68.0, 72.0, 76.0]),
            (2, [30.0, 31.0, 32.0, 33.0, 34.0]),
            (3, [0.0, 1.0, 2.0, 3.0, 4.0]),
            (4, [15.0, 16.0, 17.0, 18.0, 19.0]),
        ] {
            let (status, target) = rank.all_reduce(&own, 5, reduction);
            ok(status);
            rank.wait();
            assert_eq!(download::<f32>(target, 5), expected, "reduction {reduction}");
        }
        let source = upload(&(0..8).map(|i| 100 * rank.number as i32 + i).collect::<Vec<i32>>());
        let target = malloc(8);
        ok(c_call!(fn ncclReduceScatter(
            source: *const c_void = source.cast_const(), target: Handle = target, count: usize = 2, element: c_int = I32, reduction: c_int = SUM,
            communicator: Handle = rank.communicator, stream: Handle = rank.queue,
        )));
        rank.wait();
        let first = 600 + 4 * 2 * rank.number as i32;
        assert_eq!(download::<i32>(target, 2), [first, first + 4]);
        // Elsewhere than at its root a reduction writes nothing.
        let place = upload(&[rank.number as i32, 5]);
        ok(c_call!(fn ncclReduce(
            source: *const c_void = place.cast_const(), target: Handle = place, count: usize = 2, element: c_int = I32, reduction: c_int = SUM,
            root: c_int = 3, communicator: Handle = rank.communicator, stream: Handle = rank.queue,
        )));
        rank.wait();
        assert_eq!(download::<i32>(place, 2), if rank.number == 3 { [6, 20] } else { [rank.number as i32, 5] });
        ok(c_call!(fn ncclCommDestroy(communicator: Handle = rank.communicator)));
    });
}

#[test]
fn exchanges() {
    on_ranks(|rank| {
        let own = rank.number as i32;
        let source = upload(&(0..RANKS as i32).map(|to| 10 * own + to).collect::<Vec<i32>>());
        let target = malloc(4 * RANKS);
        ok(c_call!(fn ncclAllToAll(
            source: *const c_void = source.cast_const(), target: Handle = target, count: usize = 1, element: c_int = I32,
            communicator: Handle = rank.communicator, stream: Handle = rank.queue,
        )));
        rank.wait();
        assert_eq!(download::<i32>(target, RANKS), (0..RANKS as i32).map(|from| 10 * from + own).collect::<Vec<_>>());
        ok(c_call!(fn ncclAllGather(
            source: *const c_void = source.cast_const(), target: Handle = target, count: usize = 1, element: c_int = I32,
            communicator: Handle = rank.communicator, stream: Handle = rank.queue,
        )));
        rank.wait();
        assert_eq!(download::<i32>(target, RANKS), [0, 10, 20, 30]);
        ok(c_call!(fn ncclBroadcast(
            source: *const c_void = source.cast_const(), target: Handle = target, count: usize = 2, element: c_int = I32, root: c_int = 2,
            communicator: Handle = rank.communicator, stream: Handle = rank.queue,
        )));
        rank.wait();
        assert_eq!(download::<i32>(target, 2), [20, 21]);

        // A ring: each rank sends to the next and receives from the one before, in one group.
        ok(c_call!(fn ncclGroupStart()));
        ok(c_call!(fn ncclSend(
            source: *const c_void = source.cast_const(), count: usize = 1, element: c_int = I32, peer: c_int = (own + 1) % RANKS as i32,
            communicator: Handle = rank.communicator, stream: Handle = rank.queue,
        )));
        ok(c_call!(fn ncclRecv(
            target: Handle = target, count: usize = 1, element: c_int = I32, peer: c_int = (own + 3) % RANKS as i32,
            communicator: Handle = rank.communicator, stream: Handle = rank.queue,
        )));
        ok(c_call!(fn ncclGroupEnd()));
        rank.wait();
        assert_eq!(download::<i32>(target, 1), [10 * ((own + 3) % RANKS as i32)]);
    });
}

/// Without waiting: the communicator says itself when it is complete, and an operation of its own end can be given up.
#[test]
fn communicators_in_the_background() {
    start();
    let id = unique_id();
    #[repr(C)]
    struct Config {
        size: usize,
        magic: u32,
        version: u32,
        blocking: c_int,
    }
    let join = |number: c_int| {
        set_device(number);
        let mut communicator: Handle = std::ptr::null_mut();
        let mut config = Config { size: 20, magic: 0xcafe_beef, version: 23004, blocking: 0 };
        ok(
            c_call!(fn ncclCommInitRankConfig(communicator: *mut Handle = &mut communicator, ranks: c_int = 2, id: UniqueId = id, rank: c_int = number, config: *mut Config = &mut config)),
        );
        Rank { number: number as usize, communicator, queue: stream() }
    };
    const IN_PROGRESS: c_int = 7;
    let first = join(0);
    assert_eq!(first.async_error(), IN_PROGRESS);
    let second = join(1);
    for rank in [&first, &second] {
        while rank.async_error() == IN_PROGRESS {
            std::thread::yield_now();
        }
        assert_eq!(rank.async_error(), 0);
    }
    set_device(0);
    ok(first.all_reduce(&[1.0], 1, SUM).0);
    ok(c_call!(fn ncclCommAbort(communicator: Handle = first.communicator)));
    first.wait();
}

#[test]
fn splits() {
    on_ranks(|rank| {
        let mut part: Handle = std::ptr::null_mut();
        // Even and odd ranks, in descending order.
        let (color, key) = ((rank.number % 2) as c_int, -(rank.number as c_int));
        ok(
            c_call!(fn ncclCommSplit(communicator: Handle = rank.communicator, color: c_int = color, key: c_int = key, new: *mut Handle = &mut part, config: Handle = std::ptr::null_mut())),
        );
        let mut number = -1;
        ok(c_call!(fn ncclCommUserRank(communicator: Handle = part, rank: *mut c_int = &mut number)));
        assert_eq!(number, if rank.number < 2 { 1 } else { 0 });
        let part = Rank { communicator: part, ..rank };
        let (status, target) = part.all_reduce(&[1.0 + part.number as f32], 1, SUM);
        ok(status);
        part.wait();
        assert_eq!(download::<f32>(target, 1), [if part.number.is_multiple_of(2) { 4.0 } else { 6.0 }]);
    });
}

#[test]
fn disagreement_is_an_error_on_all_ranks() {
    on_ranks(|rank| {
        let count = if rank.number == 2 { 3 } else { 4 };
        ok(rank.all_reduce(&[0.0; 4], count, SUM).0);
        rank.wait();
        assert_eq!(rank.async_error(), INVALID_USAGE);
        assert_eq!(rank.all_reduce(&[0.0; 4], 4, SUM).0, INVALID_USAGE);
    });
}

#[test]
fn a_rank_that_does_not_come_is_missed() {
    on_ranks(|rank| {
        if rank.number == 3 {
            // Alive, but late.
            std::thread::sleep(std::time::Duration::from_secs(4));
            return;
        }
        ok(rank.all_reduce(&[1.0], 1, SUM).0);
        rank.wait();
        assert_eq!(rank.async_error(), TIMEOUT);
    });
}

#[test]
fn a_rank_that_leaves_is_noticed() {
    on_ranks(|rank| {
        if rank.number == 1 {
            ok(c_call!(fn ncclCommAbort(communicator: Handle = rank.communicator)));
            return;
        }
        ok(rank.all_reduce(&[1.0], 1, SUM).0);
        rank.wait();
        assert_eq!(rank.async_error(), REMOTE_ERROR);
    });
}

/// Starts a process per rank; the id goes through the environment, as launchers do.
fn processes(fault: &str) -> Vec<(bool, String)> {
    start();
    let id: String = unique_id().0.iter().map(|byte| format!("{byte:02x}")).collect();
    let ranks: Vec<_> = (0..3)
        .map(|rank: usize| {
            let (id, fault) = (id.clone(), fault.to_string());
            std::thread::spawn(move || {
                child("child_rank", &[("TEST_ID", &id), ("TEST_RANK", &rank.to_string()), ("SWGPU_FAULT", &fault)])
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().expect("the thread waits for its process")).collect()
}

#[test]
fn ranks_as_processes() {
    for (passed, text) in processes("delay=1:100") {
        assert!(passed, "{text}");
    }
}

#[test]
fn a_killed_process_is_noticed() {
    let ranks = processes("kill=1:3");
    for (rank, (passed, text)) in ranks.iter().enumerate() {
        assert!(!passed, "rank {rank} cannot finish: {text}");
        let reason = if rank == 1 { "rank 1 ends at its operation 3" } else { "rank 1 has left" };
        assert!(text.contains(reason), "rank {rank}: {text}");
    }
}

#[test]
fn a_remote_error_is_seen_by_all() {
    for (passed, text) in processes("remote=2:2") {
        assert!(!passed && text.contains("asynchronous error 6"), "{text}");
    }
}

#[test]
#[ignore = "one rank of the tests with processes"]
fn child_rank() {
    let text = std::env::var("TEST_ID").expect("id");
    let mut id = UniqueId([0; 128]);
    for (byte, digits) in id.0.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).expect("text"), 16).expect("digits");
    }
    let number: usize = std::env::var("TEST_RANK").expect("rank").parse().expect("a number");
    let rank = Rank::join(id, number, 3, 0);
    for step in 0..5 {
        let (status, target) = rank.all_reduce(&[(number + step) as f32], 1, SUM);
        ok(status);
        rank.wait();
        assert_eq!(rank.async_error(), 0, "asynchronous error {}", rank.async_error());
        assert_eq!(download::<f32>(target, 1), [(3 + 3 * step) as f32]);
    }
}

use super::*;

fn launch(rank: usize, world: usize) -> Launch {
    Launch { rank, world, local_rank: Some(rank), local_world: Some(world), by: Launcher::Slurm }
}

/// A port that was free a moment ago.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

type Met = Result<(Arc<Meeting>, Vec<u8>)>;

/// The meetings of `world` ranks, or why there was none, by rank.
fn meet(world: usize, present: impl Fn(usize) -> bool + Sync, timeout: Duration) -> Vec<Option<Met>> {
    let address = free_address();
    std::thread::scope(|scope| {
        let open = |rank| {
            let (address, present) = (&address, &present);
            scope.spawn(move || {
                present(rank).then(|| Meeting::open(&launch(rank, world), address, timeout, || Ok(b"a gift".to_vec())))
            })
        };
        let ranks: Vec<_> = (0..world).map(open).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

fn all(world: usize) -> Vec<Arc<Meeting>> {
    let met = meet(world, |_| true, Duration::from_secs(20));
    let met: Vec<_> = met.into_iter().map(|m| m.unwrap().unwrap()).collect();
    assert!(met.iter().all(|(_, gift)| gift == b"a gift"));
    met.into_iter().map(|(m, _)| m).collect()
}

/// What all but `of` know of a failure, as soon as they do.
fn told(ranks: &[Arc<Meeting>], of: usize) -> Vec<String> {
    let until = Instant::now() + Duration::from_secs(4);
    let others = ranks.iter().filter(|r| r.rank != of);
    others
        .map(|r| {
            loop {
                match r.failure() {
                    Some(text) => break text,
                    None if Instant::now() > until => break String::new(),
                    None => std::thread::sleep(TICK),
                }
            }
        })
        .collect()
}

#[test]
fn who_does_not_come_is_named() {
    let met = meet(4, |rank| rank != 2, Duration::from_millis(700));
    let texts: Vec<String> = met.into_iter().flatten().map(|m| m.err().map_or(String::new(), |e| format!("{e:#}"))).collect();
    assert!(texts[0].contains("for rank 2"), "{texts:?}");
    assert!(texts[1..].iter().all(|t| t.contains("to reach rank 0 at 127.0.0.1")), "{texts:?}");
}

#[test]
fn ranks_say_where_they_are_and_leave_in_peace() {
    let ranks = all(3);
    ranks[1].at("is in the barrier".into());
    assert_eq!(ranks[2].whereabouts(&[0, 1]), ["rank 0 has not begun any operation", "rank 1 is in the barrier"]);
    ranks[1].leave();
    let until = Instant::now() + Duration::from_secs(4);
    while ranks[0].whereabouts(&[1]) != ["rank 1 has ended"] {
        assert!(Instant::now() < until);
    }
    assert!(ranks.iter().all(|r| r.failure().is_none()));
}

#[test]
fn what_is_no_address_is_a_sentence() {
    let one_node = Launch { local_world: Some(2), ..launch(0, 2) };
    let with = |set: &'static [(&str, &str)], launch: &Launch| {
        address(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()), launch)
    };
    assert_eq!(with(&[("MASTER_PORT", "4000")], &one_node).unwrap(), "127.0.0.1:4000");
    assert_eq!(with(&[("MASTER_ADDR", "n7"), ("MASTER_PORT", "4000")], &launch(0, 2)).unwrap(), "n7:4000");
    let torchrun = Launch { by: Launcher::Torchrun, ..one_node };
    assert_eq!(with(&[("MASTER_ADDR", "n7"), ("MASTER_PORT", "4000")], &torchrun).unwrap(), "n7:4001");
    let many_nodes = Launch { local_world: Some(1), ..launch(0, 2) };
    let text = |set, launch| with(set, launch).unwrap_err().to_string();
    assert!(text(&[("MASTER_PORT", "4000")], &many_nodes).contains("set MASTER_ADDR"));
    assert!(text(&[("MASTER_ADDR", "n7")], &many_nodes).contains("set MASTER_PORT"));
    assert!(text(&[("MASTER_ADDR", "n7"), ("MASTER_PORT", "x")], &many_nodes).contains("MASTER_PORT=\"x\" is no port"));
}

/// A failure ends the process that knows of it after a while; so the test is one of its own, and is over before.
#[test]
fn a_failure_reaches_all() {
    if std::env::var_os("ZAYA_TEST_MEETING").is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "parallel::rccl::meet::tests::a_failure_reaches_all", "--nocapture"])
            .env("ZAYA_TEST_MEETING", "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
        return;
    }
    let ranks = all(3);
    ranks[2].fail("rank 2 failed: the disk is full".into());
    assert!(told(&ranks, 2).iter().all(|t| t == "rank 2 failed: the disk is full"));
    assert!(ranks[0].check().unwrap_err().is::<PeerFailed>() && !ranks[2].check().unwrap_err().is::<PeerFailed>());
    // Dies: its connection ends.
    let ranks = all(3);
    ranks[1].lock().writers.iter().flatten().for_each(|w| w.shutdown(Shutdown::Both).unwrap());
    assert!(told(&ranks, 1).iter().all(|t| t.contains("rank 1 has ended without a word")), "{:?}", told(&ranks, 1));
}

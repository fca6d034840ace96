use std::time::Duration;

use super::super::threads::Hub;
use super::super::transport::Transport;
use super::*;

/// Runs `f` on every rank of a group of `world` threads.
pub fn on_ranks<R: Send>(world: usize, stages: Stages, f: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let ranks = Hub::ranks(world, Duration::from_secs(20));
    std::thread::scope(|scope| {
        let f = &f;
        let started = ranks.into_iter().map(|rank| {
            scope.spawn(move || {
                let comm = Comm::new(Arc::new(rank), stages);
                f(Group::new(&comm, Channel::Main, "test", (0..world).collect()))
            })
        });
        let started: Vec<_> = started.collect();
        started.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

const SHAPES: [(usize, Stages); 8] = [
    (1, Stages::Flat),
    (2, Stages::Flat),
    (3, Stages::Flat),
    (4, Stages::Flat),
    (4, Stages::Two { ranks_per_node: 2 }),
    (6, Stages::Two { ranks_per_node: 2 }),
    (6, Stages::Two { ranks_per_node: 3 }),
    (8, Stages::Two { ranks_per_node: 4 }),
];

fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729 + 17) % 1009) as f32 / 7.0 - 60.0
}

fn uneven(n: usize, world: usize) -> Vec<Range<usize>> {
    // The first member gets nothing where there are several, the last one most.
    let mut at = 0;
    (0..world)
        .map(|m| {
            let len = if m + 1 == world { n - at } else { (m * n) / (world * world) };
            at += len;
            at - len..at
        })
        .collect()
}

#[test]
fn sums_are_those_of_the_tree_in_both_forms() {
    const N: usize = 5003;
    for (world, stages) in SHAPES {
        let contributions: Vec<Vec<f32>> = (0..world).map(|r| (0..N).map(|i| value(r, i)).collect()).collect();
        let parts: Vec<(usize, &[f32])> = contributions.iter().enumerate().map(|(r, x)| (r, &x[..])).collect();
        let mut expected = vec![0.0; N];
        tree::sum(&parts, &mut expected);
        let is_exact = !matches!(stages, Stages::Two { ranks_per_node: 3 });
        let check = |got: &[f32], expected: &[f32]| {
            if is_exact {
                assert!(got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{world} ranks, {stages:?}");
            } else {
                assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3), "{world} ranks, {stages:?}");
            }
        };
        for pieces in [even_pieces(N, world), uneven(N, world)] {
            let got = on_ranks(world, stages, |g| {
                let mut x: Vec<f32> = (0..N).map(|i| value(g.index(), i)).collect();
                g.reduce_scatter("reduce-scatter", &mut x, &pieces).unwrap();
                x[pieces[g.index()].clone()].to_vec()
            });
            got.iter().zip(&pieces).for_each(|(got, piece)| check(got, &expected[piece.clone()]));
        }
        let got = on_ranks(world, stages, |g| {
            let mut x: Vec<f32> = (0..N).map(|i| value(g.index(), i)).collect();
            g.all_reduce("all-reduce", &mut x).unwrap();
            x
        });
        got.iter().for_each(|got| check(got, &expected));
    }
}

#[test]
fn gathers_and_broadcasts_bring_everything_everywhere() {
    for (world, stages) in SHAPES {
        for pieces in [even_pieces(1001, world), uneven(1001, world)] {
            let got = on_ranks(world, stages, |g| {
                let mut x = vec![u32::MAX; 1001];
                pieces[g.index()].clone().for_each(|i| x[i] = i as u32);
                g.all_gather("all-gather", &mut x, &pieces).unwrap();
                x
            });
            assert!(got.iter().all(|x| x.iter().enumerate().all(|(i, x)| i as u32 == *x)));
        }
        for root in 0..world {
            let got = on_ranks(world, stages, |g| {
                let mut x = vec![if g.index() == root { 7u8 } else { 0 }; 9];
                g.broadcast("broadcast", root, &mut x).unwrap();
                g.barrier("barrier").unwrap();
                let values = g.all_gather_values("values", g.index() as u64 * 3).unwrap();
                (x, values)
            });
            let values: Vec<u64> = (0..world as u64).map(|r| r * 3).collect();
            assert!(got.iter().all(|(x, v)| x == &[7; 9] && *v == values));
        }
    }
}

#[test]
fn lists_of_any_length_come_to_the_first() {
    for (world, stages) in SHAPES {
        let got = on_ranks(world, stages, |g| g.gather_to_first("lists", &vec![g.index() as u32; g.index() % 3 * 2]).unwrap());
        let expected: Vec<Vec<u32>> = (0..world).map(|m| vec![m as u32; m % 3 * 2]).collect();
        assert_eq!(got[0], expected);
        assert!(got[1..].iter().all(Vec::is_empty));
    }
}

#[test]
fn an_uneven_all_to_all_keeps_sources_in_order() {
    for (world, stages) in SHAPES {
        // Some pairs have nothing for each other; the last rank gets nothing at all where there are several.
        let counts: Vec<usize> =
            (0..world * world).map(|i| if world > 1 && i % world == world - 1 { 0 } else { (i * 5) % 7 }).collect();
        let item = |from: usize, to: usize, k: usize| (from * 10_000 + to * 100 + k) as u64;
        let got = on_ranks(world, stages, |g| {
            let me = g.index();
            let send: Vec<u64> = (0..world).flat_map(|to| (0..counts[me * world + to]).map(move |k| item(me, to, k))).collect();
            let mut receive = vec![0; (0..world).map(|from| counts[from * world + me]).sum()];
            g.all_to_all("all-to-all", &counts, &send, &mut receive).unwrap();
            receive
        });
        for (me, got) in got.iter().enumerate() {
            let expected: Vec<u64> =
                (0..world).flat_map(|from| (0..counts[from * world + me]).map(move |k| item(from, me, k))).collect();
            assert_eq!(*got, expected, "rank {me} of {world}, {stages:?}");
        }
    }
}

#[test]
fn pairs_talk_in_a_ring() {
    let got = on_ranks(3, Stages::Flat, |g| {
        let (next, before) = ((g.index() + 1) % 3, (g.index() + 2) % 3);
        let mut come = [0.0f32; 2];
        g.point_to_point("halo", &[(next, &[g.index() as f32, 0.5])], vec![(before, &mut come)]).unwrap();
        come
    });
    assert_eq!(got, [[2.0, 0.5], [0.0, 0.5], [1.0, 0.5]]);
}

/// Text of the error of each rank.
fn errors(world: usize, timeout: Duration, f: impl Fn(Group) -> Result<()> + Sync) -> Vec<String> {
    let ranks = Hub::ranks(world, timeout);
    std::thread::scope(|scope| {
        let f = &f;
        let started: Vec<_> = (ranks.into_iter())
            .map(|rank| {
                scope.spawn(move || {
                    let comm = Comm::new(Arc::new(rank), Stages::Flat);
                    comm.at(|place| *place = Place { step: 40, layer: Some(7), phase: "backward" });
                    f(Group::new(&comm, Channel::Main, "world", (0..world).collect()))
                })
            })
            .collect();
        started
            .into_iter()
            .map(|t| t.join().map_or("panicked".into(), |r| r.err().map_or(String::new(), |e| format!("{e:#}"))))
            .collect()
    })
}

#[test]
fn a_rank_that_does_not_come_ends_all_with_a_sentence() {
    let wait = Duration::from_millis(200);
    let got = errors(3, wait, |g| {
        g.barrier("start")?;
        if g.index() == 2 {
            std::thread::sleep(Duration::from_millis(800));
        }
        g.all_reduce("gradients", &mut [1.0f32])
    });
    for text in &got[..2] {
        assert!(text.contains("gradients #2 of the world group (step 40, layer 7, backward)"), "{text}");
        assert!(text.contains("for rank 2") && text.contains("rank 2 was last in start #1"), "{text}");
    }
    assert!(!got[2].is_empty(), "the late one does not go on alone");
}

/// In two stages, only some ranks wait for the late one; the others wait for those, and name it all the same.
#[test]
fn the_one_that_is_missing_is_named_by_all() {
    for late in 0..4 {
        let ranks = Hub::ranks(4, Duration::from_millis(300));
        let texts: Vec<String> = std::thread::scope(|scope| {
            let started: Vec<_> = (ranks.into_iter())
                .map(|rank| {
                    scope.spawn(move || {
                        let me = rank.rank();
                        let comm = Comm::new(Arc::new(rank), Stages::Two { ranks_per_node: 2 });
                        let group = Group::new(&comm, Channel::Main, "world", (0..4).collect());
                        group.barrier("start").unwrap();
                        if me == late {
                            std::thread::sleep(Duration::from_millis(900));
                        }
                        group.all_reduce("gradients", &mut [1.0f32; 8]).map_or_else(|e| e.to_string(), |()| String::new())
                    })
                })
                .collect();
            started.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(
            texts.iter().all(|t| t.contains(&format!("for rank {late} for 0 s: rank {late} was last in start"))),
            "{texts:?}"
        );
    }
}

#[test]
fn a_rank_that_fails_panics_or_leaves_ends_all() {
    let wait = Duration::from_secs(20);
    for how in 0..3 {
        let got = errors(3, wait, |g| {
            g.barrier("start")?;
            if g.index() == 1 {
                match how {
                    0 => g.comm().transport.fail("the disk is full"),
                    1 => std::panic::panic_any("on purpose"),
                    _ => return Ok(()),
                }
            }
            g.barrier("second")
        });
        let expected = ["rank 1 failed: the disk is full", "rank 1 failed: it panicked", "rank 1 has ended"][how];
        assert!(got[0].contains(expected) && got[2].contains(expected), "{got:?}");
    }
}

#[test]
fn operations_that_differ_are_an_error_that_names_both() {
    let got = errors(2, Duration::from_secs(20), |g| match g.index() {
        0 => g.all_reduce("gradients", &mut [1.0f32; 4]),
        _ => g.all_reduce("counts", &mut [1.0f32; 4]),
    });
    assert!(got.iter().all(|t| t.contains("gradients #1") && t.contains("counts #1")), "{got:?}");
    let got = errors(2, Duration::from_secs(20), |g| g.all_reduce("gradients", &mut vec![1.0f32; 4 + 4 * g.index()]));
    assert!(got.iter().all(|t| t.contains("expects 8 bytes") || t.contains("expects 16 bytes")), "{got:?}");
}

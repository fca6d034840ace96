//! The collectives over MPI, on every rank at once.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};
use zaya::parallel::group::even_pieces;
use zaya::parallel::transport::Transport;
use zaya::parallel::{Channel, Comm, Group, Stages, tree};

pub fn all(rank: &Arc<dyn Transport>) -> Result<()> {
    let world = rank.world();
    for stages in [Stages::Flat, Stages::Two { ranks_per_node: 2 }] {
        let comm = Comm::new(rank.clone(), stages);
        let group = |channel| Group::new(&comm, channel, "test", (0..world).collect());
        let g = group(Channel::Main);
        ensure!(g.is_two_stage() == (world == 4 && stages != Stages::Flat), "{stages:?} among {world}");
        // Short, some parts, many parts.
        for n in [5, 5003, 100_003] {
            sums(&g, n)?;
            gathers(&g, n)?;
        }
        broadcasts(&g)?;
        uneven_all_to_all(&g, 7)?;
        uneven_all_to_all(&g, 1500)?;
        // Both channels at a time, in no common order.
        let other = group(Channel::Background);
        std::thread::scope(|scope| {
            let other = scope.spawn(move || (0..20).try_for_each(|i| sums(&other, 3000 + 100 * i)));
            (0..20).try_for_each(|i| uneven_all_to_all(&g, 10 * i))?;
            other.join().expect("a panic would have ended all")
        })?;
        some_ranks(&comm)?;
    }
    pairs(rank)?;
    nothing_at_all(rank)
}

fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729 + 17) % 1009) as f32 / 7.0 - 60.0
}

/// The first member gets nothing where there are several, the last one most.
fn uneven(n: usize, world: usize) -> Vec<Range<usize>> {
    let mut at = 0;
    let len = |m: usize, at: usize| if m + 1 == world { n - at } else { (m * n) / (world * world) };
    (0..world)
        .map(|m| {
            let start = at;
            at += len(m, at);
            start..at
        })
        .collect()
}

fn same_bits(got: &[f32], expected: &[f32]) -> bool {
    got.len() == expected.len() && got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn sums(g: &Group, n: usize) -> Result<()> {
    let contributions: Vec<Vec<f32>> = g.members().iter().map(|r| (0..n).map(|i| value(*r, i)).collect()).collect();
    let parts: Vec<(usize, &[f32])> = g.members().iter().zip(&contributions).map(|(r, x)| (*r, &x[..])).collect();
    let mut expected = vec![0.0; n];
    tree::sum(&parts, &mut expected);
    for pieces in [even_pieces(n, g.size()), uneven(n, g.size())] {
        let mut x = contributions[g.index()].clone();
        g.reduce_scatter("reduce-scatter", &mut x, &pieces)?;
        let own = pieces[g.index()].clone();
        ensure!(same_bits(&x[own.clone()], &expected[own]), "the scattered sum of {n} numbers is another one");
    }
    let mut x = contributions[g.index()].clone();
    g.all_reduce("all-reduce", &mut x)?;
    ensure!(same_bits(&x, &expected), "the sum of {n} numbers is another one");
    Ok(())
}

fn gathers(g: &Group, n: usize) -> Result<()> {
    for pieces in [even_pieces(n, g.size()), uneven(n, g.size())] {
        let mut x = vec![u64::MAX; n];
        pieces[g.index()].clone().for_each(|i| x[i] = i as u64);
        g.all_gather("all-gather", &mut x, &pieces)?;
        ensure!(x.iter().enumerate().all(|(i, x)| i as u64 == *x), "gathering {n} numbers");
    }
    Ok(())
}

fn broadcasts(g: &Group) -> Result<()> {
    for root in 0..g.size() {
        for n in [9, 20_001] {
            let mut x = vec![if g.index() == root { 7u8 } else { 0 }; n];
            g.broadcast("broadcast", root, &mut x)?;
            g.barrier("barrier")?;
            ensure!(x.iter().all(|x| *x == 7), "broadcast of {n} bytes from {root}");
        }
        let values = g.all_gather_values("values", g.index() as u64 * 3)?;
        ensure!(values.iter().enumerate().all(|(r, v)| *v == r as u64 * 3), "{values:?}");
    }
    Ok(())
}

fn uneven_all_to_all(g: &Group, most: usize) -> Result<()> {
    let (n, me) = (g.size(), g.index());
    // Some pairs have nothing for each other; the last rank gets nothing at all where there are several.
    let count = |i: usize| if n > 1 && i % n == n - 1 { 0 } else { (i * 5 * most.div_ceil(7)) % (most + 1) };
    let counts: Vec<usize> = (0..n * n).map(count).collect();
    let item = |from: usize, to: usize, k: usize| (from * 1_000_000 + to * 100_000 + k) as u64;
    let send: Vec<u64> = (0..n).flat_map(|to| (0..counts[me * n + to]).map(move |k| item(me, to, k))).collect();
    let expected: Vec<u64> = (0..n).flat_map(|from| (0..counts[from * n + me]).map(move |k| item(from, me, k))).collect();
    let mut receive = vec![0; expected.len()];
    g.all_to_all("all-to-all", &counts, &send, &mut receive)?;
    ensure!(receive == expected, "all-to-all of at most {most} numbers");
    Ok(())
}

/// Two groups at a time, each of every second rank.
fn some_ranks(comm: &Arc<Comm>) -> Result<()> {
    let (me, world) = (comm.transport.rank(), comm.transport.world());
    let g = Group::new(comm, Channel::Main, "half", (me % 2..world).step_by(2).collect());
    sums(&g, 4000)
}

fn pairs(rank: &Arc<dyn Transport>) -> Result<()> {
    let (me, world) = (rank.rank(), rank.world());
    let g = Group::new(&Comm::new(rank.clone(), Stages::Flat), Channel::Main, "ring", (0..world).collect());
    let (next, before) = ((me + 1) % world, (me + world - 1) % world);
    if next == me {
        return Ok(());
    }
    for n in [2, 1700] {
        let mut come = vec![0.0f32; n];
        let own = vec![me as f32; n];
        g.point_to_point("halo", &[(next, &own)], vec![(before, &mut come)])?;
        ensure!(come.iter().all(|x| *x == before as f32), "{n} numbers from the rank before");
    }
    Ok(())
}

/// Without messages, and with empty ones.
fn nothing_at_all(rank: &Arc<dyn Transport>) -> Result<()> {
    use zaya::parallel::transport::{Incoming, Op, Outgoing, Place};
    let op = |sequence| Op { channel: Channel::Main, group: "empty", sequence, name: "nothing", place: Place::default() };
    rank.exchange(&op(1), &[], &[], &mut |come| assert!(come.is_empty()))?;
    let others = || (0..rank.world()).filter(|r| *r != rank.rank());
    let outgoing: Vec<Outgoing> = others().flat_map(|to| [Outgoing { to, data: &[] }, Outgoing { to, data: &[1, 2] }]).collect();
    let incoming: Vec<Incoming> = others().flat_map(|from| [0, 2].map(|bytes| Incoming { from, bytes })).collect();
    let mut is_called = false;
    rank.exchange(&op(2), &outgoing, &incoming, &mut |come| {
        is_called = come.iter().enumerate().all(|(i, m)| *m == if i % 2 == 0 { &[][..] } else { &[1, 2] });
    })?;
    ensure!(is_called, "empty messages among others");
    Ok(())
}

//! Bandwidth of memory, on arrays that no cache holds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::{MemoryPeak, Peak, best, cpu};

/// Times the last-level cache.
const CACHES: u64 = 4;
/// Bytes of one array: at least, where the cache is small or unknown, and at most, three of them being allocated.
const LEAST: u64 = 64 << 20;
const MOST: u64 = 1 << 30;
/// Numbers that a thread takes at a time.
const PIECE: usize = 1 << 16;
/// Numbers of a cache line, which is read in one go by the random pattern.
const LINE_NUMBERS: usize = 16;

pub(super) fn measure(time: Duration) -> MemoryPeak {
    let cached = cpu::l3_bytes().map_or(0, |b| b * CACHES).clamp(LEAST, MOST);
    let bytes = cpu::available_memory().map_or(cached, |free| cached.min(free / 8)) as usize;
    let n = (bytes / size_of::<f32>()).max(PIECE);
    let (a, b) = (vec![1f32; n], vec![2f32; n]);
    let mut c = vec![0f32; n];

    let rate = |arrays: usize, pass: &mut dyn FnMut()| best(time, || gbytes_per_s(arrays * n, pass));
    let read =
        Peak { one_thread: rate(1, &mut || read_one(&a)), all_threads: rate(1, &mut || a.par_chunks(PIECE).for_each(read_one)) };
    let copy = Peak {
        one_thread: rate(2, &mut || scale(&mut c, &a)),
        all_threads: rate(2, &mut || c.par_chunks_mut(PIECE).zip(a.par_chunks(PIECE)).for_each(|(c, a)| scale(c, a))),
    };
    let triad = Peak {
        one_thread: rate(3, &mut || add_scaled(&mut c, &a, &b)),
        all_threads: rate(3, &mut || {
            let operands = a.par_chunks(PIECE).zip(b.par_chunks(PIECE));
            c.par_chunks_mut(PIECE).zip(operands).for_each(|(c, (a, b))| add_scaled(c, a, b));
        }),
    };
    let write =
        Peak { one_thread: rate(1, &mut || fill(&mut c)), all_threads: rate(1, &mut || c.par_chunks_mut(PIECE).for_each(fill)) };
    // Places follow from the number of the read, so that nothing else is read.
    let lines = n / LINE_NUMBERS;
    let random = Peak {
        one_thread: rate(1, &mut || read_lines(&a, 0..lines)),
        all_threads: rate(1, &mut || {
            let piece = PIECE / LINE_NUMBERS;
            (0..lines.div_ceil(piece)).into_par_iter().for_each(|i| read_lines(&a, i * piece..((i + 1) * piece).min(lines)));
        }),
    };
    MemoryPeak { read, write, copy, triad, random, buffer_bytes: n * size_of::<f32>() }
}

/// Of a pass that reads or writes so many f32.
fn gbytes_per_s(numbers: usize, pass: &mut dyn FnMut()) -> f64 {
    let started = Instant::now();
    pass();
    (numbers * size_of::<f32>()) as f64 / started.elapsed().as_secs_f64().max(1e-9) / 1e9
}

/// Integer sums, which the compiler may take in any order and so many at a time.
fn read_one(a: &[f32]) {
    black_box(a.iter().fold(0u32, |sum, x| sum.wrapping_add(x.to_bits())));
}

/// A copy with one multiplication, so that it does not become a `memcpy`, which has tricks of its own.
fn scale(c: &mut [f32], a: &[f32]) {
    let factor = black_box(0.5);
    c.iter_mut().zip(a).for_each(|(c, a)| *c = factor * a);
}

fn add_scaled(c: &mut [f32], a: &[f32], b: &[f32]) {
    let factor = black_box(0.5);
    c.iter_mut().zip(a).zip(b).for_each(|((c, a), b)| *c = a + factor * b);
}

fn fill(c: &mut [f32]) {
    let value = black_box(3.0);
    c.iter_mut().for_each(|c| *c = value);
}

/// Reads a whole line at a place without a pattern for each number of `range`.
fn read_lines(a: &[f32], range: std::ops::Range<usize>) {
    let lines = (a.len() / LINE_NUMBERS) as u64;
    black_box(range.fold(0u32, |sum, i| {
        // Bits mixed as splitmix64 does it, brought into the range.
        let mixed = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let place = ((u128::from(mixed ^ mixed >> 31) * u128::from(lines)) >> 64) as usize;
        a[place * LINE_NUMBERS..][..LINE_NUMBERS].iter().fold(sum, |sum, x| sum.wrapping_add(x.to_bits()))
    }));
}

//! The report for people: GPUs, sweeps of products, collectives.

use std::fmt::Write;

use super::collectives::Collectives;
use super::gpu::Gpu;
use super::plot;
use super::sweep::Sweep;
use super::table::{bytes, percent, seconds};

/// Said wherever figures of the software GPU stand.
const SOFTWARE: &str = "a program in a GPU's place: these times are its own, and say nothing about the speed of any GPU";

pub(super) fn gpu(out: &mut String, gpu: &Gpu) {
    let f = &gpu.facts;
    let _ =
        writeln!(out, "\n# GPU: {}, {}, {} compute units, {}\n", f.name, f.arch, f.compute_units, bytes(f.memory_bytes as u64));
    if f.software {
        let _ = writeln!(out, "{SOFTWARE}");
    }
    let Some(memory) = &gpu.memory else { return };
    for line in &memory.patterns {
        let rate = if f.software { String::new() } else { format!("{:>12.1}  GB/s", line.gbytes_per_s) };
        let _ = writeln!(out, "{:<40} {:>11} {rate}", format!("memory {}", line.name), seconds(line.times.best_s));
    }
    let _ = writeln!(out, "arrays of {} each; best of the rounds", size(memory.buffer_bytes));
}

pub(super) fn sweep(out: &mut String, sweep: &Sweep) {
    let (unit, scale) = plot::unit(sweep);
    let precision = format!("{:?}", sweep.precision).to_lowercase();
    let _ = writeln!(out, "\n# Products on {}: y = x wT, x [m, k], w [n, k], {precision}\n", sweep.device);
    if sweep.software {
        let _ = writeln!(out, "{SOFTWARE}");
    }
    let best = sweep.points.iter().map(|p| p.gflops).fold(0.0, f64::max);
    let _ = writeln!(out, "{:<16} {:>22} {:>11} {:>9} {:>12} {:>9}", "", "m x n x k", "time", unit, "FLOP a byte", "of best");
    for p in &sweep.points {
        let shape = format!("{} x {} x {}", p.m, p.n, p.k);
        let (rate, share) = match sweep.software {
            true => (String::new(), String::new()),
            false => (plot::short(p.gflops * scale), percent(p.gflops / best)),
        };
        let name = p.name.as_deref().map_or(String::new(), |name| format!("* {name}"));
        let time = seconds(p.times.median_s);
        let _ = writeln!(out, "{name:<16} {shape:>22} {time:>11} {rate:>9} {:>12} {share:>9}", plot::short(p.flops_per_byte));
    }
    if sweep.points.iter().any(|p| p.name.is_some()) {
        let _ = writeln!(out, "* shapes of the recipe's model");
    }
    if !sweep.advice.is_empty() {
        let _ = writeln!(out, "\nAdvice:");
    }
    for line in &sweep.advice {
        let _ = writeln!(out, "  {line}");
    }
}

pub(super) fn collectives(out: &mut String, found: &Collectives) {
    let ranks = match found.engine {
        "rccl" => "GPUs, by RCCL",
        "mpi" => "processes, by MPI",
        _ => "ranks that are threads",
    };
    let _ = writeln!(out, "\n# Collectives between {} {ranks}\n", found.ranks);
    if found.software {
        let _ = writeln!(out, "{SOFTWARE}");
    }
    let heads = ["size", "time", "GB/s", "bus GB/s", "as a copy", "of that"];
    let [size_head, time, rate, bus, copy, share] = heads;
    let _ = writeln!(out, "{:<16} {:>6} {size_head:>10} {time:>11} {rate:>9} {bus:>9} {copy:>11} {share:>9}", "", "ranks");
    for l in &found.lines {
        let (name, size, time) = (l.name, size(l.bytes), seconds(l.median_s));
        let (rate, bus) = match found.software {
            true => (String::new(), String::new()),
            false => (format!("{:.2}", l.gbytes_per_s), format!("{:.2}", l.bus_gbytes_per_s)),
        };
        let copy = l.limit_s.map_or(String::new(), seconds);
        let share = l.fraction.map_or(String::new(), percent);
        let _ = writeln!(out, "{:<16} {:>6} {size:>10} {time:>11} {rate:>9} {bus:>9} {copy:>11} {share:>9}", name, l.group);
    }
    let _ = writeln!(out, "GB/s: the message's bytes over the time; bus: the bytes that each rank must receive over it");
    if found.lines.iter().any(|l| l.limit_s.is_some()) {
        let _ = writeln!(out, "as a copy: all ranks at once copy as many bytes as each of them must receive");
    }
    let _ = writeln!(out, "latency: the smallest all-reduce between all ranks takes {}", seconds(found.latency_s));
    if !found.software {
        let mib = found.bucket_mib;
        let _ = writeln!(out, "gradient buckets: parallel.bucket_mib = {mib} travels at 0.9 of the best rate or more");
    }
}

fn size(n: usize) -> String {
    match n {
        n if n < 1 << 20 => format!("{} KiB", n >> 10),
        n => bytes(n as u64),
    }
}

//! The report for people.

use std::fmt::Write;

use super::checkpoint::CheckpointLine;
use super::data::DataLine;
use super::ranks::RanksLine;
use super::report::{CaseLine, GemmLine, Report, StepLine, VerbLine};
use super::table_of_devices;
use super::tokenize::TokenizeLine;
use crate::machine::{ComputePeak, Peak, Peaks};
use crate::tensor::backend::Precision;

pub fn of(report: &Report) -> String {
    let mut out = String::new();
    let m = &report.machine;
    let cache = m.l3_bytes.map_or(String::new(), |b| format!(", {} cache", bytes(b)));
    let memory = m.memory_bytes.map_or(String::new(), |b| format!(", {} memory", bytes(b)));
    let _ = writeln!(out, "zaya {} on {}, {} processors{cache}{memory}", report.zaya_version, m.name, m.processors);
    let features = if m.features.is_empty() { "none that matter here".into() } else { m.features.join(" ") };
    let _ = writeln!(out, "{}: {features}; {} threads", m.arch, report.threads);
    if let Some(peaks) = &report.peaks {
        machine(&mut out, peaks);
    }
    if let Some(gpu) = &report.gpu {
        table_of_devices::gpu(&mut out, gpu);
    }
    if let Some(lines) = &report.gemm {
        products(&mut out, lines);
    }
    if let Some(sweep) = &report.sweep {
        table_of_devices::sweep(&mut out, sweep);
    }
    if let Some(lines) = &report.verbs {
        verbs(&mut out, lines);
    }
    if let Some(line) = &report.step {
        step(&mut out, line);
    }
    if let Some(line) = &report.ranks {
        ranks(&mut out, line);
    }
    if let Some(line) = &report.checkpoint {
        checkpoint(&mut out, line);
    }
    if let Some(line) = &report.data {
        data(&mut out, line);
    }
    if let Some(line) = &report.tokenize {
        tokenize(&mut out, line);
    }
    if let Some(found) = &report.collectives {
        table_of_devices::collectives(&mut out, found);
    }
    if !report.cases.is_empty() {
        cases(&mut out, &report.cases);
    }
    out
}

fn ranks(out: &mut String, l: &RanksLine) {
    let _ = writeln!(out, "\n# A step of {} tokens on {} ranks and on one, in alternating rounds\n", l.tokens, l.ranks);
    let many = format!("{} ranks of {} threads (cp {}, ep {})", l.ranks, l.threads_per_rank, l.cp, l.ep);
    let one = format!("1 rank of {} threads", l.ranks * l.threads_per_rank);
    for (name, time, rate) in [(many, l.step_s, l.tokens_per_s), (one, l.one_rank_step_s, l.one_rank_tokens_per_s)] {
        let _ = writeln!(out, "{name:<40} {:>11} {rate:>10.0} tokens/s", seconds(time));
    }
    let _ = writeln!(out, "ratio {:.3}; {} rounds", l.ratio, l.rounds);
    let (gradients, weights) = (percent(l.gradient_wait), percent(l.weight_wait));
    let operations = percent(l.operations);
    let _ = writeln!(out, "the first rank stood still for gradients {gradients} and for weights {weights} of a step,");
    let _ = writeln!(out, "and was {operations} in operations that the computation waits for (late ranks, halos, keys, tokens)");
}

fn data(out: &mut String, l: &DataLine) {
    let _ = writeln!(out, "\n# Reading data: {} tokens in {} documents\n", l.tokens, l.documents);
    let _ = writeln!(out, "{:<40} {:>11}", "opening the sources", seconds(l.open_s));
    let _ = writeln!(out, "{:<40} {:>11}", "the first batch", seconds(l.first_batch_s));
    let _ = writeln!(out, "{:<40} {:>11} {:>12.0} tokens/s", "batches, by one thread", l.batches, l.tokens_per_s);
    let _ = writeln!(out, "{:<40} {:>11} {:>12.0} tokens/s", "training, by all threads", "", l.trainer_tokens_per_s);
    let _ = writeln!(out, "reading is {:.0} times as fast as training", l.ratio);
}

fn checkpoint(out: &mut String, l: &CheckpointLine) {
    let _ = writeln!(out, "\n# A checkpoint of {} in {} files, in {}\n", bytes(l.bytes), l.files, l.dir.display());
    let mut row = |name: &str, time: f64, remark: String| {
        let _ = writeln!(out, "{name:<40} {:>11} {:>8.3} GB/s  {remark}", seconds(time), l.bytes as f64 / time / 1e9);
    };
    row("copy in memory", l.copy_s, String::new());
    row("copy of the state (training waits)", l.stall_s, format!("{:.2} times the copy", l.stall_ratio));
    row("write and sync one file", l.write_s, String::new());
    row("save", l.save_s, format!("{} of writing", percent(l.save_fraction)));
    row("read the files", l.read_s, String::new());
    row("load, every byte checked", l.load_s, format!("{} of reading", percent(l.load_fraction)));
    row("verify, as a resume does first", l.verify_s, format!("{} of reading", percent(l.verify_fraction)));
    row("verify, hashes of whole files too", l.verify_all_s, format!("{} of reading", percent(l.verify_all_fraction)));
    let cache = if l.cache_dropped { "was told to forget" } else { "may have kept, wholly or in part," };
    let _ = writeln!(out, "{} rounds; before each pass of reading the system {cache} the files", l.rounds);
}

fn tokenize(out: &mut String, l: &TokenizeLine) {
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let (documents, text, file) = (l.documents, megabytes(l.text_bytes), megabytes(l.file_bytes));
    let _ = writeln!(
        out,
        "\n# Tokenizing {documents} documents, {text:.1} MB of text in {file:.1} MB of files, {} times in a row\n",
        l.passes
    );
    let _ = writeln!(out, "{:<40} {:>11} once; in no line below", "reading the tokenizer.json", seconds(l.load_s));
    for (name, rate) in [
        ("tokenizer alone, texts in memory", &l.tokenizer),
        ("reading, decompressing, JSON", &l.reading),
        ("files to shard, 1 worker", &l.one_worker),
        ("files to shard, 2 workers", &l.two_workers),
    ] {
        let time = seconds(rate.times.median_s);
        let _ = writeln!(out, "{name:<40} {time:>11} {:>8.1} MB/s {:>8.1} MB a CPU second", rate.mb_per_s, rate.mb_per_cpu_s);
    }
    let _ = writeln!(
        out,
        "1 worker reaches {} of the tokenizer alone by CPU time, {} by wall time; 2 workers are {:.2} times as fast; {} rounds",
        percent(l.of_tokenizer),
        percent(l.of_tokenizer_wall),
        l.speedup,
        l.rounds
    );
}

fn machine(out: &mut String, p: &Peaks) {
    let _ = writeln!(out, "\n# Machine: best of the rounds\n");
    let _ = writeln!(out, "{:<40} {:>12} {:>12}", "", "1 thread", format!("{} threads", p.threads));
    let mut row = |name: &str, peak: Peak, unit: &str| {
        let _ = writeln!(out, "{name:<40} {:>12.1} {:>12.1}  {unit}", peak.one_thread, peak.all_threads);
    };
    let mut compute = |name: &str, c: &ComputePeak| row(&format!("{name} ({})", c.kernel), c.gflops, "GFLOP/s");
    compute("f32", &p.f32);
    if let Some(bf16) = &p.bf16 {
        compute("bf16", bf16);
    }
    row("memory read", p.memory.read, "GB/s");
    row("memory write", p.memory.write, "GB/s");
    row("memory copy", p.memory.copy, "GB/s");
    row("memory triad", p.memory.triad, "GB/s");
    row("memory, random lines", p.memory.random, "GB/s");
    let _ = writeln!(out, "arrays of {} each", bytes(p.memory.buffer_bytes as u64));
    if p.bf16.is_none() {
        let _ =
            writeln!(out, "no bf16 instruction here: products of bf16 numbers run on the f32 units, whose peak is their limit");
    }
}

fn products(out: &mut String, lines: &[GemmLine]) {
    let _ = writeln!(out, "\n# Products of the model: y = x wT, x [m, k], w [n, k]; backward = both gradients\n");
    let head = ["time", "GFLOP/s", "of peak"];
    let [time, rate, share] = head;
    let _ = writeln!(
        out,
        "{:<16} {:<9} {:>20} {:>11} {rate:>8} {share:>7} {:>11} {rate:>8} {share:>7}",
        "weight",
        "pass",
        "m x n x k",
        format!("f32 {time}"),
        format!("bf16 {time}")
    );
    for line in lines.iter().filter(|l| l.precision == Precision::F32) {
        let bf16 = lines.iter().find(|l| l.precision == Precision::Bf16 && (&l.name, l.pass) == (&line.name, line.pass));
        let shape = format!("{} x {} x {}", line.m, line.n, line.k);
        let _ = write!(out, "{:<16} {:<9} {shape:>20}", line.name, line.pass.name());
        for l in std::iter::once(line).chain(bf16) {
            let _ = write!(out, " {:>11} {:>8.1} {:>7}", seconds(l.times.median_s), l.gflops, percent(l.fraction));
        }
        out.push('\n');
    }
}

fn verbs(out: &mut String, lines: &[VerbLine]) {
    let _ = writeln!(out, "\n# Verbs at the recipe's micro-batch and precision\n");
    let _ = writeln!(out, "{:<24} {:<16} {:>10} {:>13}  {:<7} {:>8} {:>10}", "verb", "pass", "time", "", "limit", "", "of limit");
    for l in lines {
        let rate = match l.bound {
            "compute" => format!("{:.1} GFLOP/s", l.gflops),
            _ => format!("{:.1} GB/s", l.gbytes_per_s),
        };
        let (time, limit) = (seconds(l.times.median_s), seconds(l.limit_s));
        let (pass, share) = (l.pass.name(), percent(l.fraction));
        let _ = writeln!(out, "{:<24} {pass:<16} {time:>10} {rate:>13}  {:<7} {limit:>10} {share:>8}", l.name, l.bound);
    }
    let _ = writeln!(out, "more than 100 % of memory: the operands of the last round still lay in the cache");
}

fn step(out: &mut String, s: &StepLine) {
    let _ = writeln!(out, "\n# A step of {} tokens, dealt evenly to the experts: median of {}\n", s.tokens, s.times.rounds);
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<40} {value}");
    };
    let share = |t: f64| format!("{:>11}  {:>6}", seconds(t), percent(t / s.times.median_s));
    row("whole step", format!("{:>11}  best {}", seconds(s.times.median_s), seconds(s.times.best_s)));
    row("  forward and backward", share(s.forward_backward_s));
    row("  AdamW", share(s.adamw_s));
    row("  Muon", share(s.muon_s));
    row("  gradient norm, balancing", share(s.other_s));
    row("tokens a second", format!("{:>11.0}", s.tokens_per_s));
    row("CPU time of the process a step", format!("{:>11}", seconds(s.times.cpu_s)));
    let mfu = match (s.mfu, s.limit_gflops) {
        (Some(mfu), Some(limit)) => format!("  {} of {limit:.1} (MFU)", percent(mfu)),
        _ => String::new(),
    };
    row("GFLOP/s of forward and backward", format!("{:>11.1}{mfu}", s.gflops));
    if let Some(peak) = s.peak_resident_bytes {
        row("most memory of the process", format!("{:>11}", bytes(peak)));
    }
}

fn cases(out: &mut String, lines: &[CaseLine]) {
    let _ = writeln!(out, "\n# Cases\n");
    for l in lines {
        let _ = writeln!(
            out,
            "{} {}: median {}, best {}, CPU {}, {:.1} GFLOP/s ({} rounds)",
            l.case,
            l.pass.name(),
            seconds(l.times.median_s),
            seconds(l.times.best_s),
            seconds(l.times.cpu_s),
            l.gflops,
            l.times.rounds
        );
    }
}

pub(crate) fn seconds(s: f64) -> String {
    match s {
        s if s >= 1.0 => format!("{s:.3} s"),
        s if s >= 1e-3 => format!("{:.3} ms", s * 1e3),
        s => format!("{:.2} us", s * 1e6),
    }
}

pub(super) fn percent(x: f64) -> String {
    format!("{:.1} %", 100.0 * x)
}

pub(super) fn bytes(n: u64) -> String {
    match n {
        0..0x4000_0000 => format!("{:.0} MiB", n as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", n as f64 / 1_073_741_824.0),
    }
}

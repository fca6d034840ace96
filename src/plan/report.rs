//! The plan as text, for `zaya pretrain --dry-run`.

use std::fmt::Write;

use anyhow::Result;

use super::{Plan, SourcePlan, memory, missing_files};
use crate::model::ParamTable;
use crate::parallel::{Cutting, Layout};
use crate::recipe::Recipe;
use crate::train::{EngineKind, gpu, ranks};

/// Geometry, parameters, FLOPs, memory and data of every stage, and the files that are not there.
/// On `ranks` ranks, each of which has the current pool's threads, or a GPU.
pub fn report(recipe: &Recipe, ranks: usize, engine: EngineKind) -> Result<String> {
    let mut out = String::new();
    let mut stages: Vec<(Recipe, Plan)> = Vec::new();
    let mut used = vec![0.0; recipe.data.sources.len()];
    for stage in recipe.each_stage() {
        let plan = Plan::after(&stage, &used);
        used.iter_mut().zip(&plan.sources).for_each(|(used, s)| *used += s.tokens_used.unwrap_or(0.0));
        stages.push((stage, plan));
    }
    if let Some((_, plan)) = stages.first() {
        parameters(&mut out, plan);
    }
    for (i, (stage, plan)) in stages.iter().enumerate() {
        if let Some(named) = stage.stages.first() {
            let _ = writeln!(out, "# Stage {} of {}: {}\n", i + 1, stages.len(), named.name);
        }
        let (layout, cutting) = ranks::layout(stage, ranks)?;
        geometry(&mut out, stage, plan);
        if ranks > 1 {
            sharing(&mut out, stage, layout, cutting);
        }
        flops(&mut out, plan);
        memory(&mut out, stage, (ranks > 1).then_some((layout, cutting)), engine)?;
        data(&mut out, plan);
    }
    if stages.len() > 1 {
        let _ = writeln!(out, "# All stages\n");
        row(&mut out, "tokens", &grouped(stages.iter().map(|(_, p)| p.total_tokens).sum()), "");
        row(&mut out, "steps", &grouped(stages.iter().map(|(_, p)| p.steps).sum()), "");
        for (k, source) in recipe.data.sources.iter().enumerate() {
            let used: f64 = stages.iter().filter_map(|(_, p)| p.sources.get(k)?.tokens_used).sum();
            let available = stages.first().and_then(|(_, p)| p.sources.get(k)?.tokens_available).filter(|n| *n > 0);
            let epochs = available.map_or("size unknown".into(), |n| format!("{:.2} epochs", used / n as f64));
            row(&mut out, &format!("source {}", source.name), &grouped(used.round() as u64), &format!("tokens, {epochs}"));
        }
        out.push('\n');
    }
    let missing = missing_files(recipe);
    if !missing.is_empty() {
        let _ = writeln!(out, "# Files that are not there ({}); a real start refuses this recipe\n", missing.len());
        missing.iter().for_each(|f| {
            let _ = writeln!(out, "MISSING {}", f.display());
        });
    }
    Ok(out)
}

fn row(out: &mut String, name: &str, value: &str, note: &str) {
    let _ = writeln!(out, "{}", format!("{name:<44} {value:>24}  {note}").trim_end());
}

/// 8840488784 as 8,840,488,784.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Three digits and a unit: 8.75 G.
fn scaled(x: f64) -> String {
    let (unit, scale) = [("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)]
        .into_iter()
        .find(|(_, scale)| x >= *scale)
        .unwrap_or(("", 1.0));
    format!("{:.2} {unit}", x / scale)
}

fn bytes(n: u64) -> String {
    match n {
        0..0x10_0000 => format!("{:.1} KiB", n as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", n as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", n as f64 / 1_073_741_824.0),
    }
}

fn parameters(out: &mut String, plan: &Plan) {
    let _ = writeln!(out, "# Parameters\n");
    for (group, count) in &plan.groups {
        row(out, group.name(), &grouped(*count), "");
    }
    row(out, "total parameters", &grouped(plan.parameters), "");
    row(out, "active per token, without the embedding", &grouped(plan.active_without_embedding), "");
    row(out, "active per token, with the tied head", &grouped(plan.active_with_head), "");
    out.push('\n');
}

fn geometry(out: &mut String, recipe: &Recipe, plan: &Plan) {
    let t = &recipe.train;
    let _ = writeln!(out, "# Geometry\n");
    let sequences = format!("{} sequences of {} tokens", grouped(plan.sequences_per_step), grouped(t.seq_len as u64));
    row(out, "tokens per step", &grouped(plan.tokens_per_step), &sequences);
    let micro =
        format!("of {} sequences, {} tokens", grouped(t.sequences_at_once() as u64), grouped(plan.tokens_per_micro_batch));
    row(out, "micro-batches per step", &grouped(plan.micro_batches_per_step), &micro);
    row(out, "steps", &grouped(plan.steps), "");
    row(out, "tokens of the run", &grouped(plan.total_tokens), "");
    out.push('\n');
}

fn flops(out: &mut String, plan: &Plan) {
    let f = &plan.flops;
    let _ = writeln!(out, "# FLOPs\n");
    row(out, "FLOPs per token", &scaled(f.per_token()), &format!("{:.0}", f.per_token()));
    row(out, "  6 * active parameters with the head", &scaled(f.parameters), "forward 2, backward 4 per parameter");
    row(out, "  attention, 12 * q_dim * keys seen", &scaled(f.attention), "causal: S/2 keys on average; all blocks");
    let step = f.per_token() * plan.tokens_per_step as f64;
    row(out, "FLOPs per step", &scaled(step), "");
    let share = 100.0 * f.newton_schulz / step;
    row(out, "Newton-Schulz per step, beside these", &scaled(f.newton_schulz), &format!("{share:.2} % of a step's"));
    row(out, "FLOPs of the run", &scaled(step * plan.steps as f64), "");
    out.push('\n');
}

fn sharing(out: &mut String, recipe: &Recipe, layout: Layout, cutting: Cutting) {
    let _ = writeln!(out, "# Ranks\n");
    row(out, "ranks", &grouped(layout.world as u64), "");
    let sequences = recipe.train.sequences_per_step();
    let of_rank = layout.micro_batches(0, sequences as usize, recipe.train.sequences_at_once());
    let idle = (layout.replicas() as u64).saturating_sub(sequences);
    let idle = if idle > 0 { format!("; {} without a sequence", grouped(idle)) } else { String::new() };
    let replicas = format!("of {} ranks; {} micro-batches a step{idle}", layout.cp, grouped(of_rank.len() as u64));
    row(out, "replicas", &grouped(layout.replicas() as u64), &replicas);
    if layout.cp > 1 {
        let cut = format!("{} tokens; {:?}, {} a rank", grouped(cutting.chunk() as u64), cutting.cut, cutting.per_rank());
        row(out, "chunks of a sequence", &grouped(cutting.chunks() as u64), &cut.to_lowercase());
    }
    if layout.ep > 1 {
        let experts = layout.experts_of(0, recipe.model.num_experts).len() as u64;
        row(out, "experts of a block on a rank", &grouped(experts), &format!("of {}", recipe.model.num_experts));
    }
    out.push('\n');
}

fn memory(out: &mut String, recipe: &Recipe, shared: Option<(Layout, Cutting)>, engine: EngineKind) -> Result<()> {
    let table = ParamTable::new(&recipe.model);
    let whose = if shared.is_some() { "the first rank" } else { "one process" };
    let on_gpu = engine == EngineKind::Hip;
    let parts = match on_gpu {
        true => memory::device_parts(recipe, &table, shared)?,
        false => memory::parts(recipe, &table, shared)?.1,
    };
    let _ = match on_gpu {
        true => writeln!(out, "# Memory of the GPU, {whose}\n"),
        false => writeln!(out, "# Memory, {whose} on the CPU with {} threads\n", rayon::current_num_threads()),
    };
    for part in &parts {
        row(out, part.name, &bytes(part.bytes), "");
    }
    let together: u64 = parts.iter().map(|p| p.bytes).sum();
    row(out, "together", &bytes(together), "");
    if on_gpu {
        match gpu::available_bytes() {
            Some(free) if (free as u64) < together => {
                row(out, "free on the GPU here", &bytes(free as u64), "TOO LITTLE: a run halves its micro-batch")
            }
            Some(free) => row(out, "free on the GPU here", &bytes(free as u64), ""),
            None => row(out, "free on the GPU here", "", "no GPU here"),
        }
        row(out, &format!("{}, of the host", memory::STAGING), &bytes(memory::staging_bytes(recipe, &table)), "");
    }
    out.push('\n');
    Ok(())
}

fn data(out: &mut String, plan: &Plan) {
    let _ = writeln!(out, "# Data\n");
    for source in &plan.sources {
        let share = format!("{:.1} %", 100.0 * source.share.unwrap_or(0.0));
        let used = grouped(source.tokens_used.unwrap_or(0.0).round() as u64);
        row(out, &format!("source {}", source.name), &used, &format!("tokens, {share} of the run; {}", holdings(source)));
    }
    if plan.missing_tokens > 0.0 {
        let short = grouped(plan.missing_tokens.ceil() as u64);
        row(out, "EXHAUSTED: every source reaches max_epochs", &short, "tokens before the end; a real start refuses this recipe");
    }
    for set in &plan.validation {
        row(out, &format!("held-out {}", set.name), "", &holdings(set));
    }
    out.push('\n');
}

fn holdings(source: &SourcePlan) -> String {
    if let Some(why) = source.damaged.first() {
        return format!("UNREADABLE: {why}");
    }
    match (source.tokens_available, source.epochs()) {
        (None, _) => format!("{} files MISSING", source.missing.len()),
        (Some(n), Some(epochs)) => format!("holds {} tokens: {epochs:.2} epochs", grouped(n)),
        (Some(n), None) => format!("holds {} tokens", grouped(n)),
    }
}

//! The resolved recipe as TOML: every key spelt out, readable by `load` again.

use std::path::Path;
use std::time::Duration;

use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value};

use super::resolved::*;
use super::schema::is_index;
use super::units::format_duration;
use crate::model::config::{AttentionKind, SkipMode};

/// Keys and values in the schema's order; what is absent is not listed.
pub fn flat(r: &Recipe) -> Vec<(String, Value)> {
    let mut out = Flat(Vec::new());
    out.put("run.dir", path(&r.run.dir));
    out.put("run.seed", int(r.run.seed));
    out.some("run.time_limit", r.run.time_limit, |d: Duration| format_duration(d).into());

    let m = &r.model;
    out.some("model.preset", r.preset.clone(), Value::from);
    out.put("model.vocab_size", int(m.vocab_size as u64));
    out.put("model.hidden_size", int(m.hidden_size as u64));
    out.put("model.num_blocks", int(m.num_blocks() as u64));
    out.put("model.num_query_heads", int(m.num_query_heads as u64));
    out.put("model.num_kv_heads", int(m.num_kv_heads as u64));
    out.put("model.head_dim", int(m.head_dim as u64));
    out.put("model.num_experts", int(m.num_experts as u64));
    out.put("model.expert_width", int(m.expert_width as u64));
    out.put("model.router_width", int(m.router_width as u64));
    out.put("model.attention", attention(&m.attention));
    out.put("model.sliding_window", m.sliding_window.map_or("none".into(), |w| int(w as u64)));
    out.put("model.rope_theta", m.rope.theta.into());
    out.put("model.rope_theta_sliding", m.rope_sliding.theta.into());
    out.put("model.partial_rotary_factor", m.rope.partial_rotary_factor.into());
    out.put("model.partial_rotary_factor_sliding", m.rope_sliding.partial_rotary_factor.into());
    out.put("model.max_position_embeddings", int(m.max_position_embeddings as u64));
    out.put("model.norm_eps", m.norm_eps.into());
    out.put("model.router_norm_eps", m.router_norm_eps.into());
    let skip = match m.skip_mode {
        SkipMode::Zero => "zero",
        SkipMode::Identity => "identity",
    };
    out.put("model.skip_mode", skip.into());
    out.put("model.initializer_range", m.initializer_range.into());
    for (key, id) in [("pad", m.pad_token_id), ("bos", m.bos_token_id), ("eos", m.eos_token_id)] {
        out.put(&format!("model.{key}_token_id"), id.map_or("none".into(), |id| int(id as u64)));
    }

    out.some("tokenizer.path", r.tokenizer.as_deref(), path);
    for (array, sources) in [("data.sources", &r.data.sources), ("data.validation", &r.data.validation)] {
        for (i, source) in sources.iter().enumerate() {
            out.put(&format!("{array}.{i}.name"), source.name.as_str().into());
            let shards = match source.shards.as_slice() {
                [one] => path(one),
                many => Value::Array(many.iter().map(|p| path(p)).collect()),
            };
            out.put(&format!("{array}.{i}.path"), shards);
            if array == "data.sources" {
                out.put(&format!("{array}.{i}.weight"), source.weight.into());
                out.some(&format!("{array}.{i}.max_epochs"), source.max_epochs, Value::from);
            }
        }
    }
    out.put("data.packing", r.data.packing.name().into());
    out.put("data.document_mask", r.data.document_mask.into());
    out.put("data.eod_mask_loss", r.data.eod_mask_loss.into());

    let t = &r.train;
    out.put("train.steps", int(t.steps));
    out.put("train.global_batch_tokens", int(t.global_batch_tokens));
    out.put("train.micro_batch", int(t.micro_batch as u64));
    out.put("train.seq_len", int(t.seq_len as u64));
    let precision = |p| match p {
        Precision::F32 => "f32",
        Precision::Bf16 => "bf16",
    };
    out.put("train.precision", precision(t.precision).into());
    out.put("train.head_precision", precision(t.head_precision).into());
    out.put("train.recompute", recompute_name(t.recompute).into());
    let deterministic = match t.deterministic {
        Deterministic::Run => "run",
        Deterministic::Layout => "layout",
    };
    out.some("train.memory_limit_mib", t.memory_limit_mib, int);
    out.put("train.deterministic", deterministic.into());
    out.some("train.threads", t.threads, |n| int(n as u64));
    out.put("train.gpu_graphs", t.gpu_graphs.into());
    out.some("train.peak_flops", t.peak_flops, Value::from);

    let o = &r.optimizer;
    out.put("optimizer.muon_momentum", o.muon_momentum.into());
    out.put("optimizer.muon_weight_decay", o.muon_weight_decay.into());
    out.put("optimizer.ns_steps", int(o.ns_steps as u64));
    out.put("optimizer.muon_split_gate_up", o.muon_split_gate_up.into());
    out.put("optimizer.adam_betas", Value::Array(o.adam_betas.into_iter().collect()));
    out.put("optimizer.adam_eps", o.adam_eps.into());
    out.put("optimizer.adam_weight_decay", o.adam_weight_decay.into());
    out.put("optimizer.clip", o.clip.into());
    out.put("optimizer.expert_clip", o.expert_clip.into());

    out.put("schedule.kind", kind_name(r.schedule.kind).into());
    out.put("schedule.lr", r.schedule.lr.into());
    out.put("schedule.min_lr", r.schedule.min_lr.into());
    out.put("schedule.warmup_steps", int(r.schedule.warmup_steps));
    if r.schedule.kind == ScheduleKind::Wsd || r.schedule.decay_steps > 0 {
        out.put("schedule.decay_steps", int(r.schedule.decay_steps));
    }

    let b = &r.router;
    let balance = match b.balance {
        Balance::AdamW => "adamw",
        Balance::Sign => "sign",
        Balance::Pid => "pid",
    };
    out.put("router.balance", balance.into());
    out.put("router.balance_lr", b.balance_lr.into());
    out.put("router.balance_betas", Value::Array(b.balance_betas.into_iter().collect()));
    out.put("router.balance_eps", b.balance_eps.into());
    out.put("router.pid_proportional", b.pid_proportional.into());
    out.put("router.pid_integral", b.pid_integral.into());
    out.put("router.pid_derivative", b.pid_derivative.into());
    out.put("router.balance_warmup", int(b.balance_warmup));
    out.put("router.balance_skip_class", b.balance_skip_class.into());
    out.put("router.freeze_tokens", int(b.freeze_tokens));

    out.put("checkpoint.every", int(r.checkpoint.every));
    out.put("checkpoint.async", Value::from(r.checkpoint.asynchronous));
    out.some("checkpoint.keep_last", r.checkpoint.keep_last, int);
    out.some("checkpoint.keep_every", r.checkpoint.keep_every, int);
    out.put("checkpoint.incremental", Value::from(r.checkpoint.incremental));
    out.some("checkpoint.upload", r.checkpoint.upload.as_deref(), Value::from);
    out.put("checkpoint.upload_retry", format_duration(r.checkpoint.upload_retry).into());
    guards(r, &mut out);
    out.some("eval.every", r.eval.every, int);
    out.some("eval.tokens", r.eval.tokens, int);
    for (i, t) in r.eval.tasks.iter().enumerate() {
        let key = |leaf: &str| format!("eval.tasks.{i}.{leaf}");
        out.put(&key("task"), t.task.as_str().into());
        out.put(&key("data"), path(&t.data));
        out.some(&key("every"), t.every, int);
        out.some(&key("num_fewshot"), t.num_fewshot, |n| int(n as u64));
        out.some(&key("limit"), t.limit, int);
    }
    out.put("metrics.every", int(r.metrics.every));
    parallel(r, &mut out);

    for (i, s) in r.stages.iter().enumerate() {
        let mut put = |key: &str, value: Value| out.put(&format!("stages.{i}.{key}"), value);
        put("name", s.name.as_str().into());
        put("steps", int(s.steps));
        put("global_batch_tokens", int(s.global_batch_tokens));
        put("micro_batch", int(s.micro_batch as u64));
        put("recompute", recompute_name(s.recompute).into());
        put("seq_len", int(s.seq_len as u64));
        put("rope_theta", s.rope_theta.into());
        put("rope_theta_sliding", s.rope_theta_sliding.into());
        put("kind", kind_name(s.schedule.kind).into());
        put("lr", s.schedule.lr.into());
        put("min_lr", s.schedule.min_lr.into());
        put("warmup_steps", int(s.schedule.warmup_steps));
        put("decay_steps", int(s.schedule.decay_steps));
        put("cp", int(s.cp as u64));
        put("ep", int(s.ep as u64));
        let weights: InlineTable = r.data.sources.iter().map(|s| s.name.as_str()).zip(s.weights.iter().copied()).collect();
        put("weights", Value::InlineTable(weights));
    }
    out.0
}

fn guards(r: &Recipe, out: &mut Flat) {
    let g = &r.guards;
    let spike = match g.spike {
        SpikePolicy::Off => "off",
        SpikePolicy::Tell => "tell",
        SpikePolicy::Refuse(remedy) => remedy.name(),
    };
    let span = |[first, last]: &[u64; 2]| match first == last {
        true => int(*first),
        false => Value::Array([int(*first), int(*last)].into_iter().collect()),
    };
    out.put("guards.non_finite", g.non_finite.name().into());
    out.put("guards.spike", spike.into());
    out.put("guards.spike_window", int(g.spike_window as u64));
    out.put("guards.spike_threshold", g.spike_threshold.into());
    out.put("guards.limit", int(g.limit));
    out.put("guards.skip_batches", Value::Array(g.skip_batches.iter().map(span).collect()));
}

fn parallel(r: &Recipe, out: &mut Flat) {
    let p = &r.parallel;
    let chunks = match p.cp_chunks {
        CpChunks::Auto => "auto",
        CpChunks::Contiguous => "contiguous",
        CpChunks::Zigzag => "zigzag",
    };
    let collectives = match p.collectives {
        Collectives::Auto => "auto",
        Collectives::Flat => "flat",
        Collectives::TwoStage => "two-stage",
    };
    let partial = match p.partial_nodes {
        PartialNodes::Warn => "warn",
        PartialNodes::Error => "error",
        PartialNodes::Allow => "allow",
    };
    out.put("parallel.cp", int(p.cp as u64));
    out.put("parallel.ep", int(p.ep as u64));
    out.put("parallel.cp_chunks", chunks.into());
    out.put("parallel.collectives", collectives.into());
    out.some("parallel.ranks_per_node", p.ranks_per_node.map(|n| n as u64), int);
    out.put("parallel.partial_nodes", partial.into());
    out.put("parallel.bucket_mib", p.bucket_mib.map_or_else(|| "auto".into(), int));
    out.put("parallel.timeout", format_duration(p.timeout).into());
}

struct Flat(Vec<(String, Value)>);

impl Flat {
    fn put(&mut self, key: &str, value: Value) {
        self.0.push((key.to_string(), value));
    }
    fn some<T>(&mut self, key: &str, value: Option<T>, to: impl Fn(T) -> Value) {
        if let Some(v) = value {
            self.put(key, to(v));
        }
    }
}

/// Every integer of a recipe was read from TOML, whose integers end at 2^63 - 1.
fn int(n: u64) -> Value {
    i64::try_from(n).unwrap_or(i64::MAX).into()
}

/// Paths are UTF-8: `load` refuses others.
fn path(p: &Path) -> Value {
    p.to_string_lossy().into_owned().into()
}

fn attention(kinds: &[AttentionKind]) -> Value {
    let word = |kind: &AttentionKind| match kind {
        AttentionKind::Full => "full",
        AttentionKind::Sliding => "sliding",
    };
    match kinds {
        [first, rest @ ..] if rest.iter().all(|k| k == first) => word(first).into(),
        kinds => Value::Array(kinds.iter().map(word).collect::<Array>()),
    }
}

fn recompute_name(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::None => "none",
        Recompute::Attention => "attention",
        Recompute::All => "all",
    }
}

fn kind_name(kind: ScheduleKind) -> &'static str {
    match kind {
        ScheduleKind::Cosine => "cosine",
        ScheduleKind::Constant => "constant",
        ScheduleKind::Linear => "linear",
        ScheduleKind::Wsd => "wsd",
    }
}

impl Recipe {
    /// The resolved recipe as TOML text. `super::load` reads it back to an equal recipe from any folder.
    pub fn to_toml(&self) -> String {
        let mut doc = DocumentMut::new();
        for (key, value) in flat(self) {
            let segments: Vec<&str> = key.split('.').collect();
            insert(doc.as_table_mut(), &segments, value);
        }
        doc.to_string()
    }
}

fn insert(table: &mut Table, path: &[&str], value: Value) {
    match path {
        [] => {}
        [key] => {
            table.insert(key, Item::Value(value));
        }
        [array, index, rest @ ..] if is_index(index) => {
            let item = table.entry(array).or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
            if let Item::ArrayOfTables(tables) = item {
                let index: usize = index.parse().unwrap_or(0);
                while tables.len() <= index {
                    tables.push(Table::new());
                }
                if let Some(t) = tables.get_mut(index) {
                    insert(t, rest, value);
                }
            }
        }
        [name, rest @ ..] => {
            let item = table.entry(name).or_insert_with(|| Item::Table(Table::new()));
            if let Item::Table(t) = item {
                insert(t, rest, value);
            }
        }
    }
}

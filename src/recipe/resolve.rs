//! From typed values to the resolved recipe: presets, stages, derived numbers.

use std::path::Path;
use std::time::Duration;

use super::check::Values;
use super::problems::{Origin, Problem};
use super::resolved::*;
use super::schema::Value;
use super::{geometry, paths};
use crate::checkpoint::remote::check_folder_url;
use crate::error::did_you_mean;
use crate::model::config::{AttentionKind, ModelConfig, Rope, SkipMode};
use crate::model::presets;

/// Keys that a stage says in place of another table's.
const STAGE_KEYS: [(&str, &str); 16] = [
    ("steps", "train.steps"),
    ("tokens", "train.tokens"),
    ("global_batch_tokens", "train.global_batch_tokens"),
    ("micro_batch", "train.micro_batch"),
    ("recompute", "train.recompute"),
    ("seq_len", "train.seq_len"),
    ("rope_theta", "model.rope_theta"),
    ("rope_theta_sliding", "model.rope_theta_sliding"),
    ("kind", "schedule.kind"),
    ("lr", "schedule.lr"),
    ("min_lr", "schedule.min_lr"),
    ("warmup_steps", "schedule.warmup_steps"),
    ("warmup_tokens", "schedule.warmup_tokens"),
    ("decay_steps", "schedule.decay_steps"),
    ("cp", "parallel.cp"),
    ("ep", "parallel.ep"),
];

/// The recipe as stage `i` sees it: what the stage says stands in the place of the recipe's other tables.
pub fn stage_view(values: &Values, i: usize) -> (Values, Vec<Problem>) {
    let mut view = values.clone();
    let mut problems = Vec::new();
    for (own, general) in STAGE_KEYS {
        let path = format!("stages.{i}.{own}");
        let Some(value) = values.given(&path) else { continue };
        if let Some(partner) = super::schema::exclusive_partner(general) {
            let table = general.split('.').next().unwrap_or("");
            let partner = format!("{table}.{partner}");
            // Unless the stage gives both, which is told elsewhere, its one key rules out the general other one.
            if values.given(&format!("stages.{i}.{}", partner.rsplit('.').next().unwrap_or(""))).is_none() {
                view.remove(&partner);
            }
        }
        view.set(general, value.clone(), values.origin(&path));
    }
    let path = format!("stages.{i}.weights");
    if let Some(Value::Weights(weights)) = values.given(&path) {
        let origin = values.origin(&path);
        let names: Vec<String> = (0..values.len_of("data.sources")).map(|k| source_name(values, "data.sources", k)).collect();
        for (name, weight) in weights {
            match names.iter().position(|n| n == name) {
                Some(k) => view.set(&format!("data.sources.{k}.weight"), Value::Number(*weight), origin),
                None => problems.push(Problem::new(
                    origin,
                    format!(
                        "`{path}` names `{name}`, which is no data source{}",
                        did_you_mean(name, names.iter().map(String::as_str))
                    ),
                )),
            }
        }
        let forgotten: Vec<String> =
            names.iter().filter(|n| !weights.iter().any(|(w, _)| w == *n)).map(|n| format!("`{n}`")).collect();
        if !forgotten.is_empty() {
            let text = format!("`{path}` leaves out {}: name every source (0 = not used in this stage)", forgotten.join(", "));
            problems.push(Problem::new(origin, text));
        }
    }
    (view, problems)
}

fn source_name(values: &Values, array: &str, k: usize) -> String {
    match (values.given(&format!("{array}.{k}.name")), values.given(&format!("{array}.{k}.path"))) {
        (Some(Value::Text(name)), _) => name.clone(),
        (_, Some(Value::Texts(paths))) => {
            let first = paths.first().map_or("", String::as_str);
            let name = Path::new(first).file_name().and_then(|n| n.to_str()).unwrap_or(first);
            let name = name.strip_suffix(".bin").or_else(|| name.strip_suffix(".idx")).unwrap_or(name);
            name.to_string()
        }
        _ => String::new(),
    }
}

/// Typed access to values whose presence and type the check has already ensured.
struct Reader<'a> {
    values: &'a Values,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn int_opt(&self, path: &str) -> Option<u64> {
        match self.values.get(path) {
            Some(Value::Integer(n)) => Some(n),
            _ => None,
        }
    }
    fn int(&self, path: &str) -> u64 {
        self.int_opt(path).unwrap_or_default()
    }
    fn num_opt(&self, path: &str) -> Option<f64> {
        match self.values.get(path) {
            Some(Value::Number(x)) => Some(x),
            _ => None,
        }
    }
    fn num(&self, path: &str) -> f64 {
        self.num_opt(path).unwrap_or_default()
    }
    fn flag(&self, path: &str) -> bool {
        matches!(self.values.get(path), Some(Value::Bool(true)))
    }
    fn pair(&self, path: &str) -> [f64; 2] {
        match self.values.get(path) {
            Some(Value::Pair(p)) => p,
            _ => [0.0; 2],
        }
    }
    fn text(&self, path: &str) -> Option<String> {
        match self.values.get(path) {
            Some(Value::Text(s)) => Some(s),
            _ => None,
        }
    }
    fn problem(&mut self, path: &str, text: String) {
        self.problems.push(Problem::new(self.values.origin(path), text));
    }

    fn upload(&mut self) -> Option<String> {
        let url = self.text("checkpoint.upload")?;
        if let Err(why) = check_folder_url(&url) {
            self.problem("checkpoint.upload", format!("`checkpoint.upload`: {why}"));
        }
        Some(url)
    }

    fn guards(&self) -> Guards {
        let remedy = |text: Option<&str>| match text {
            Some("skip") => Remedy::Skip,
            Some("rollback") => Remedy::Rollback,
            _ => Remedy::Stop,
        };
        Guards {
            non_finite: remedy(self.text("guards.non_finite").as_deref()),
            spike: match self.text("guards.spike").as_deref() {
                None | Some("off") => SpikePolicy::Off,
                Some("tell") => SpikePolicy::Tell,
                other => SpikePolicy::Refuse(remedy(other)),
            },
            spike_window: self.int("guards.spike_window") as usize,
            spike_threshold: self.num("guards.spike_threshold"),
            limit: self.int("guards.limit"),
            skip_batches: match self.values.get("guards.skip_batches") {
                Some(Value::Spans(spans)) => spans,
                _ => Vec::new(),
            },
        }
    }

    fn parallel(&self) -> Parallel {
        Parallel {
            cp: self.int("parallel.cp") as usize,
            ep: self.int("parallel.ep") as usize,
            cp_chunks: match self.text("parallel.cp_chunks").as_deref() {
                Some("contiguous") => CpChunks::Contiguous,
                Some("zigzag") => CpChunks::Zigzag,
                _ => CpChunks::Auto,
            },
            collectives: match self.text("parallel.collectives").as_deref() {
                Some("flat") => Collectives::Flat,
                Some("two-stage") => Collectives::TwoStage,
                _ => Collectives::Auto,
            },
            ranks_per_node: self.int_opt("parallel.ranks_per_node").map(|n| n as usize),
            partial_nodes: match self.text("parallel.partial_nodes").as_deref() {
                Some("error") => PartialNodes::Error,
                Some("allow") => PartialNodes::Allow,
                _ => PartialNodes::Warn,
            },
            bucket_mib: self.int_opt("parallel.bucket_mib"),
            timeout: match self.values.get("parallel.timeout") {
                Some(Value::Duration(d)) => d,
                _ => Duration::from_secs(600),
            },
        }
    }

    /// None when a field is neither given nor a preset's.
    fn model(&mut self) -> Option<(Option<String>, ModelConfig)> {
        let preset = self.text("model.preset");
        let base = preset.as_deref().and_then(presets::by_name);
        let mut missing = Vec::new();
        let mut field = |name: &str, of_preset: fn(&ModelConfig) -> usize| -> usize {
            let given = self.int_opt(&format!("model.{name}")).map(|n| n as usize);
            given.or(base.as_ref().map(of_preset)).unwrap_or_else(|| {
                missing.push(format!("model.{name}"));
                0
            })
        };
        let vocab_size = field("vocab_size", |m| m.vocab_size);
        let hidden_size = field("hidden_size", |m| m.hidden_size);
        let num_query_heads = field("num_query_heads", |m| m.num_query_heads);
        let num_kv_heads = field("num_kv_heads", |m| m.num_kv_heads);
        let head_dim = field("head_dim", |m| m.head_dim);
        let num_experts = field("num_experts", |m| m.num_experts);
        let expert_width = field("expert_width", |m| m.expert_width);
        let router_width = field("router_width", |m| m.router_width);
        let max_position_embeddings = field("max_position_embeddings", |m| m.max_position_embeddings);
        let attention = self.attention(base.as_ref(), &mut missing);
        if !missing.is_empty() {
            let list = missing.iter().map(|p| format!("`{p}`")).collect::<Vec<_>>().join(", ");
            let text = format!("the model's shape is incomplete: without `model.preset` it also needs {list}");
            self.problem("model.preset", text);
        }
        let attention = attention?;
        let num = |name: &str, of_preset: fn(&ModelConfig) -> f64, default: f64| {
            self.num_opt(&format!("model.{name}")).or(base.as_ref().map(of_preset)).unwrap_or(default)
        };
        let id = |name: &str, of_preset: fn(&ModelConfig) -> Option<u32>| match self.values.given(&format!("model.{name}")) {
            Some(Value::Integer(n)) => Some(*n as u32),
            Some(_) => None,
            None => base.as_ref().and_then(of_preset),
        };
        let norm_eps = num("norm_eps", |m| m.norm_eps, 1e-5);
        let model = ModelConfig {
            vocab_size,
            hidden_size,
            num_query_heads,
            num_kv_heads,
            head_dim,
            num_experts,
            expert_width,
            router_width,
            attention,
            sliding_window: match self.values.given("model.sliding_window") {
                Some(Value::Integer(n)) => Some(*n as usize),
                Some(_) => None,
                None => base.as_ref().and_then(|m| m.sliding_window),
            },
            rope: Rope {
                theta: num("rope_theta", |m| m.rope.theta, 10_000.0),
                partial_rotary_factor: num("partial_rotary_factor", |m| m.rope.partial_rotary_factor, 0.5),
            },
            rope_sliding: Rope {
                theta: num("rope_theta_sliding", |m| m.rope_sliding.theta, 10_000.0),
                partial_rotary_factor: num("partial_rotary_factor_sliding", |m| m.rope_sliding.partial_rotary_factor, 0.5),
            },
            max_position_embeddings,
            norm_eps,
            router_norm_eps: num("router_norm_eps", |m| m.router_norm_eps, norm_eps),
            skip_mode: match self.text("model.skip_mode").as_deref() {
                Some("zero") => SkipMode::Zero,
                Some(_) => SkipMode::Identity,
                None => base.as_ref().map_or(SkipMode::Zero, |m| m.skip_mode),
            },
            initializer_range: num("initializer_range", |m| m.initializer_range, 0.02),
            pad_token_id: id("pad_token_id", |m| m.pad_token_id),
            bos_token_id: id("bos_token_id", |m| m.bos_token_id),
            eos_token_id: id("eos_token_id", |m| m.eos_token_id),
        };
        self.problems.is_empty().then_some((preset, model))
    }

    fn attention(&mut self, base: Option<&ModelConfig>, missing: &mut Vec<String>) -> Option<Vec<AttentionKind>> {
        let kind = |word: &String| if word == "sliding" { AttentionKind::Sliding } else { AttentionKind::Full };
        let blocks = self.int_opt("model.num_blocks").map(|n| n as usize);
        match self.values.given("model.attention").cloned() {
            Some(Value::Texts(words)) => {
                if let Some(n) = blocks.filter(|n| *n != words.len()) {
                    let text = format!("`model.attention` has {} entries, but `model.num_blocks` is {n}", words.len());
                    self.problem("model.attention", text);
                }
                Some(words.iter().map(kind).collect())
            }
            given => {
                let Some(n) = blocks.or(base.map(ModelConfig::num_blocks)) else {
                    missing.push("model.num_blocks".into());
                    return None;
                };
                match (given, base) {
                    (Some(Value::Text(word)), _) => Some(vec![kind(&word); n]),
                    (_, Some(m)) if n == m.num_blocks() => Some(m.attention.clone()),
                    (_, Some(m)) if m.attention.windows(2).any(|w| w[0] != w[1]) => {
                        let text = format!(
                            "`model.num_blocks` is {n}, but the preset mixes kinds of attention over {} blocks: give `model.attention` too",
                            m.num_blocks()
                        );
                        self.problem("model.num_blocks", text);
                        None
                    }
                    (_, Some(m)) => Some(vec![m.attention.first().copied().unwrap_or(AttentionKind::Full); n]),
                    (_, None) => Some(vec![AttentionKind::Full; n]),
                }
            }
        }
    }

    fn sources(&mut self, array: &str, base: &Path) -> Vec<DataSource> {
        let mut out: Vec<DataSource> = Vec::new();
        for k in 0..self.values.len_of(array) {
            let name = source_name(self.values, array, k);
            if out.iter().any(|s| s.name == name) {
                let text = format!("two entries of `{array}` are named `{name}`: give one of them another `name`");
                self.problem(&format!("{array}.{k}.name"), text);
            }
            let mut shards = Vec::new();
            if let Some(Value::Texts(list)) = self.values.given(&format!("{array}.{k}.path")) {
                list.iter().for_each(|path| shards.extend(paths::shards(base, path)));
            }
            let weight = self.num_opt(&format!("{array}.{k}.weight")).unwrap_or(1.0);
            let max_epochs = self.num_opt(&format!("{array}.{k}.max_epochs"));
            out.push(DataSource { name, shards, weight, max_epochs });
        }
        out
    }

    fn eval_tasks(&mut self, base: &Path) -> Vec<EvalTask> {
        let of = |k: usize, leaf: &str| format!("eval.tasks.{k}.{leaf}");
        let one = |k: usize| EvalTask {
            task: self.text(&of(k, "task")).unwrap_or_default(),
            data: paths::absolute(base, &self.text(&of(k, "data")).unwrap_or_default()),
            every: self.int_opt(&of(k, "every")).or_else(|| self.int_opt("eval.every")),
            num_fewshot: self.int_opt(&of(k, "num_fewshot")).map(|n| n as usize),
            limit: self.int_opt(&of(k, "limit")),
        };
        (0..self.values.len_of("eval.tasks")).map(one).collect()
    }

    /// Steps of the run and of the warm-up, from steps or tokens.
    fn lengths(&mut self, global_batch_tokens: u64) -> (u64, u64) {
        let batch = global_batch_tokens.max(1);
        let steps = match self.int_opt("train.tokens") {
            Some(tokens) => {
                if tokens < batch {
                    let text = format!(
                        "`train.tokens` ({tokens}) is less than one step: `train.global_batch_tokens` is {batch}; no step would be made"
                    );
                    self.problem("train.tokens", text);
                }
                tokens / batch
            }
            None => self.int("train.steps"),
        };
        let warmup = match self.int_opt("schedule.warmup_tokens") {
            Some(tokens) => tokens.div_ceil(batch),
            None => self.int("schedule.warmup_steps"),
        };
        (steps, warmup)
    }
}

/// One stage's view to a recipe. `base`: the recipe's folder, absolute.
fn resolve_view(values: &Values, base: &Path) -> Result<Recipe, Vec<Problem>> {
    let mut r = Reader { values, problems: Vec::new() };
    let model = r.model();
    let sources = r.sources("data.sources", base);
    let validation = r.sources("data.validation", base);
    let global_batch_tokens = r.int("train.global_batch_tokens");
    let (steps, warmup_steps) = r.lengths(global_batch_tokens);
    let Some((preset, model)) = model else { return Err(r.problems) };
    let precision = |key: &str| if r.text(key).as_deref() == Some("bf16") { Precision::Bf16 } else { Precision::F32 };
    let mut recipe = Recipe {
        run: Run {
            dir: paths::absolute(base, &r.text("run.dir").unwrap_or_default()),
            seed: r.int("run.seed"),
            time_limit: match values.given("run.time_limit") {
                Some(Value::Duration(d)) => Some(*d),
                _ => None,
            },
        },
        preset,
        model,
        tokenizer: r.text("tokenizer.path").map(|p| paths::absolute(base, &p)),
        data: Data {
            sources,
            validation,
            packing: match r.text("data.packing").as_deref() {
                Some("best-fit") => Packing::BestFit,
                _ => Packing::Stream,
            },
            document_mask: r.flag("data.document_mask"),
            eod_mask_loss: r.flag("data.eod_mask_loss"),
        },
        train: Train {
            steps,
            global_batch_tokens,
            micro_batch: r.int("train.micro_batch") as usize,
            seq_len: r.int("train.seq_len") as usize,
            precision: precision("train.precision"),
            head_precision: precision("train.head_precision"),
            recompute: match r.text("train.recompute").as_deref() {
                Some("attention") => Recompute::Attention,
                Some("all") => Recompute::All,
                _ => Recompute::None,
            },
            deterministic: match r.text("train.deterministic").as_deref() {
                Some("layout") => Deterministic::Layout,
                _ => Deterministic::Run,
            },
            memory_limit_mib: r.int_opt("train.memory_limit_mib"),
            threads: r.int_opt("train.threads").map(|n| n as usize),
            gpu_graphs: r.flag("train.gpu_graphs"),
            peak_flops: r.num_opt("train.peak_flops"),
        },
        optimizer: Optimizer {
            muon_momentum: r.num("optimizer.muon_momentum"),
            muon_weight_decay: r.num("optimizer.muon_weight_decay"),
            ns_steps: r.int("optimizer.ns_steps") as usize,
            muon_split_gate_up: r.flag("optimizer.muon_split_gate_up"),
            adam_betas: r.pair("optimizer.adam_betas"),
            adam_eps: r.num("optimizer.adam_eps"),
            adam_weight_decay: r.num("optimizer.adam_weight_decay"),
            clip: r.num("optimizer.clip"),
            expert_clip: r.num("optimizer.expert_clip"),
        },
        schedule: ScheduleSpec {
            kind: match r.text("schedule.kind").as_deref() {
                Some("constant") => ScheduleKind::Constant,
                Some("linear") => ScheduleKind::Linear,
                Some("wsd") => ScheduleKind::Wsd,
                _ => ScheduleKind::Cosine,
            },
            lr: r.num("schedule.lr"),
            min_lr: r.num("schedule.min_lr"),
            warmup_steps,
            decay_steps: r.int("schedule.decay_steps"),
        },
        router: Router {
            balance: match r.text("router.balance").as_deref() {
                Some("sign") => Balance::Sign,
                Some("pid") => Balance::Pid,
                _ => Balance::AdamW,
            },
            balance_lr: r.num("router.balance_lr"),
            balance_betas: r.pair("router.balance_betas"),
            balance_eps: r.num("router.balance_eps"),
            pid_proportional: r.num("router.pid_proportional"),
            pid_integral: r.num("router.pid_integral"),
            pid_derivative: r.num("router.pid_derivative"),
            balance_warmup: r.int("router.balance_warmup"),
            balance_skip_class: r.flag("router.balance_skip_class"),
            freeze_tokens: r.int("router.freeze_tokens"),
        },
        checkpoint: Checkpoint {
            every: r.int("checkpoint.every"),
            asynchronous: r.flag("checkpoint.async"),
            keep_last: r.int_opt("checkpoint.keep_last"),
            keep_every: r.int_opt("checkpoint.keep_every"),
            incremental: r.flag("checkpoint.incremental"),
            upload: r.upload(),
            upload_retry: match r.values.get("checkpoint.upload_retry") {
                Some(Value::Duration(d)) => d,
                _ => Duration::from_secs(180),
            },
        },
        guards: r.guards(),
        eval: Eval { every: r.int_opt("eval.every"), tokens: r.int_opt("eval.tokens"), tasks: r.eval_tasks(base) },
        metrics: Metrics { every: r.int("metrics.every") },
        parallel: r.parallel(),
        stages: Vec::new(),
        warnings: Vec::new(),
    };
    let mut problems = r.problems;
    geometry::check(&mut recipe, values, &mut problems);
    if problems.is_empty() { Ok(recipe) } else { Err(problems) }
}

/// The whole recipe, every stage checked.
pub fn resolve(values: &Values, base: &Path) -> Result<Recipe, Vec<Problem>> {
    let stages = values.len_of("stages");
    if stages == 0 {
        return resolve_view(values, base);
    }
    let mut recipe: Option<Recipe> = None;
    let mut names: Vec<String> = Vec::new();
    let mut failed: Vec<(String, Vec<Problem>)> = Vec::new();
    let mut problems = Vec::new();
    for i in 0..stages {
        let name = match values.given(&format!("stages.{i}.name")) {
            Some(Value::Text(name)) => name.clone(),
            _ => String::new(),
        };
        if names.contains(&name) {
            let origin = values.origin(&format!("stages.{i}.name"));
            problems.push(Problem::new(origin, format!("two stages are named `{name}`: each needs its own name")));
        }
        names.push(name.clone());
        let (view, wrong) = stage_view(values, i);
        problems.extend(wrong);
        match resolve_view(&view, base) {
            Ok(mut of_stage) => {
                if stages > 1 {
                    of_stage.warnings.iter_mut().for_each(|w| *w = format!("stage `{name}`: {w}"));
                }
                let stage = of_stage.as_stage(name.clone());
                match &mut recipe {
                    None => recipe = Some(Recipe { stages: vec![stage], ..of_stage }),
                    Some(whole) => {
                        whole.warnings.extend(of_stage.warnings);
                        whole.stages.push(stage);
                    }
                }
            }
            Err(wrong) => failed.push((name, wrong)),
        }
    }
    // What is wrong in every stage is no stage's own fault.
    let everywhere = |p: &Problem| failed.len() == stages && failed.iter().all(|(_, wrong)| wrong.contains(p));
    for (name, wrong) in &failed {
        for p in wrong {
            problems.push(match stages == 1 || everywhere(p) {
                true => p.clone(),
                false => Problem::new(p.origin, format!("stage `{name}`: {}", p.text)),
            });
        }
    }
    match recipe {
        Some(recipe) if problems.is_empty() => Ok(recipe),
        _ if problems.is_empty() => Err(vec![Problem::new(Origin::Absent, "the recipe has no stage")]),
        _ => Err(problems),
    }
}

//! Numbers that are well-formed alone but impossible, or surprising, together.

use super::check::Values;
use super::problems::Problem;
use super::resolved::{Recipe, ScheduleKind};
use super::tokenizer;

/// Most matrices of experts that a model may have: beyond it, listing them alone would fill a machine's memory.
const MOST_EXPERTS: u128 = 1 << 21;
/// Most parameters of a model, a thousand times the largest in existence: keeps every product within 64 bits.
const MOST_PARAMETERS: u128 = 1 << 54;

/// The warning about held-out sets that training does not look at. Not of `zaya extend-context`, which looks at them before and after.
pub const NEVER_EVALUATED: &str = "data.validation is given, but eval.every is not: the held-out sets are never used";

/// Appends problems to `problems`, and warnings to the recipe.
pub fn check(recipe: &mut Recipe, values: &Values, problems: &mut Vec<Problem>) {
    let mut problem = |path: &str, text: String| problems.push(Problem::new(values.origin(path), text));
    let mut warnings = Vec::new();
    let r = &*recipe;

    model(r, values, &mut problem);
    batch(r, &mut problem);
    schedule(r, values, &mut problem, &mut warnings);

    if r.data.sources.iter().all(|s| s.weight == 0.0) {
        problem("data.sources.0.weight", "every `data.sources.*.weight` is 0: no source would be read".into());
    } else if !r.data.sources.iter().map(|s| s.weight).sum::<f64>().is_finite() {
        problem("data.sources.0.weight", "the sum of all `data.sources.*.weight` overflows".into());
    }
    if r.eval.every.is_some() && r.data.validation.is_empty() && r.eval.tasks.is_empty() {
        problem(
            "eval.every",
            "`eval.every` is given, but there is no [[data.validation]] to evaluate on, and no [[eval.tasks]]".into(),
        );
    }
    if !r.eval.tasks.is_empty() && r.tokenizer.is_none() {
        problem("eval.tasks.0.task", "[[eval.tasks]] need `tokenizer.path`: their texts must become tokens".into());
    }
    if !r.eval.tasks.is_empty() && r.parallel.ep > 1 {
        let text =
            "[[eval.tasks]] need all experts on each rank, but `parallel.ep` is above 1: evaluate checkpoints with `zaya eval`";
        problem("eval.tasks.0.task", text.into());
    }
    if r.eval.every.is_none() && !r.data.validation.is_empty() {
        warnings.push(NEVER_EVALUATED.to_string());
    }
    if let Some(tokens) = r.eval.tokens.filter(|t| *t < r.train.seq_len as u64) {
        let text = format!("`eval.tokens` ({tokens}) is less than one sequence: `train.seq_len` is {}", r.train.seq_len);
        problem("eval.tokens", text);
    }
    if let Some(keep) = r.checkpoint.keep_every.filter(|k| !k.is_multiple_of(r.checkpoint.every)) {
        let text = format!(
            "`checkpoint.keep_every` ({keep}) must be a multiple of `checkpoint.every` ({}): a checkpoint exists only at those steps",
            r.checkpoint.every
        );
        problem("checkpoint.keep_every", text);
    }
    if r.router.freeze_tokens > 0 && r.router.freeze_tokens >= r.train.steps.saturating_mul(r.train.global_batch_tokens) {
        warnings.push(format!(
            "router.freeze_tokens ({}) is not less than the run's tokens: the routers never learn",
            r.router.freeze_tokens
        ));
    }
    recipe.warnings.extend(warnings);
}

fn model(r: &Recipe, values: &Values, problem: &mut impl FnMut(&str, String)) {
    let m = &r.model;
    for (field, text) in m.problems() {
        // The key that the user wrote and that has part in it; the preset's line where there is none.
        let others: &[&str] = match field {
            "num_blocks" => &["attention"],
            "head_dim" => &["partial_rotary_factor", "partial_rotary_factor_sliding", "num_kv_heads"],
            "partial_rotary_factor" => &["partial_rotary_factor_sliding"],
            "rope_theta" => &["rope_theta_sliding"],
            "num_query_heads" => &["num_kv_heads"],
            "sliding_window" => &["attention"],
            "pad_token_id" | "bos_token_id" | "eos_token_id" => &["vocab_size"],
            _ => &[],
        };
        let path = [&[field], others].concat().into_iter().map(|f| format!("model.{f}"));
        let path = path.clone().find(|p| values.given(p).is_some()).unwrap_or(format!("model.{field}"));
        problem(&path, format!("`{path}`: {text}"));
    }
    if !m.head_dim.is_multiple_of(2) && !m.problems().iter().any(|(field, _)| *field == "head_dim") {
        let text = format!("`model.head_dim` ({}) is an odd number: RoPE rotates channels in pairs", m.head_dim);
        problem("model.head_dim", text);
    }
    let experts = m.num_blocks() as u128 * m.num_experts as u128;
    if experts > MOST_EXPERTS {
        let text = format!("`model.num_blocks` * `model.num_experts` is {experts} experts; at most {MOST_EXPERTS} are possible");
        problem("model.num_experts", text);
    }
    let d = m.hidden_size as u128;
    let parameters = m.vocab_size as u128 * d
        + experts * 3 * d * m.expert_width as u128
        + m.num_blocks() as u128
            * (2 * d * (m.q_dim() as u128 + m.kv_dim() as u128)
                + 2 * m.conv_dim() as u128 * m.head_dim as u128
                + m.router_width as u128 * (d + 2 * m.router_width as u128 + m.num_classes() as u128));
    if parameters > MOST_PARAMETERS {
        let text = format!("`model`: a model of {:.1e} parameters; at most {MOST_PARAMETERS} can be counted", parameters as f64);
        problem("model.hidden_size", text);
    }
    if r.train.seq_len > m.max_position_embeddings {
        let text = format!(
            "`train.seq_len` ({}) is longer than the model's `model.max_position_embeddings` ({})",
            r.train.seq_len, m.max_position_embeddings
        );
        problem("train.seq_len", text);
    }
    if let Some(path) = r.tokenizer.as_deref().filter(|p| p.exists()) {
        match tokenizer::max_id(path) {
            Ok(Some(id)) if id >= m.vocab_size as u64 => {
                let text = format!(
                    "`model.vocab_size` ({}) is too small for the tokenizer {}, whose largest id is {id}: at least {} rows are needed",
                    m.vocab_size,
                    path.display(),
                    id + 1
                );
                problem("model.vocab_size", text);
            }
            Ok(_) => {}
            Err(text) => problem("tokenizer.path", format!("`tokenizer.path`: {text}")),
        }
    }
}

fn batch(r: &Recipe, problem: &mut impl FnMut(&str, String)) {
    let t = &r.train;
    let tokens = t.global_batch_tokens;
    let micro = t.micro_batch as u64 * t.seq_len as u64;
    if !tokens.is_multiple_of(micro) {
        let below = tokens / micro * micro;
        let near = match below {
            0 => format!("the smallest is {micro}"),
            _ => format!("the nearest are {below} and {}", below.saturating_add(micro)),
        };
        let text = format!(
            "`train.global_batch_tokens` ({tokens}) must be a multiple of `train.micro_batch` * `train.seq_len` ({} * {} = {micro}): {near}",
            t.micro_batch, t.seq_len
        );
        problem("train.global_batch_tokens", text);
    }
    if t.steps.checked_mul(tokens).is_none_or(|n| n > i64::MAX as u64) {
        let text =
            format!("`train.steps` * `train.global_batch_tokens` ({} * {tokens}) is more tokens than can be counted", t.steps);
        problem("train.steps", text);
    }
}

fn schedule(r: &Recipe, values: &Values, problem: &mut impl FnMut(&str, String), warnings: &mut Vec<String>) {
    let (s, steps) = (&r.schedule, r.train.steps);
    let uses_min = s.kind != ScheduleKind::Constant;
    if uses_min && s.min_lr > s.lr {
        problem("schedule.min_lr", format!("`schedule.min_lr` ({:?}) is above `schedule.lr` ({:?})", s.min_lr, s.lr));
    }
    if !uses_min && values.given("schedule.min_lr").is_some() && s.min_lr != s.lr {
        warnings.push("schedule.min_lr has no effect: schedule.kind is \"constant\"".into());
    }
    let decay_given = values.given("schedule.decay_steps").is_some();
    if s.kind == ScheduleKind::Wsd && !decay_given {
        let text = "the key `schedule.decay_steps` is missing: the schedule \"wsd\" needs to know how long it decays";
        problem("schedule.decay_steps", text.into());
    }
    if s.kind != ScheduleKind::Wsd && decay_given && s.decay_steps > 0 {
        warnings.push("schedule.decay_steps has no effect: schedule.kind is not \"wsd\"".into());
    }
    if s.warmup_steps > steps {
        warnings.push(format!(
            "schedule.warmup_steps ({}) is longer than the run ({steps} steps): the learning rate never reaches schedule.lr",
            s.warmup_steps
        ));
    } else if s.kind == ScheduleKind::Wsd && s.decay_steps > steps - s.warmup_steps {
        warnings.push(format!(
            "schedule.decay_steps ({}) is longer than what the warm-up leaves ({} of {steps} steps): the decay begins right after the warm-up",
            s.decay_steps,
            steps - s.warmup_steps
        ));
    }
}

//! "Did you mean": which key a misspelt or misplaced one was meant to be.

use super::schema::{self, KEYS};

/// Names from other trainers and their place here.
const ELSEWHERE: [(&str, &[&str]); 38] = [
    ("learning_rate", &["schedule.lr"]),
    ("max_lr", &["schedule.lr"]),
    ("peak_lr", &["schedule.lr"]),
    ("warmup", &["schedule.warmup_steps"]),
    ("scheduler", &["schedule.kind"]),
    ("batch_size", &["train.global_batch_tokens", "train.micro_batch"]),
    ("global_batch_size", &["train.global_batch_tokens"]),
    ("micro_batch_size", &["train.micro_batch"]),
    ("sequence_length", &["train.seq_len"]),
    ("max_seq_len", &["train.seq_len"]),
    ("seq_length", &["train.seq_len"]),
    ("context_length", &["train.seq_len", "model.max_position_embeddings"]),
    ("block_size", &["train.seq_len"]),
    ("max_steps", &["train.steps"]),
    ("train_iters", &["train.steps"]),
    ("dtype", &["train.precision"]),
    ("output_dir", &["run.dir"]),
    ("save_every", &["checkpoint.every"]),
    ("save_interval", &["checkpoint.every"]),
    ("eval_interval", &["eval.every"]),
    ("num_layers", &["model.num_blocks"]),
    ("num_hidden_layers", &["model.num_blocks"]),
    ("n_layer", &["model.num_blocks"]),
    ("num_attention_heads", &["model.num_query_heads"]),
    ("num_key_value_heads", &["model.num_kv_heads"]),
    ("moe_intermediate_size", &["model.expert_width"]),
    ("intermediate_size", &["model.expert_width"]),
    ("router_hidden_size", &["model.router_width"]),
    ("rms_norm_eps", &["model.norm_eps"]),
    ("layer_types", &["model.attention"]),
    ("weight_decay", &["optimizer.muon_weight_decay", "optimizer.adam_weight_decay"]),
    ("momentum", &["optimizer.muon_momentum"]),
    ("betas", &["optimizer.adam_betas", "router.balance_betas"]),
    ("grad_clip", &["optimizer.clip"]),
    ("clip_grad", &["optimizer.clip"]),
    ("max_grad_norm", &["optimizer.clip"]),
    ("datasets", &["data.sources"]),
    ("model_name", &["model.preset"]),
];

fn close(a: &str, b: &str) -> Option<usize> {
    let d = strsim::damerau_levenshtein(a, b);
    (d <= 1 + a.chars().count().max(b.chars().count()) / 4).then_some(d)
}

/// Patterns of the keys and tables that `name`, unknown below the table `parent`, may have been meant to be: the best
/// guesses only, best first.
pub fn guesses(parent: &str, name: &str) -> Vec<String> {
    let join = |table: &str, name: &str| if table.is_empty() { name.to_string() } else { format!("{table}.{name}") };
    let mut out: Vec<(usize, String)> = Vec::new();
    let mut add = |distance: usize, path: String| match out.iter_mut().find(|(_, p)| *p == path) {
        Some((d, _)) => *d = distance.min(*d),
        None => out.push((distance, path)),
    };
    // A neighbour with nearly this name.
    for child in schema::children(parent).into_iter().filter(|c| *c != "*") {
        if let Some(d) = close(name, child) {
            add(2 * d, join(parent, child));
        }
    }
    // The right name in the wrong table; stages repeat keys of other tables and are meant only inside a stage.
    let elsewhere = || KEYS.iter().filter(|k| parent.starts_with("stages") || !k.path.starts_with("stages."));
    for key in elsewhere() {
        let (table, leaf) = key.path.rsplit_once('.').unwrap_or(("", key.path));
        if leaf == name {
            add(1, key.path.to_string());
        } else if let Some(d) = close(name, leaf).filter(|d| *d <= 2) {
            add(2 * d + 3, key.path.to_string());
        } else if close(&join(parent, name).replace('.', "_"), &key.path.replace('.', "_")).is_some_and(|d| d <= 2) {
            add(3, key.path.to_string());
        }
        // A table that was put inside another table.
        for (i, _) in table.match_indices('.').chain([(table.len(), "")]) {
            if table[..i].rsplit('.').next() == Some(name) {
                add(1, table[..i].trim_end_matches(".*").to_string());
            }
        }
    }
    for (theirs, ours) in ELSEWHERE {
        if theirs == name {
            ours.iter().for_each(|path| add(1, path.to_string()));
        }
    }
    out.sort();
    let best = out.first().map_or(0, |(d, _)| *d);
    out.into_iter().filter(|(d, _)| *d <= best + 1).take(4).map(|(_, p)| p).collect()
}

/// " (did you mean `a`, `b` or `c`?)", or "".
pub fn sentence(paths: &[String]) -> String {
    match paths {
        [] => String::new(),
        [one] => format!(" (did you mean `{one}`?)"),
        [first @ .., last] => {
            let first = first.iter().map(|p| format!("`{p}`")).collect::<Vec<_>>().join(", ");
            format!(" (did you mean {first} or `{last}`?)")
        }
    }
}

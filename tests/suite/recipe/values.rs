//! Wrong types, units and numbers; impossible and surprising combinations.

use super::*;

#[test]
fn wrong_types_units_and_numbers_name_line_key_and_what_was_expected() {
    for (table, line, key, words) in [
        ("train", "seq_len = \"256\"", "train.seq_len", "" /* legal: a number of tokens as text */),
        ("train", "seq_len = 256.0", "train.seq_len", "write 256"),
        ("train", "seq_len = \"32K\"", "train.seq_len", "\"32Ki\""),
        ("train", "seq_len = \"30m\"", "train.seq_len", "`m` is no unit of tokens"),
        ("train", "seq_len = 0", "train.seq_len", "at least 1"),
        ("train", "seq_len = -1", "train.seq_len", "the integer -1"),
        ("train", "seq_len = 99999999999", "train.seq_len", "at least 1"),
        ("train", "seq_len = true", "train.seq_len", "the boolean true"),
        ("train", "seq_len = [256]", "train.seq_len", "an array"),
        ("train", "seq_len = { tokens = 256 }", "train.seq_len", "a table"),
        ("train", "seq_len = 2026-01-01", "train.seq_len", "date"),
        ("train", "steps = \"20\"", "train.steps", "remove the quotes"),
        ("train", "steps = \"20K\"", "train.steps", "expected an integer"),
        ("train", "steps = 2.5", "train.steps", "the decimal number 2.5"),
        ("train", "steps = 1e3", "train.steps", "write 1000"),
        ("train", "steps = 0", "train.steps", "at least 1"),
        ("train", "steps = nan", "train.steps", "NaN"),
        ("train", "micro_batch = -2", "train.micro_batch", "the integer -2"),
        ("train", "global_batch_tokens = \"8X\"", "train.global_batch_tokens", "`X` is no unit of tokens"),
        ("train", "global_batch_tokens = \"8t\"", "train.global_batch_tokens", "`t` is no unit of tokens"),
        ("train", "global_batch_tokens = 8e3", "train.global_batch_tokens", "write 8000"),
        ("train", "global_batch_tokens = \"0.3\"", "train.global_batch_tokens", "whole number"),
        ("train", "global_batch_tokens = \"99999999T\"", "train.global_batch_tokens", "9.2e18"),
        ("train", "precision = \"fp32\"", "train.precision", "did you mean `f32`"),
        ("train", "precision = 32", "train.precision", "\"f32\" or \"bf16\""),
        ("train", "threads = 0", "train.threads", "from 1"),
        ("train", "peak_flops = 0", "train.peak_flops", "above 0"),
        ("train", "peak_flops = inf", "train.peak_flops", "above 0"),
        ("schedule", "lr = \"1e-3\"", "schedule.lr", "remove the quotes"),
        ("schedule", "lr = nan", "schedule.lr", "above 0"),
        ("schedule", "lr = -inf", "schedule.lr", "above 0"),
        ("schedule", "lr = 0.0", "schedule.lr", "above 0"),
        ("schedule", "lr = -1e-3", "schedule.lr", "above 0"),
        ("schedule", "min_lr = -1", "schedule.min_lr", "at least 0"),
        ("schedule", "kind = \"cosin\"", "schedule.kind", "did you mean `cosine`"),
        ("schedule", "warmup_tokens = \"5s\"", "schedule.warmup_tokens", "`s` is no unit of tokens"),
        ("run", "time_limit = 30", "run.time_limit", "\"30s\""),
        ("run", "time_limit = \"30\"", "run.time_limit", "without a unit"),
        ("run", "time_limit = \"8T\"", "run.time_limit", "`T` is no unit of time"),
        ("run", "time_limit = 07:30:00", "run.time_limit", "duration"),
        ("run", "seed = -1", "run.seed", "at least 0"),
        ("run", "dir = 5", "run.dir", "a path"),
        ("run", "dir = \"\"", "run.dir", "empty"),
        ("run", "dir = \"~/runs\"", "run.dir", "`~` is not expanded"),
        ("model", "preset = \"zaya1\"", "model.preset", "\"zaya1-base\""),
        ("model", "preset = \"zaya1-bas\"", "model.preset", "did you mean `zaya1-base`"),
        ("model", "attention = \"sliding window\"", "model.attention", "\"full\" or \"sliding\""),
        ("model", "attention = [\"full\", 1]", "model.attention", "the integer 1"),
        ("model", "sliding_window = 0", "model.sliding_window", "or \"none\""),
        ("model", "pad_token_id = -1", "model.pad_token_id", "the integer -1"),
        ("model", "partial_rotary_factor = 1.5", "model.partial_rotary_factor", "from 0 to 1"),
        ("model", "norm_eps = 0", "model.norm_eps", "above 0"),
        ("optimizer", "adam_betas = [0.9]", "optimizer.adam_betas", "1 entries"),
        ("optimizer", "adam_betas = [0.9, 1.0]", "optimizer.adam_betas", "second entry"),
        ("optimizer", "adam_betas = 0.9", "optimizer.adam_betas", "array of two numbers"),
        ("optimizer", "muon_momentum = 1", "optimizer.muon_momentum", "below 1"),
        ("optimizer", "ns_steps = 0", "optimizer.ns_steps", "from 1"),
        ("optimizer", "clip = -1", "optimizer.clip", "at least 0"),
        ("optimizer", "muon_split_gate_up = \"true\"", "optimizer.muon_split_gate_up", "remove the quotes"),
        ("optimizer", "muon_split_gate_up = 1", "optimizer.muon_split_gate_up", "true or false"),
        ("checkpoint", "every = 0", "checkpoint.every", "at least 1"),
        ("eval", "every = 0", "eval.every", "at least 1"),
        ("data.sources", "weight = -1", "data.sources.0.weight", "at least 0"),
        ("data.sources", "weight = nan", "data.sources.0.weight", "at least 0"),
        ("data.sources", "path = []", "data.sources.0.path", "array of paths"),
        ("data.sources", "path = [\"a\", 7]", "data.sources.0.path", "the integer 7"),
        ("data.sources", "name = \" \"", "data.sources.0.name", "text"),
    ] {
        let (text, number) = small_with(table, line);
        if words.is_empty() {
            load(&text, &[]).unwrap();
            continue;
        }
        let error = refusal(&text, &[]);
        let said = error.lines().find(|l| l.contains(&format!("`{key}`"))).unwrap_or_else(|| panic!("{line}:\n{error}"));
        assert!(said.contains(&format!("r.toml:{number}:1: ")), "{line}:\n{error}");
        assert!(said.to_lowercase().contains(&words.to_lowercase()), "{line}: expected `{words}` in\n{error}");
        assert!(error.contains(&format!("line {number} | {line}")), "{line}:\n{error}");
    }
}

#[test]
fn tables_and_arrays_of_tables_are_told_apart() {
    let error = refusal(&SMALL.replace("[[data.sources]]", "[data.sources]"), &[]);
    assert!(error.contains("r.toml:5:1: `data.sources` is an array of tables: expected one line [[data.sources]]"), "{error}");
    assert!(!error.contains("problems"), "{error}");
    let error = refusal(&SMALL.replace("[train]", "[[train]]"), &[]);
    assert!(error.contains("r.toml:7:1: `train` is a table: expected a line [train]"), "{error}");
    assert!(!error.contains("problems"), "{error}");
    let error = refusal(&SMALL.replace("[[data.sources]]\npath = \"shards/train\"", "[data]\nsources = [3]"), &[]);
    assert!(error.contains("`data.sources.0`: each entry of `data.sources` is a table"), "{error}");
}

/// A path, or an array of paths, in place of an array of tables.
#[test]
fn data_may_be_written_short() {
    let long = load(SMALL, &[]).unwrap();
    for short in ["sources = \"shards/train\"", "sources = [\"shards/train\"]", "sources = [{ path = \"shards/train\" }]"] {
        let text = SMALL.replace("[[data.sources]]\npath = \"shards/train\"", &format!("[data]\n{short}\nvalidation = \"v\""));
        let r = load(&text, &[]).unwrap();
        let names = |r: &Recipe| r.data.sources.iter().map(|s| (s.name.clone(), s.weight)).collect::<Vec<_>>();
        assert_eq!(names(&r), names(&long), "{short}");
        assert!(r.data.sources[0].shards[0].ends_with("shards/train") && r.data.validation[0].shards[0].ends_with("v"));
    }
    let r = load(SMALL, &["data.sources=[\"a\", \"b\"]", "data.sources.1.weight=3"]).unwrap();
    assert_eq!(r.data.sources.iter().map(|s| s.weight).collect::<Vec<_>>(), [1.0, 3.0]);
}

/// What another program may leave out has a default.
#[test]
fn the_schedule_has_a_default() {
    let schedule = SMALL.find("[schedule]").expect("SMALL has a schedule");
    let end = SMALL[schedule + 1..].find("\n[").map_or(SMALL.len(), |at| schedule + 1 + at);
    let r = load(&format!("{}{}", &SMALL[..schedule], &SMALL[end..]), &[]).unwrap();
    assert_eq!((r.schedule.lr, r.schedule.min_lr, r.schedule.warmup_steps), (6e-4, 0.0, 0));
}

#[test]
fn all_problems_are_told_at_once_in_the_order_of_the_file() {
    let text = "[run]\nsed = 1\n[model]\npreset = \"nothing\"\n[train]\nsteps = \"x\"\nseq_len = 64\n";
    let error = refusal(text, &["optimizer.clip=nan"]);
    let at = |words: &str| error.find(words).unwrap_or_else(|| panic!("no `{words}` in\n{error}"));
    let order = [
        at("the key `run.dir` is missing"),
        at("unknown key `run.sed`"),
        at("`model.preset`: expected"),
        at("the key `train.global_batch_tokens` is missing"),
        at("`train.steps`: expected"),
        at("--set optimizer.clip=nan: `optimizer.clip`"),
    ];
    assert!(order.is_sorted(), "{error}");
    assert!(error.contains("no data: at least one [[data.sources]]"), "{error}");
    assert!(error.contains("has 7 problems"), "{error}");
}

#[test]
fn impossible_combinations_name_key_and_line() {
    for (table, line, words) in [
        (
            "train",
            "global_batch_tokens = 2000",
            "`train.micro_batch` * `train.seq_len` (2 * 256 = 512): the nearest are 1536 and 2048",
        ),
        ("train", "global_batch_tokens = 100", "the smallest is 512"),
        ("train", "micro_batch = 3", "must be a multiple"),
        ("train", "seq_len = 2048", "longer than the model's `model.max_position_embeddings` (1024)"),
        ("train", "steps = 9223372036854775807", "more tokens than can be counted"),
        ("model", "num_query_heads = 5", "multiple of num_kv_heads"),
        ("model", "head_dim = 33", "an odd number"),
        ("model", "head_dim = 30", "an odd number"),
        ("model", "partial_rotary_factor = 0.03", ""),
        ("model", "partial_rotary_factor = 0.1", "an odd number"),
        ("model", "attention = \"sliding\"", "sliding_window must be at least 1"),
        ("model", "attention = [\"full\"]", ""),
        ("model", "pad_token_id = 4096", "vocab_size is 2048"),
        ("model", "num_blocks = 4096", ""),
        ("model", "vocab_size = 2000000000", ""),
        ("model", "num_experts = 65536", ""),
        ("schedule", "min_lr = 1", "above `schedule.lr`"),
        ("schedule", "kind = \"wsd\"", "`schedule.decay_steps` is missing"),
        ("data.sources", "weight = 0", "no source would be read"),
        ("eval", "every = 5", "no [[data.validation]]"),
        ("eval", "tokens = 255", "less than one sequence"),
        ("checkpoint", "keep_every = 1001", "multiple of `checkpoint.every`"),
    ] {
        let (text, number) = small_with(table, line);
        if words.is_empty() {
            load(&text, &[]).unwrap();
            continue;
        }
        let error = refusal(&text, &[]);
        assert!(error.contains(words), "{line}: expected `{words}` in\n{error}");
        let keys_elsewhere = ["micro_batch = 3", "kind = \"wsd\""];
        if !keys_elsewhere.iter().any(|k| line.starts_with(k)) {
            assert!(error.contains(&format!("r.toml:{number}:1: ")), "{line}:\n{error}");
        }
    }
    let error = refusal(SMALL, &["model.num_experts=65536", "model.num_blocks=4096"]);
    assert!(error.contains("at most 2097152 are possible"), "{error}");
    let error = refusal(SMALL, &["model.hidden_size=16777216", "model.expert_width=16777216", "model.num_experts=999"]);
    assert!(error.contains("parameters; at most"), "{error}");
    let error = refusal(SMALL, &["model.attention=[\"full\", \"full\"]", "model.num_blocks=3"]);
    assert!(error.contains("`model.attention` has 2 entries, but `model.num_blocks` is 3"), "{error}");
    let error = refusal(&SMALL.replace("steps = 20", "tokens = 2047"), &[]);
    assert!(error.contains("is less than one step"), "{error}");
    let error = refusal(&SMALL.replace("preset = \"demo-6m\"", "hidden_size = 64\nnum_blocks = 2"), &[]);
    assert!(error.contains("without `model.preset` it also needs") && error.contains("`model.head_dim`"), "{error}");
    let error = refusal(&format!("{SMALL}[[data.sources]]\npath = \"other/train.bin\"\n"), &[]);
    assert!(error.contains("two entries of `data.sources` are named `train`"), "{error}");
    let error = refusal(&format!("{SMALL}[[data.sources]]\nname = \"b\"\n"), &[]);
    assert!(error.contains("r.toml:14:1: the key `data.sources.1.path` is missing"), "{error}");
}

#[test]
fn surprising_but_legal_things_are_warnings() {
    assert_eq!(load(SMALL, &[]).unwrap().warnings, Vec::<String>::new());
    for (sets, words) in [
        (vec!["schedule.warmup_steps=21"], "longer than the run (20 steps)"),
        (vec!["schedule.kind=wsd", "schedule.warmup_steps=15", "schedule.decay_steps=6"], "longer than what the warm-up leaves"),
        (vec!["schedule.kind=constant", "schedule.min_lr=1e-4"], "schedule.min_lr has no effect"),
        (vec!["schedule.decay_steps=6"], "schedule.decay_steps has no effect"),
        (vec!["router.freeze_tokens=1M"], "the routers never learn"),
        (vec!["data.validation=[{path=\"v\"}]"], "never used"),
    ] {
        let warnings = load(SMALL, &sets).unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].contains(words), "{sets:?}: {warnings:?}");
    }
    assert!(load(SMALL, &["schedule.warmup_steps=20"]).unwrap().warnings.is_empty());
}

#[test]
fn vocabulary_must_hold_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, format!("{SMALL}[tokenizer]\npath = \"tokenizer.json\"\n")).unwrap();
    recipe::load(&path, &[]).unwrap();
    let tokenizer = |id: u32| {
        let json = format!(r#"{{"model":{{"type":"BPE","vocab":{{"a":0,"b":{id}}},"merges":[]}}}}"#);
        std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        recipe::load(&path, &[])
    };
    tokenizer(2047).unwrap();
    let error = format!("{:#}", tokenizer(2048).unwrap_err());
    assert!(error.contains("`model.vocab_size` (2048) is too small") && error.contains("2049 rows"), "{error}");
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    let error = format!("{:#}", recipe::load(&path, &[]).unwrap_err());
    assert!(error.contains("r.toml:15:1: `tokenizer.path`") && error.contains("is not a Hugging Face tokenizer.json"), "{error}");
}

//! Recipes: what is read, what is refused and with which words, what is written back, and the plan of a dry run.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use zaya::error::{BadInput, exit_code};
use zaya::model::config::{AttentionKind, SkipMode};
use zaya::optim::schedule::Schedule;
use zaya::recipe::schema::{self, KEYS};
use zaya::recipe::{self, Balance, Precision, Recipe, ScheduleKind, doc};

const SMALL: &str = r#"[run]
dir = "runs/small"
[model]
preset = "demo-6m"
[[data.sources]]
path = "shards/train"
[train]
steps = 20
global_batch_tokens = 2048
micro_batch = 2
seq_len = 256
[schedule]
lr = 1e-3
"#;

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn shipped() -> Vec<PathBuf> {
    let names = ["demo-cpu", "bench-cpu", "zaya1-base-stage1", "zaya1-base-stage2", "zaya1-base-stage3-32k"];
    names.iter().map(|n| root(&format!("recipes/{n}.toml"))).collect()
}

fn load(text: &str, sets: &[&str]) -> anyhow::Result<Recipe> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, text).unwrap();
    recipe::load(&path, &sets.iter().map(|s| s.to_string()).collect::<Vec<_>>())
}

/// The text of a refusal, which must be the user's to mend.
#[track_caller]
fn refusal(text: &str, sets: &[&str]) -> String {
    let error = load(text, sets).expect_err("must be refused");
    assert!(error.is::<BadInput>(), "not the user's fault? {error:#}");
    format!("{error:#}")
}

/// `SMALL` with `line` in place of the line that begins with the same key, or below `table`. Returns the line's number.
fn small_with(table: &str, line: &str) -> (String, usize) {
    let mut lines: Vec<String> = SMALL.lines().map(str::to_string).collect();
    let header = |l: &String| l.trim_matches(['[', ']']) == table;
    let at = match lines.iter().position(header) {
        Some(at) => at,
        None => {
            lines.push(format!("[{table}]"));
            lines.len() - 1
        }
    };
    let key = line.split('=').next().unwrap().trim();
    let end = lines[at + 1..].iter().position(|l| l.starts_with('[')).map_or(lines.len(), |i| at + 1 + i);
    let old = (at + 1..end).find(|i| lines[*i].split('=').next().unwrap().trim() == key);
    let place = old.unwrap_or(at + 1);
    if old.is_some() {
        lines[place] = line.to_string();
    } else {
        lines.insert(place, line.to_string());
    }
    (lines.join("\n"), place + 1)
}

/// The same word with one letter changed, for every letter.
fn misspellings(word: &str) -> Vec<String> {
    (0..word.len())
        .filter(|i| word.as_bytes()[*i].is_ascii_lowercase())
        .map(|i| {
            let other = if &word[i..i + 1] == "x" { "q" } else { "x" };
            format!("{}{other}{}", &word[..i], &word[i + 1..])
        })
        .collect()
}

// ---- Spelling -------------------------------------------------------------------------------------------------------

#[test]
fn recipe_every_key_misspelt_is_refused_with_the_right_suggestion() {
    for key in KEYS {
        let (table, leaf) = key.path.rsplit_once('.').unwrap();
        let (header, entry) = match table.strip_suffix(".*") {
            Some(array) => (format!("[[{array}]]"), format!("{array}.0")),
            None => (format!("[{table}]"), table.to_string()),
        };
        for wrong in misspellings(leaf) {
            let error = refusal(&format!("# a recipe\n{header}\n{wrong} = 1\n"), &[]);
            let said = error.lines().find(|l| l.contains(&format!("unknown key `{entry}.{wrong}`"))).unwrap_or_else(|| {
                panic!("{wrong} is not called unknown:\n{error}");
            });
            assert!(said.contains("r.toml:3:1: "), "{said}");
            assert!(said.contains(&format!("`{entry}.{leaf}`")), "{said}");
            assert!(error.contains(&format!("line 3 | {wrong} = 1")), "{error}");
        }
    }
}

#[test]
fn recipe_every_key_misspelt_in_set_is_refused_with_the_right_suggestion() {
    for key in KEYS.iter().filter(|k| !k.path.contains(".*.")) {
        let (table, leaf) = key.path.rsplit_once('.').unwrap();
        for wrong in misspellings(leaf) {
            let error = refusal(SMALL, &[&format!("{table}.{wrong}=1")]);
            assert!(error.contains(&format!("--set {table}.{wrong}=1: unknown key `{table}.{wrong}`")), "{error}");
            assert!(error.contains(&format!("`{}`", key.path)), "{error}");
        }
    }
}

#[test]
fn recipe_shipped_recipes_with_one_wrong_letter_have_exactly_one_problem() {
    for path in shipped() {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let (word, rest) = match line.split_once('=') {
                Some((key, _)) if !line.starts_with('#') => (key.trim(), &line[key.trim().len()..]),
                _ if line.starts_with('[') => (line.trim_matches(['[', ']']), ""),
                _ => continue,
            };
            for wrong in misspellings(word) {
                let header = rest.is_empty();
                let changed = if header { line.replace(word, &wrong) } else { format!("{wrong}{rest}") };
                let mut all = lines.clone();
                all[i] = &changed;
                let error = refusal(&all.join("\n"), &[]);
                assert!(error.contains(&format!(":{}:", i + 1)), "{changed}:\n{error}");
                assert!(error.contains(&format!("line {} | ", i + 1)), "{changed}:\n{error}");
                assert!(error.contains("did you mean `"), "{changed}:\n{error}");
                // [[data.sources]] stands several times: one misspelt leaves the others, all of the rest is one problem.
                assert!(!error.contains("problems; nothing was started"), "{}, {changed}:\n{error}", path.display());
                let meant = word.split('.').zip(wrong.split('.')).find(|(a, b)| a != b).unwrap().0;
                let guess = error.lines().next().unwrap().split("did you mean").nth(1).unwrap();
                assert!(guess.contains(meant), "{changed}:\n{error}");
            }
        }
    }
}

#[test]
fn recipe_misplaced_and_foreign_keys_are_led_home() {
    for (table, line, path) in [
        ("", "seq_len = 256", "train.seq_len"),
        ("", "preset = \"demo-6m\"", "model.preset"),
        ("", "train_seq_len = 1", "train.seq_len"),
        ("run", "steps = 5", "train.steps"),
        ("train", "lr = 1", "schedule.lr"),
        ("train", "warmup_steps = 1", "schedule.warmup_steps"),
        ("train", "learning_rate = 1", "schedule.lr"),
        ("train", "batch_size = 1", "train.global_batch_tokens"),
        ("model", "num_layers = 4", "model.num_blocks"),
        ("model", "num_attention_heads = 4", "model.num_query_heads"),
        ("optimizer", "weight_decay = 0.1", "optimizer.muon_weight_decay"),
        ("schedule", "balance = \"pid\"", "router.balance"),
        ("checkpoint", "freeze_tokens = 5", "router.freeze_tokens"),
        ("data", "path = \"x\"", "data.sources.0.path"),
        ("train", "data = { document_mask = true }", "data"),
        ("train", "stepps = 4", "train.steps"),
        ("train", "glboal_batch_tokens = 4", "train.global_batch_tokens"),
    ] {
        let text = if table.is_empty() { format!("{line}\n{SMALL}") } else { small_with(table, line).0 };
        let error = refusal(&text, &[]);
        assert!(error.contains("unknown ") && error.contains(&format!("`{path}`")), "{table} {line}:\n{error}");
    }
    let error = refusal(&format!("{SMALL}\n[completely.elsewhere]\nzzzzz = 1\n"), &[]);
    assert!(error.contains("unknown table `completely`") && !error.contains("did you mean"), "{error}");
}

// ---- Types, units, numbers ------------------------------------------------------------------------------------------

#[test]
fn recipe_wrong_types_units_and_numbers_name_line_key_and_what_was_expected() {
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
fn recipe_tables_and_arrays_of_tables_are_told_apart() {
    let error = refusal(&SMALL.replace("[[data.sources]]", "[data.sources]"), &[]);
    assert!(error.contains("r.toml:5:1: `data.sources` is an array of tables: expected one line [[data.sources]]"), "{error}");
    assert!(!error.contains("problems"), "{error}");
    let error = refusal(&SMALL.replace("[train]", "[[train]]"), &[]);
    assert!(error.contains("r.toml:7:1: `train` is a table: expected a line [train]"), "{error}");
    assert!(!error.contains("problems"), "{error}");
    let error = refusal(&SMALL.replace("[[data.sources]]\npath = \"shards/train\"", "[data]\nsources = [\"shards/train\"]"), &[]);
    assert!(error.contains("`data.sources.0`: each entry of `data.sources` is a table"), "{error}");
}

#[test]
fn recipe_all_problems_are_told_at_once_in_the_order_of_the_file() {
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
        at("the key `schedule.lr` is missing"),
    ];
    assert!(order.is_sorted(), "{error}");
    assert!(error.contains("no data: at least one [[data.sources]]"), "{error}");
    assert!(error.contains("has 8 problems"), "{error}");
}

// ---- Files ----------------------------------------------------------------------------------------------------------

#[test]
fn recipe_files_that_are_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, bytes: &[u8]| -> String {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = recipe::load(&path, &[]).unwrap_err();
        assert!(error.is::<BadInput>());
        let text = format!("{error:#}");
        assert!(text.contains(name), "{text}");
        text
    };
    assert!(of("latin1.toml", b"[run]\ndir = \"caf\xe9\"\n").contains("not UTF-8 text (line 2, byte 16)"));
    let big = vec![b'#'; (4 << 20) + 1];
    assert!(of("big.toml", &big).contains("larger than 4 MiB"));
    let broken = of("broken.toml", b"[run]\ndir = \"x\n");
    assert!(broken.contains("broken.toml:2:") && broken.contains("not valid TOML"), "{broken}");
    let twice = of("twice.toml", b"[run]\nseed = 1\nseed = 2\n");
    assert!(twice.contains("twice.toml:3:1:") && twice.contains("duplicate key"), "{twice}");
    let twice = of("table.toml", b"[run]\nseed = 1\n[model]\n[run]\n");
    assert!(twice.contains("table.toml:4:") && twice.contains("duplicate key"), "{twice}");
    let overflow = of("float.toml", b"[run]\nseed = 1e999\n");
    assert!(overflow.contains("float.toml:2:8:"), "{overflow}");
    let overflow = of("overflow.toml", b"[run]\nseed = 99999999999999999999\n");
    assert!(overflow.contains("overflow.toml:2:8:"), "{overflow}");
    assert!(of("empty.toml", b"").contains("the key `run.dir` is missing"));
    assert!(of("nul.toml", b"[run]\ndir = \"a\\u0000b\"\n").contains("NUL"));

    let missing = format!("{:#}", recipe::load(&dir.path().join("none.toml"), &[]).unwrap_err());
    assert!(missing.contains("there is no such file") && missing.contains("none.toml"), "{missing}");
    let directory = format!("{:#}", recipe::load(dir.path(), &[]).unwrap_err());
    assert!(directory.contains("it is a directory"), "{directory}");
    // A byte order mark and Windows line ends are no reason to refuse a file.
    let path = dir.path().join("windows.toml");
    std::fs::write(&path, format!("\u{feff}{}", SMALL.replace('\n', "\r\n"))).unwrap();
    recipe::load(&path, &[]).unwrap();
}

// ---- Overrides ------------------------------------------------------------------------------------------------------

#[test]
fn recipe_set_writes_over_the_file() {
    let r = load(
        SMALL,
        &[
            "train.seq_len = 128",
            "schedule.kind=wsd",
            "schedule.decay_steps=3",
            "run.dir=2026-01-01",
            "data.sources.0.weight=2",
            "data.sources.0.name=17",
            "train.steps=5",
            "train.steps=6",
            "optimizer.adam_betas=[0.5, 0.6]",
            "run.time_limit=2h",
            "model.eos_token_id=none",
            "router.freeze_tokens=4K",
        ],
    )
    .unwrap();
    assert_eq!((r.train.seq_len, r.train.steps), (128, 6));
    assert_eq!((r.schedule.kind, r.schedule.decay_steps), (ScheduleKind::Wsd, 3));
    assert!(r.run.dir.ends_with("2026-01-01"));
    assert_eq!((r.data.sources[0].name.as_str(), r.data.sources[0].weight), ("17", 2.0));
    assert_eq!(r.optimizer.adam_betas, [0.5, 0.6]);
    assert_eq!(r.run.time_limit.unwrap().as_secs(), 7200);
    assert_eq!(r.model.eos_token_id, None);
    assert_eq!(r.router.freeze_tokens, 4000);

    let r = load(SMALL, &["data.sources=[{path = \"a\"}, {path = ['b', 'c'], weight = 0}]"]).unwrap();
    assert_eq!(r.data.sources.len(), 2);
    assert_eq!((r.data.sources[1].shards.len(), r.data.sources[1].weight), (2, 0.0));

    // The one of two keys that exclude each other takes the place of the other in the file.
    assert_eq!(load(SMALL, &["train.tokens=20480"]).unwrap().train.steps, 10);
    let tokens = SMALL.replace("steps = 20", "tokens = \"100K\"");
    assert_eq!(load(&tokens, &[]).unwrap().train.steps, 48);
    assert_eq!(load(&tokens, &["train.steps=7"]).unwrap().train.steps, 7);
}

#[test]
fn recipe_set_errors_quote_the_argument() {
    for (set, words) in [
        ("train.seq_lne=5", "did you mean `train.seq_len`"),
        ("seq_len=5", "did you mean `train.seq_len`"),
        ("trian.seq_len=5", "did you mean `train`"),
        ("train.seq_len=abc", "no number of tokens"),
        ("train.seq_len", "expected key.path=value"),
        ("=5", "expected key.path=value"),
        ("train..seq_len=5", "expected key.path=value"),
        ("train.seq_len=", "no value after `=`"),
        ("train.seq_len=[1", "is not a TOML value"),
        ("train.seq_len.x=1", "it is no table"),
        ("data.sources.3.weight=1", "which has 1"),
        ("data.sources.x.weight=1", "which has 1"),
        ("data.sources.0.wieght=1", "did you mean `data.sources.0.weight`"),
        ("data.sources=x", "is an array of tables"),
        ("train=5", "`train` is a table"),
        ("train.seq_len=2048", "max_position_embeddings"),
        ("0=1", "unknown key `0`"),
        ("model.head_dim=10", "an odd number"),
    ] {
        let error = refusal(SMALL, &[set]);
        assert!(error.contains(&format!("--set {set}: ")), "{set}:\n{error}");
        assert!(error.contains(words), "{set}: expected `{words}` in\n{error}");
    }
    let error = refusal(SMALL, &["train.steps=5", "train.tokens=20480"]);
    assert!(error.contains("`train.steps` and `train.tokens` are both given"), "{error}");
}

// ---- Geometry -------------------------------------------------------------------------------------------------------

#[test]
fn recipe_impossible_combinations_name_key_and_line() {
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
        ("model", "pad_token_id = 4096", "vocab_size is 4096"),
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
fn recipe_surprising_but_legal_things_are_warnings() {
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
fn recipe_vocabulary_must_hold_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, format!("{SMALL}[tokenizer]\npath = \"tokenizer.json\"\n")).unwrap();
    recipe::load(&path, &[]).unwrap();
    let tokenizer = |id: u32| {
        let json = format!(r#"{{"model":{{"type":"BPE","vocab":{{"a":0,"b":{id}}},"merges":[]}}}}"#);
        std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        recipe::load(&path, &[])
    };
    tokenizer(4095).unwrap();
    let error = format!("{:#}", tokenizer(4096).unwrap_err());
    assert!(error.contains("`model.vocab_size` (4096) is too small") && error.contains("4097 rows"), "{error}");
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    let error = format!("{:#}", recipe::load(&path, &[]).unwrap_err());
    assert!(error.contains("r.toml:15:1: `tokenizer.path`") && error.contains("is not a Hugging Face tokenizer.json"), "{error}");
}

// ---- Resolved -------------------------------------------------------------------------------------------------------

#[test]
fn recipe_complete_is_resolved_to_the_letter() {
    let r = recipe::load(&root("tests/fixtures/recipe/complete.toml"), &["stages=[]".into()]).unwrap();
    let here = root("tests/fixtures/recipe").canonicalize().unwrap();
    assert_eq!(r.run.dir, here.join("runs/complete"));
    assert_eq!((r.run.seed, r.run.time_limit.unwrap().as_secs()), (7, 5400));
    assert_eq!(r.model.attention, [AttentionKind::Full, AttentionKind::Sliding]);
    assert_eq!((r.model.sliding_window, r.model.skip_mode), (Some(64), SkipMode::Identity));
    assert_eq!((r.model.rope.theta, r.model.rope_sliding.theta), (20_000.0, 500.0));
    assert_eq!((r.model.rope.partial_rotary_factor, r.model.rope_sliding.partial_rotary_factor), (0.25, 1.0));
    assert_eq!((r.model.pad_token_id, r.model.bos_token_id, r.model.eos_token_id), (Some(3), Some(4), None));
    assert_eq!(r.data.sources[0].shards, [here.join("shards/web-1"), here.join("shards/web-2")]);
    assert_eq!(r.data.sources[1].shards, [here.parent().unwrap().join("elsewhere/code")]);
    assert_eq!((r.train.precision, r.router.balance), (Precision::Bf16, Balance::Pid));
    assert_eq!((r.train.sequences_per_step(), r.train.micro_batches_per_step(), r.train.total_tokens()), (16, 4, 61_440));
    assert_eq!(r.router.freeze_tokens, 4096);
    let (s, b) = (&r.schedule, &r.router.balance_betas);
    assert_eq!((s.kind, s.lr, s.min_lr, s.warmup_steps, s.decay_steps), (ScheduleKind::Wsd, 1e-2, 1e-5, 4, 10));
    assert_eq!(b, &[0.5, 0.6]);
}

#[test]
fn recipe_resolved_toml_holds_every_key_and_reads_back_equal() {
    let mut paths = shipped();
    paths.push(root("tests/fixtures/recipe/complete.toml"));
    let dir = tempfile::tempdir().unwrap();
    for path in &paths {
        let first = recipe::load(path, &[]).unwrap();
        let text = first.to_toml();
        let copy = dir.path().join("resolved.toml");
        std::fs::write(&copy, &text).unwrap();
        let second = recipe::load(&copy, &[]).unwrap();
        assert_eq!(first, second, "{}", path.display());
        let plain = |mut r: Recipe| {
            r.warnings.clear();
            format!("{r:?}")
        };
        assert_eq!(plain(first), plain(second.clone()), "{}", path.display());
        assert_eq!(second.to_toml(), text);
    }
    // The last recipe names every key, so its resolved form does too (tokens having become steps).
    let document: toml_edit::DocumentMut = std::fs::read_to_string(dir.path().join("resolved.toml")).unwrap().parse().unwrap();
    for key in KEYS
        .iter()
        .filter(|k| !["tokens", "warmup_tokens"].contains(&k.path.rsplit('.').next().unwrap()) || k.path == "eval.tokens")
    {
        let mut item = document.as_item();
        for part in key.path.split('.') {
            item = match part {
                "*" => item.as_array_of_tables().map(|_| item.get(0).unwrap()).unwrap(),
                name => item.get(name).unwrap_or_else(|| panic!("{} is not in the resolved recipe", key.path)),
            };
        }
    }
}

#[test]
fn recipe_defaults_of_the_schema_are_values_of_their_keys() {
    for key in KEYS {
        if let schema::Default::Value(text) = key.default {
            let (table, leaf) = key.path.rsplit_once('.').unwrap();
            let (table, array) = (table.trim_end_matches(".*"), key.path.contains('*'));
            if array {
                continue; // `weight`, whose default the small recipe relies on
            }
            let (with, _) = small_with(table, &format!("{leaf} = {text}"));
            let (a, b) = (load(&with, &[]).unwrap(), load(SMALL, &[]).unwrap());
            let strip = |mut r: Recipe| {
                r.run.dir = PathBuf::new();
                r.data.sources.clear();
                if key.path == "train.micro_batch" {
                    r.train.micro_batch = 0;
                }
                r
            };
            assert_eq!(strip(a), strip(b), "{}", key.path);
        }
    }
    assert_eq!(load(SMALL, &[]).unwrap().data.sources[0].weight, 1.0);
}

/// The learning rates of a run that is stopped and resumed anywhere: each piece reads the recipe that the one before wrote
/// into the run's directory, and knows only how many steps are done.
#[test]
fn recipe_pieces_of_a_run_have_the_learning_rates_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let written = dir.path().join("recipe.toml");
    for kind in ["cosine", "linear", "constant", "wsd"] {
        let kind = format!("schedule.kind={kind}");
        let sets = [&kind, "schedule.lr=0.0007", "schedule.min_lr=1.3e-5", "schedule.warmup_steps=3", "schedule.decay_steps=5"];
        let mut recipe = load(SMALL, &sets).unwrap();
        let whole: Vec<u64> = (0..20).map(|t| Schedule::of(&recipe).lr_at(t).to_bits()).collect();
        let mut pieces = Vec::new();
        for start in [0, 1, 3, 4, 11, 19] {
            std::fs::write(&written, recipe.to_toml()).unwrap();
            recipe = recipe::load(&written, &[]).unwrap();
            pieces.truncate(start as usize);
            pieces.extend((start..20).map(|t| Schedule::of(&recipe).lr_at(t).to_bits()));
            assert_eq!(pieces, whole, "{kind}");
        }
        assert!(whole.windows(2).filter(|w| w[0] != w[1]).count() >= 2, "{kind}");
    }
}

// ---- Resuming -------------------------------------------------------------------------------------------------------

#[test]
fn recipe_resume_tells_what_changed_and_what_may_not() {
    let path = root("tests/fixtures/recipe/complete.toml");
    let with = |sets: &[&str]| {
        let mut all = vec!["stages=[]".to_string()];
        all.extend(sets.iter().map(|s| s.to_string()));
        recipe::load(&path, &all).unwrap()
    };
    let old = with(&[]);
    assert_eq!(old.resume_differences(&old), recipe::ResumeDifferences::default());
    for (sets, allowed) in [
        (&["train.steps=60"][..], true),
        (&["train.micro_batch=8"], true),
        (&["train.threads=1"], true),
        (&["checkpoint.every=10"], true),
        (&["eval.every=3"], true),
        (&["metrics.every=9"], true),
        (&["schedule.lr=5e-3"], true),
        (&["optimizer.clip=2"], true),
        (&["run.dir=/somewhere/else"], true),
        (&["tokenizer.path=/somewhere/else/tokenizer.json"], true),
        (&["data.sources.1.path=/somewhere/else/code"], true),
        (&["data.validation.0.path=other"], true),
        (&["run.seed=8"], false),
        (&["train.seq_len=64"], false),
        (&["train.global_batch_tokens=4096"], false),
        (&["train.precision=f32"], false),
        (&["model.hidden_size=80"], false),
        (&["model.rope_theta=1e6"], false),
        (&["tokenizer.path=other.json"], false),
        (&["data.sources.1.path=shards/other"], false),
        (&["data.sources.1.weight=1"], false),
        (&["data.sources=[{path=\"shards/web-1\"}]"], false),
        (&["data.document_mask=false"], false),
        (&["router.balance=sign"], false),
    ] {
        let new = with(sets);
        let d = new.resume_differences(&old);
        let key = sets[0].split('=').next().unwrap();
        assert_eq!(d.refused.is_empty(), allowed, "{sets:?}: {d:?}");
        assert!(d.allowed.iter().chain(&d.refused).any(|s| s.contains(&format!("`{key}"))), "{sets:?}: {d:?}");
        if allowed {
            assert_eq!(d.allowed.len(), 1, "{sets:?}: {d:?}");
            assert!(d.allowed[0].contains(" was ") && d.allowed[0].contains(" and is now "), "{d:?}");
        }
    }
    // A key that is no longer given is a change as well.
    let fewer = with(&["data.sources=[{name=\"web\", path=[\"shards/web-1\", \"shards/web-2\"], weight=3}]"]);
    let d = fewer.resume_differences(&old);
    assert!(d.refused.iter().any(|s| s.contains("`data.sources.1.path`") && s.contains("is now not given")), "{d:?}");
}

// ---- Stages ---------------------------------------------------------------------------------------------------------

const STAGES: &str = r#"
[[data.sources]]
name = "code"
path = "shards/code"
[[stages]]
name = "first"
lr = 2e-3
[[stages]]
name = "long"
tokens = 40960
seq_len = 512
rope_theta = 1e6
kind = "constant"
weights = { train = 0.2, code = 0.8 }
"#;

#[test]
fn recipe_stages_say_what_differs() {
    let text = format!("{SMALL}{STAGES}");
    let r = load(&text, &[]).unwrap();
    assert_eq!(r.num_stages(), 2);
    let (first, long) = (r.stage(0).unwrap(), r.stage(1).unwrap());
    assert_eq!((r.train.steps, r.schedule.lr), (20, 2e-3), "the recipe itself describes its first stage");
    assert_eq!((first.train.steps, first.train.seq_len, first.schedule.lr), (20, 256, 2e-3));
    assert_eq!((long.train.steps, long.train.seq_len, long.schedule.lr), (20, 512, 1e-3));
    assert_eq!((long.model.rope.theta, long.schedule.kind), (1e6, ScheduleKind::Constant));
    let weights = |r: &Recipe| r.data.sources.iter().map(|s| s.weight).collect::<Vec<_>>();
    assert_eq!((weights(&first), weights(&long)), (vec![1.0, 1.0], vec![0.2, 0.8]));
    assert!(r.stage(2).is_none() && load(SMALL, &[]).unwrap().stage(0).is_some());

    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("resolved.toml");
    std::fs::write(&copy, r.to_toml()).unwrap();
    assert_eq!(recipe::load(&copy, &[]).unwrap(), r);

    for (old, new, words) in [
        ("code = 0.8", "cod = 0.8", "did you mean `code`"),
        (", code = 0.8", "", "leaves out `code`"),
        ("code = 0.8", "code = \"0.8\"", "`code` is the text"),
        ("seq_len = 512", "seq_len = 300", "stage `long`: `train.global_batch_tokens`"),
        ("seq_len = 512", "seq_len = 4096", "stage `long`: `train.seq_len` (4096) is longer"),
        ("name = \"long\"", "name = \"first\"", "two stages are named `first`"),
        ("tokens = 40960", "tokens = 40960\nsteps = 3", "`stages.1.steps` and `stages.1.tokens` are both given"),
        ("name = \"long\"\n", "", "the key `stages.1.name` is missing"),
        ("rope_theta = 1e6", "rope_thta = 1e6", "did you mean `stages.1.rope_theta`"),
    ] {
        assert!(text.contains(old));
        let error = refusal(&text.replacen(old, new, 1), &[]);
        assert!(error.contains(words), "{new}: expected `{words}` in\n{error}");
    }
    // What is wrong in all stages is told once, as no stage's fault.
    let error = refusal(&text, &["model.head_dim=10"]);
    assert!(!error.contains("stage `") && !error.contains("problems"), "{error}");
    // The length may be the stages' own affair.
    load(&text.replacen("steps = 20\n", "", 1).replacen("lr = 2e-3", "steps = 4", 1), &[]).unwrap();
    let error = refusal(&text.replacen("steps = 20\n", "", 1), &[]);
    assert!(error.contains("the length of the run is missing"), "{error}");
}

// ---- The command ----------------------------------------------------------------------------------------------------

fn pretrain(args: &[&str]) -> (Output, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_zaya")).arg("pretrain").args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

fn dry_run(path: &Path, more: &[&str]) -> (Output, String, String) {
    let mut args = vec!["--recipe", path.to_str().unwrap(), "--dry-run"];
    args.extend(more);
    pretrain(&args)
}

/// The number in the line that begins with `name`.
fn number(report: &str, name: &str) -> u64 {
    let report = &report[report.find("# Parameters").unwrap_or(0)..];
    let line = report.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no line `{name}` in\n{report}"));
    line[name.len()..].split_whitespace().next().unwrap().replace(',', "").parse().unwrap()
}

#[test]
fn recipe_dry_run_of_zaya1_base_counts_the_published_parameters() {
    for (stage, steps) in [("stage1", 476_837), ("stage2", 238_418), ("stage3-32k", 71_525)] {
        let (output, out, _) = dry_run(&root(&format!("recipes/zaya1-base-{stage}.toml")), &[]);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(number(&out, "total parameters"), 8_840_488_784);
        assert_eq!(number(&out, "active per token, without the embedding"), 753_608_528);
        assert_eq!(number(&out, "active per token, with the tied head"), 1_290_741_584);
        assert_eq!(number(&out, "experts"), 8_053_063_680);
        assert_eq!(number(&out, "tokens per step"), 16_777_216);
        assert_eq!(number(&out, "steps"), steps);
        // 6 * 1,290,741,584 + 6 * 40 blocks * S * 1,024 channels of queries; the reports say about 8.75e9 at 4K.
        let seq_len: u64 = if stage == "stage3-32k" { 32_768 } else { 4096 };
        let flops = 6 * 1_290_741_584 + 6 * 40 * seq_len * 1024;
        let line = out.lines().find(|l| l.starts_with("FLOPs per token")).unwrap();
        assert!(line.ends_with(&format!(" {flops}")), "{line}");
        assert!(out.contains("MISSING") && out.contains("tokenizer.json"), "{out}");
    }
}

#[test]
fn recipe_dry_run_marks_missing_files_and_a_start_refuses_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    let validation = "[[data.validation]]\npath = \"shards/valid\"\n[eval]\nevery = 10\n[tokenizer]\npath = \"t.json\"\n";
    std::fs::write(&path, format!("{SMALL}{validation}")).unwrap();
    let here = dir.path().canonicalize().unwrap();
    let (output, out, err) = dry_run(&path, &["--set", "schedule.warmup_steps=99"]);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let files = ["shards/train.bin", "shards/train.idx", "shards/valid.bin", "shards/valid.idx", "t.json"];
    for file in files {
        assert!(out.contains(&format!("MISSING {}", here.join(file).display())), "{out}");
    }
    assert!(err.contains("warning: schedule.warmup_steps (99) is longer than the run (20 steps)"), "{err}");

    let (output, _, err) = pretrain(&["--recipe", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(exit_code::BAD_INPUT as i32), "{err}");
    assert!(err.contains("5 files that the recipe names are not there") && err.contains("train.bin"), "{err}");

    // With shards in place the sources have sizes and epochs.
    std::fs::create_dir(dir.path().join("shards")).unwrap();
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    idx.push(8);
    idx.extend([0; 16]);
    std::fs::write(here.join("shards/train.idx"), &idx).unwrap();
    std::fs::write(here.join("shards/train.bin"), vec![0; 2 * 20_480]).unwrap();
    let (_, out, _) = dry_run(&path, &[]);
    assert!(out.contains("holds 20,480 tokens: 2.00 epochs"), "{out}");
    assert!(!out.contains("MISSING") || !out.contains("train.bin"), "{out}");
}

#[test]
fn recipe_dry_run_prints_a_recipe_that_is_one() {
    let demo = root("recipes/demo-cpu.toml");
    let (_, out, _) = dry_run(&demo, &["--threads", "2", "--time-limit", "1h", "--set", "train.steps=7"]);
    let start = out.find("[run]").unwrap();
    let end = out.find("# Parameters").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.toml");
    std::fs::write(&copy, &out[start..end]).unwrap();
    let r = recipe::load(&copy, &[]).unwrap();
    let sets = ["train.steps=7", "train.threads=2", "run.time_limit=1h"].map(String::from);
    assert_eq!(r, recipe::load(&demo, &sets).unwrap());
}

#[test]
fn recipe_bad_recipes_and_arguments_exit_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, SMALL.replace("seq_len", "seq_lenn")).unwrap();
    let (output, out, err) = dry_run(&path, &[]);
    assert_eq!((output.status.code(), out.as_str()), (Some(2), ""));
    assert!(err.contains("r.toml:11:1: unknown key `train.seq_lenn` (did you mean `train.seq_len`?)"), "{err}");
    std::fs::write(&path, SMALL).unwrap();
    for args in [["--threads", "0"], ["--time-limit", "30"], ["--init-from", "dir"], ["--stop-at", "-1"], ["--backend", "gpu"]] {
        assert_eq!(dry_run(&path, &args).0.status.code(), Some(2), "{args:?}");
    }
    // Several stages are planned, and not yet trained.
    std::fs::write(&path, format!("{SMALL}{STAGES}")).unwrap();
    let (output, out, _) = dry_run(&path, &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(out.contains("# Stage 2 of 2: long") && out.contains("# All stages"), "{out}");
    assert_eq!(number(out.split("# All stages").nth(1).unwrap(), "tokens"), 81_920);
}

// ---- Documentation --------------------------------------------------------------------------------------------------

/// `docs/RECIPE.md` with the part between two marks replaced.
fn with_part(text: &str, name: &str, part: &str) -> String {
    let start = text.find(&format!("<!-- {name}:")).unwrap();
    let start = start + text[start..].find("-->").unwrap() + 3;
    let end = text.find(&format!("<!-- end {name} -->")).unwrap();
    format!("{}\n\n{part}\n\n{}", &text[..start], &text[end..])
}

#[test]
fn recipe_doc_is_the_schemas() {
    let path = root("docs/RECIPE.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let expected = with_part(&with_part(&text, "keys", &doc::keys_markdown()), "resume", &doc::resume_markdown());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    } else {
        assert!(text == expected, "docs/RECIPE.md is out of date: UPDATE_DOCS=1 cargo test --release recipe_doc");
    }
    for key in KEYS {
        let leaf = key.path.rsplit('.').next().unwrap();
        assert!(expected.contains(&format!("| `{leaf}` |")), "{} is not documented", key.path);
        assert!(expected.contains(&format!("| `{}` |", key.path.replace(".*.", "[]."))), "{}: no rule of resuming", key.path);
    }
    // The short recipe of the introduction is one.
    let short = text.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    load(short, &[]).unwrap();
}

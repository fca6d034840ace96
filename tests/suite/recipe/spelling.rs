//! Misspelt and misplaced keys.

use zaya::recipe::schema::KEYS;

use super::*;

#[test]
fn every_key_misspelt_is_refused_with_the_right_suggestion() {
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
fn every_key_misspelt_in_set_is_refused_with_the_right_suggestion() {
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
fn shipped_recipes_with_one_wrong_letter_have_exactly_one_problem() {
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
fn misplaced_and_foreign_keys_are_led_home() {
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

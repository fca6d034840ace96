//! `zaya pretrain --dry-run`, and the documentation.

use std::process::Output;

use zaya::error::exit_code;
use zaya::recipe::doc;
use zaya::recipe::schema::KEYS;

use super::*;

fn pretrain(args: &[&str]) -> (Output, String, String) {
    let output = crate::program::zaya().arg("pretrain").args(args).output().unwrap();
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
fn dry_run_of_zaya1_base_counts_the_published_parameters() {
    let stages = [("base-stage1", 476_837), ("base-stage2", 238_418), ("base-stage3-32k", 71_525), ("8b-sft-131k", 39_339)];
    for (stage, steps) in stages {
        let (output, out, _) = dry_run(&root(&format!("recipes/zaya1-{stage}.toml")), &[]);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(number(&out, "total parameters"), 8_840_488_784);
        assert_eq!(number(&out, "active per token, without the embedding"), 753_608_528);
        assert_eq!(number(&out, "active per token, with the tied head"), 1_290_741_584);
        assert_eq!(number(&out, "experts"), 8_053_063_680);
        assert_eq!(number(&out, "tokens per step"), 16_777_216);
        assert_eq!(number(&out, "steps"), steps);
        // 6 * 1,290,741,584 + 6 * 40 blocks * S * 1,024 channels of queries; the reports say about 8.75e9 at 4K.
        let seq_len: u64 = match stage {
            "8b-sft-131k" => 131_072,
            "base-stage3-32k" => 32_768,
            _ => 4096,
        };
        let flops = 6 * 1_290_741_584 + 6 * 40 * seq_len * 1024;
        let line = out.lines().find(|l| l.starts_with("FLOPs per token")).unwrap();
        assert!(line.ends_with(&format!(" {flops}")), "{line}");
        assert!(out.contains("MISSING") && out.contains("tokenizer.json"), "{out}");
    }
}

#[test]
fn dry_run_marks_missing_files_and_a_start_refuses_them() {
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
fn dry_run_prints_a_recipe_that_is_one() {
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
fn bad_recipes_and_arguments_exit_with_2() {
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
    // Several stages are planned one by one, and summed up.
    std::fs::write(&path, format!("{SMALL}{STAGES}")).unwrap();
    let (output, out, _) = dry_run(&path, &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(out.contains("# Stage 2 of 2: long") && out.contains("# All stages"), "{out}");
    assert_eq!(number(out.split("# All stages").nth(1).unwrap(), "tokens"), 81_920);
}

/// A run that promises the same bits for any cut works one sequence at a time, whatever its micro-batch: so does its plan.
#[test]
fn dry_run_plans_what_a_run_of_one_sequence_at_a_time_takes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, SMALL).unwrap();
    let plan = |micro: &str, layout: &str| {
        let sets =
            ["--set", &format!("train.micro_batch={micro}"), "--set", &format!("train.deterministic={layout}"), "--ranks", "2"];
        let (output, out, _) = dry_run(&path, &sets);
        assert_eq!(output.status.code(), Some(0), "{out}");
        out[out.find("# Parameters").unwrap()..].to_string()
    };
    assert_eq!(plan("4", "layout"), plan("1", "layout"));
    let (four, layout) = (plan("4", "run"), plan("4", "layout"));
    assert_eq!((number(&four, "micro-batches per step"), number(&layout, "micro-batches per step")), (2, 8));
    assert!(layout.contains("of 1 sequences, 256 tokens") && layout.contains("; 4 micro-batches a step"), "{layout}");
}

/// `docs/RECIPE.md` with the part between two marks replaced.
fn with_part(text: &str, name: &str, part: &str) -> String {
    let start = text.find(&format!("<!-- {name}:")).unwrap();
    let start = start + text[start..].find("-->").unwrap() + 3;
    let end = text.find(&format!("<!-- end {name} -->")).unwrap();
    format!("{}\n\n{part}\n\n{}", &text[..start], &text[end..])
}

#[test]
fn docs_are_the_schemas() {
    let path = root("docs/RECIPE.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let expected = with_part(&with_part(&text, "keys", &doc::keys_markdown()), "resume", &doc::resume_markdown());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    } else {
        assert!(text == expected, "docs/RECIPE.md is out of date: UPDATE_DOCS=1 cargo test --release docs_are_the_schemas");
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

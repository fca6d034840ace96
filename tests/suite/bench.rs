//! `zaya bench`: the document it writes, its formulas, what it refuses. Nothing here depends on how fast the machine is.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

const D: f64 = 32.0;
const VOCAB: f64 = 64.0;
const SEQ: f64 = 16.0;
const TOKENS: f64 = 32.0;
const STEP_TOKENS: f64 = 64.0;
const Q: f64 = 32.0;
const KV: f64 = 16.0;
const HEAD: f64 = 16.0;
const EXPERTS: f64 = 4.0;
const F: f64 = 16.0;
const R: f64 = 8.0;
const WINDOW: f64 = 4.0;

/// Its data does not exist.
const RECIPE: &str = r#"[run]
dir = "run"
[model]
vocab_size = 64
hidden_size = 32
num_blocks = 2
num_query_heads = 2
num_kv_heads = 1
head_dim = 16
num_experts = 4
expert_width = 16
router_width = 8
max_position_embeddings = 64
attention = ["full", "sliding"]
sliding_window = 4
[[data.sources]]
name = "a"
path = "no-such-data"
[train]
steps = 8
global_batch_tokens = 64
micro_batch = 2
seq_len = 16
[schedule]
lr = 5e-3
"#;

fn bench(dir: &Path, args: &[&str]) -> (Output, String, String) {
    let output = crate::program::zaya().arg("bench").args(args).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

#[track_caller]
fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("no number `{key}` in {line}"))
}

#[track_caller]
fn assert_close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} {b}");
}

/// Every time is there, and rates follow from them.
#[track_caller]
fn check_times(line: &Value) {
    assert!(number(line, "rounds") >= 3.0 && number(line, "calls_per_round") >= 1.0, "{line}");
    let (median, best) = (number(line, "median_s"), number(line, "best_s"));
    assert!(0.0 < best && best <= median && number(line, "cpu_s") >= 0.0, "{line}");
}

#[track_caller]
fn find<'a>(lines: &'a Value, name: &str, pass: &str) -> &'a Value {
    let all = lines.as_array().unwrap();
    all.iter().find(|l| l["name"] == name && l["pass"] == pass).unwrap_or_else(|| panic!("no {name}, {pass}"))
}

/// Operations and bytes of a verb.
#[track_caller]
fn check_work(lines: &Value, name: &str, pass: &str, flops: f64, numbers: f64) {
    let line = find(lines, name, pass);
    assert_eq!((number(line, "flops"), number(line, "bytes")), (flops, 4.0 * numbers), "{name}, {pass}");
}

#[test]
fn a_recipe_is_measured_without_its_data() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("r.toml"), RECIPE).unwrap();
    let args = ["--recipe", "r.toml", "--seconds", "0", "--json", "-", "--threads", "2", "--set", "train.precision=bf16"];
    let (output, out, err) = bench(dir.path(), &args);
    assert_eq!(output.status.code(), Some(0), "{err}");
    for piece in ["# Machine", "memory triad", "expert.gate_up", "causal_attention (sliding)", "# A step of 64 tokens", "(MFU)"] {
        assert!(err.contains(piece), "no `{piece}` in the table:\n{err}");
    }
    assert!(!dir.path().join("run").exists());
    let report: Value = serde_json::from_str(&out).unwrap();

    assert_eq!(report["threads"], 2);
    assert!(report["machine"]["name"].is_string() && number(&report["machine"], "processors") >= 1.0);
    let peaks = &report["peaks"];
    for peak in [&peaks["f32"], &peaks["memory"]["read"], &peaks["memory"]["copy"], &peaks["memory"]["triad"]] {
        assert!(number(peak, "one_thread") > 0.0 && number(peak, "all_threads") > 0.0, "{peak}");
    }
    let limit = |precision: &str| match (precision, &peaks["bf16"]) {
        ("bf16", bf16 @ Value::Object(_)) => number(bf16, "all_threads"),
        _ => number(&peaks["f32"], "all_threads"),
    };

    let gemm = report["gemm"].as_array().unwrap();
    let names = [
        "attn.q",
        "attn.k",
        "attn.v",
        "attn.o",
        "router.down",
        "router.fc",
        "router.out",
        "expert.gate_up",
        "expert.down",
        "head",
    ];
    assert_eq!(gemm.iter().map(|l| l["name"].as_str().unwrap()).collect::<BTreeSet<_>>(), names.into());
    assert_eq!(gemm.len(), names.len() * 4, "two precisions, two passes");
    for line in gemm {
        check_times(line);
        let factor = if line["pass"] == "forward" { 2.0 } else { 4.0 };
        assert_eq!(number(line, "flops"), factor * number(line, "m") * number(line, "n") * number(line, "k"));
        assert_close(number(line, "gflops"), number(line, "flops") / number(line, "median_s") / 1e9);
        assert_eq!(number(line, "limit_gflops"), limit(line["precision"].as_str().unwrap()));
        assert_close(number(line, "fraction"), number(line, "gflops") / number(line, "limit_gflops"));
    }
    let shape = |name: &str| ["m", "n", "k"].map(|k| number(find(&report["gemm"], name, "forward"), k));
    assert_eq!(shape("attn.v"), [TOKENS, KV / 2.0, D]);
    assert_eq!(shape("expert.gate_up"), [TOKENS / EXPERTS, 2.0 * F, D]);
    assert_eq!(shape("expert.down"), [TOKENS / EXPERTS, D, F]);
    assert_eq!(shape("head"), [TOKENS, VOCAB, D]);

    let verbs = &report["verbs"];
    for line in verbs.as_array().unwrap() {
        check_times(line);
        let (seconds, limit_s) = (number(line, "median_s"), number(line, "limit_s"));
        assert_close(number(line, "gflops"), number(line, "flops") / seconds / 1e9);
        assert_close(number(line, "gbytes_per_s"), number(line, "bytes") / seconds / 1e9);
        assert_close(number(line, "fraction"), limit_s / seconds);
        let compute_s = number(line, "flops") / limit("bf16") / 1e9;
        let bytes_per_s =
            ["read", "copy", "triad"].map(|k| number(&peaks["memory"][k], "all_threads")).into_iter().fold(0.0, f64::max);
        let memory_s = number(line, "bytes") / bytes_per_s / 1e9;
        assert_close(limit_s, compute_s.max(memory_s));
        assert_eq!(line["bound"], if compute_s >= memory_s { "compute" } else { "memory" });
    }
    let td = TOKENS * D;
    check_work(verbs, "embed", "forward", 0.0, 2.0 * td);
    check_work(verbs, "embed", "backward", td, 3.0 * td);
    check_work(verbs, "affine", "backward", 5.0 * td, 3.0 * td);
    check_work(verbs, "rms_norm", "forward", 4.0 * td, 2.0 * td);
    check_work(verbs, "residual_scale", "backward", 10.0 * td, 5.0 * td);
    let convolutions = TOKENS * (Q + KV) * 2.0 * 2.0 * (1.0 + HEAD);
    check_work(verbs, "cca_mix (full)", "forward", convolutions, 2.0 * TOKENS * (Q + 2.0 * KV));
    check_work(verbs, "cca_mix (sliding)", "backward", 2.0 * convolutions, 3.0 * TOKENS * (Q + 2.0 * KV));
    let keys = WINDOW - WINDOW * WINDOW / (2.0 * SEQ);
    check_work(verbs, "causal_attention (full)", "forward", 4.0 * TOKENS * Q * SEQ / 2.0, 2.0 * TOKENS * (Q + KV));
    check_work(verbs, "causal_attention (sliding)", "backward", 8.0 * TOKENS * Q * keys, 4.0 * TOKENS * (Q + KV));
    let router = R * D + 2.0 * R * R + (EXPERTS + 1.0) * R;
    check_work(verbs, "route", "forward", 2.0 * TOKENS * router, td + 2.0 * TOKENS * R + router);
    let experts = 3.0 * D * F * EXPERTS;
    check_work(verbs, "expert_ffn", "forward", 2.0 * TOKENS * 3.0 * D * F, 2.0 * td + experts);
    check_work(verbs, "expert_ffn", "backward", 4.0 * TOKENS * 3.0 * D * F, 3.0 * td + 3.0 * experts);
    check_work(verbs, "cross_entropy", "forward", 2.0 * td * VOCAB, td + VOCAB * D);
    check_work(verbs, "cross_entropy", "forward_backward", 6.0 * td * VOCAB, 2.0 * td + 3.0 * VOCAB * D);
    check_work(verbs, "adamw (embedding)", "update", 15.0 * VOCAB * D, 7.0 * VOCAB * D);
    let calls = |name: &str| number(find(verbs, name, "forward"), "calls_per_step");
    assert_eq!((calls("embed"), calls("rms_norm"), calls("route")), (2.0, 10.0, 4.0));
    assert_eq!((calls("causal_attention (full)"), calls("residual_scale")), (2.0, 8.0));

    let (step, shape) = (&report["step"], &report["recipe"]);
    check_times(step);
    // Weights that work on a token, by hand: CCA, router and one expert of each block, scales, norms, head.
    let attention = D * (Q + 2.0 * KV) + Q * D + (Q + KV) * (2.0 + 1.0 + 2.0 * HEAD + 1.0) + 1.0;
    let vectors = R + R + R + R;
    let block = attention + 4.0 * D + D + D + router + vectors + 3.0 * D * F + 4.0 * D;
    let active = VOCAB * D + 2.0 * D + 2.0 * block + R + D;
    let per_token = 6.0 * active + 12.0 * Q * (SEQ / 2.0 + keys);
    assert_eq!(number(shape, "flops_per_token"), per_token);
    assert_eq!(number(step, "flops"), per_token * STEP_TOKENS);
    assert_eq!((number(step, "tokens"), number(shape, "micro_batches_per_step")), (STEP_TOKENS, 2.0));
    assert_close(number(step, "tokens_per_s"), STEP_TOKENS / number(step, "median_s"));
    assert_close(number(step, "gflops"), number(step, "flops") / number(step, "forward_backward_s") / 1e9);
    assert_close(number(step, "mfu"), number(step, "gflops") / limit("bf16"));
    let parts: Vec<f64> = ["forward_backward_s", "adamw_s", "muon_s", "other_s"].map(|k| number(step, k)).into();
    assert!(parts.iter().all(|s| *s > 0.0), "{step}");
    assert_close(parts.iter().sum(), number(step, "median_s"));
    assert_close(number(step, "muon_share"), parts[2] / number(step, "median_s"));
}

#[test]
fn a_case_needs_no_recipe() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("gemm:m=64,n=32,k=16", "forward", 2.0 * 64.0 * 32.0 * 16.0),
        ("linear_ce:tokens=20,dim=8,vocab=50,precision=bf16", "forward_backward", 6.0 * 20.0 * 8.0 * 50.0),
        ("attention:batch=2,seq=10,heads=4,kv_heads=2,head_dim=8", "forward_backward", 12.0 * 20.0 * 32.0 * 5.0),
        ("muon:count=3,rows=16,cols=8", "update", 3.0 * 5.0 * (4.0 * 64.0 * 16.0 + 2.0 * 512.0)),
    ];
    let mut args = vec!["--seconds", "0", "--threads", "1", "--json", "out.json"];
    cases.iter().for_each(|(case, ..)| args.extend(["--case", case]));
    let (output, out, err) = bench(dir.path(), &args);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(out.contains("# Cases") && out.contains("results in out.json") && !out.contains("# Machine"), "{out}");
    let report: Value = serde_json::from_slice(&std::fs::read(dir.path().join("out.json")).unwrap()).unwrap();
    assert!(["peaks", "recipe", "gemm", "verbs", "step"].iter().all(|k| report.get(k).is_none()), "{report}");
    let lines = report["cases"].as_array().unwrap();
    assert_eq!(lines.len(), cases.len());
    for (line, (case, pass, flops)) in lines.iter().zip(cases) {
        check_times(line);
        let spelled = if case.contains("precision") { case.to_string() } else { format!("{case},precision=f32") };
        assert_eq!((&line["case"], &line["pass"]), (&Value::from(spelled), &Value::from(pass)));
        assert_eq!(number(line, "flops"), flops, "{case}");
        assert_close(number(line, "gflops"), flops / number(line, "median_s") / 1e9);
    }
}

#[test]
fn what_cannot_be_measured_is_said() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("r.toml"), RECIPE).unwrap();
    let refused = |args: &[&str], pieces: &[&str]| {
        let (output, out, err) = bench(dir.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}\n{err}");
        assert!(pieces.iter().all(|p| err.contains(p)), "{args:?}\n{err}");
        assert_eq!(out, "");
    };
    refused(&[], &["--recipe"]);
    refused(&["--case", "gem:m=1,n=1,k=1"], &["there is no case `gem`", "did you mean `gemm`", "attention"]);
    refused(&["--case", "gemm:m=1,n=1"], &["k is missing", "gemm:m=N,n=N,k=N"]);
    refused(
        &["--case", "attention:batch=1,seq=8,heads=3,kv_heads=2,head_dim=8"],
        &["heads (3) must be a multiple of kv_heads (2)"],
    );
    refused(&["--case", "gemm:m=2000000000,n=2000000000,k=1"], &["cannot measure gemm", "GiB free", "smaller numbers"]);
    refused(&["--case", "gemm:m=8,n=8,k=8", "--parts", "verbs"], &["--parts verbs", "--recipe FILE"]);
    refused(&["--case", "gemm:m=8,n=8,k=8", "--seconds", "1h"], &["--seconds", "expected seconds"]);
    refused(&["--case", "gemm:m=8,n=8,k=8", "--json", "no/such/folder/x.json"], &["no/such/folder/x.json", "cannot be written"]);
    refused(&["--recipe", "r.toml", "--set", "train.seqlen=4"], &["unknown key", "did you mean `train.seq_len`"]);
    refused(&["--recipe", "r.toml", "--backend", "candle"], &["--backend cpu or hip"]);
}

#[test]
fn a_checkpoint_is_measured_and_nothing_of_it_stays() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("r.toml"), RECIPE).unwrap();
    for more in [&[][..], &["--dir", "there"]] {
        let args = [&["checkpoint", "--recipe", "r.toml", "--json", "-", "--threads", "2"], more].concat();
        let (output, out, err) = bench(dir.path(), &args);
        assert_eq!(output.status.code(), Some(0), "{err}");
        assert!(err.contains("# A checkpoint of") && err.contains("of writing"), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        assert!(report.get("peaks").is_none());
        let line = &report["checkpoint"];
        assert!(number(line, "bytes") > 4.0 * 2.0 * VOCAB * D && number(line, "files") == 2.0);
        for key in ["copy_s", "stall_s", "write_s", "save_s", "read_s", "load_s", "verify_s"] {
            assert!(number(line, key) > 0.0, "{key}: {line}");
        }
        let left = |at: &Path| std::fs::read_dir(at).unwrap().filter(|e| e.as_ref().unwrap().path().is_dir()).count();
        assert_eq!(left(dir.path()), if more.is_empty() { 0 } else { 1 });
        assert!(more.is_empty() || left(&dir.path().join("there")) == 0);
    }
    let (output, _, err) = bench(dir.path(), &["checkpoint"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(err.contains("--recipe"), "{err}");
}

/// Products over many shapes: every shape of the grid and of the model once, rates that follow from times, and a page that stands alone.
#[test]
fn a_sweep_is_a_table_a_document_and_a_page() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("r.toml"), RECIPE).unwrap();
    let args = ["gemm", "--recipe", "r.toml", "--sweep", "--largest", "64", "--plot", "p.html", "--seconds", "0", "--json", "-"];
    let (output, out, err) = bench(dir.path(), &args);
    assert!(output.status.success(), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let sweep = &report["sweep"];
    assert_eq!((sweep["software"].as_bool(), sweep["precision"].as_str()), (Some(false), Some("f32")));
    let points = sweep["points"].as_array().unwrap();
    let named = points.iter().filter(|p| p["name"].is_string()).count();
    assert_eq!((points.len(), named), (8 + 10, 10));
    for point in points {
        check_times(point);
        let [m, n, k] = ["m", "n", "k"].map(|key| number(point, key));
        assert_close(number(point, "flops"), 2.0 * m * n * k);
        assert_close(number(point, "gflops"), 2.0 * m * n * k / number(point, "median_s") / 1e9);
        assert_close(number(point, "flops_per_byte"), 2.0 * m * n * k / (4.0 * (m * k + n * k + m * n)));
    }
    let page = std::fs::read_to_string(dir.path().join("p.html")).unwrap();
    assert_eq!((page.matches("<circle").count(), page.matches("class=\"own\"").count()), (18, 10));
    assert!(page.contains("expert.gate_up") && !page.contains("<script") && !page.contains("src="));
    let (refused, _, err) = bench(dir.path(), &["machine", "--sweep"]);
    assert!(refused.status.code() == Some(2) && err.contains("--sweep is of the part `gemm`"), "{err}");
}

/// The parts that there are of a GPU, on the software GPU: they run, and no figure of it is shown as a GPU's.
#[test]
fn a_gpu_is_measured() {
    if !crate::hip::has_kernels() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("r.toml"), RECIPE).unwrap();
    let run = |args: &[&str]| {
        let mut command = crate::hip::on_gpu();
        command.env("SWGPU_DEVICES", "2").args(["bench", "--backend", "hip", "--seconds", "0"]).args(args);
        let output = command.current_dir(dir.path()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let set = "train.precision=bf16";
    let (code, out, table) = run(&["machine", "gemm", "collectives", "--recipe", "r.toml", "--set", set, "--json", "-"]);
    assert_eq!(code, Some(0), "{table}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((report["gpu"]["arch"].as_str(), report["gpu"]["software"].as_bool()), (Some("gfx942"), Some(true)));
    let patterns: Vec<&str> =
        report["gpu"]["memory"]["patterns"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(patterns, ["read", "write", "copy", "triad", "random, 64 bytes"]);
    // Rules of the shape alone: the toy's are too small for any GPU.
    let advice = report["sweep"]["advice"].to_string();
    assert!(advice.contains("head (32 x 64 x 32)"), "{advice}");
    let lines = report["collectives"]["lines"].as_array().unwrap();
    assert_eq!(report["collectives"]["engine"], "rccl");
    // Four operations, of 1 and 64 KiB, in the one group of two.
    assert_eq!(lines.len(), 8);
    for line in lines {
        assert_close(number(line, "gbytes_per_s"), number(line, "bytes") / number(line, "median_s") / 1e9);
        let received = if line["name"] == "all-reduce" { 1.0 } else { 0.5 };
        assert_close(number(line, "bus_gbytes_per_s"), received * number(line, "gbytes_per_s"));
    }
    assert!(table.contains("say nothing about the speed of any GPU"), "{table}");
    let rates = ["GB/s\n", "TFLOP/s\n"].map(|unit| table.lines().filter(|l| l.ends_with(unit.trim())).count());
    assert_eq!(rates[0] + rates[1], 0, "a figure of the software GPU stands as a rate: {table}");
    let (code, _, err) = run(&["step", "--recipe", "r.toml", "--set", set]);
    assert!(code == Some(2) && err.contains("`step` is measured on the processor only"), "{err}");
    let (code, _, err) = run(&["collectives", "--ranks", "3"]);
    assert!(code == Some(2) && err.contains("this machine has 2"), "{err}");
}

//! One line of `metrics.jsonl` per step (`docs/METRICS.md`).

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::benchmarks::Results;
use super::context_report::ContextReport;
use super::prefetch::DataTime;
use super::step::StepReport;
use super::validate::Score;
use super::writer::Stall;
use crate::checkpoint::Saved;
use crate::checkpoint::remote::Uploaded;
use crate::monitor::metrics::{last_line, last_step};
use crate::optim::balance::ExpertLoad;
use crate::parallel::bucket;
use crate::parallel::exchange::Waits;

/// What the loop knows beside the step's own report.
pub struct Timing {
    /// Seconds of the whole step, reading data included.
    pub step_s: f64,
    pub data: DataTime,
    pub flops_per_token: f64,
    /// What MFU is measured against, FLOP/s.
    pub peak_flops: f64,
    /// Of the first of several ranks.
    pub waits: Option<Waits>,
}

impl Timing {
    pub fn tokens_per_s(&self, tokens: u64) -> f64 {
        tokens as f64 / self.step_s.max(1e-9)
    }
}

#[derive(Serialize)]
struct Line<'a> {
    step: u64,
    /// Of a recipe with stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<&'a str>,
    loss: f64,
    grad_norm: f64,
    /// Experts whose gradient `optimizer.expert_clip` has clipped; absent when there were none.
    #[serde(skip_serializing_if = "is_zero")]
    clipped_experts: u64,
    lr: f64,
    tokens_per_s: f64,
    tokens_seen: u64,
    /// Tokens that count in the loss.
    loss_tokens: u64,
    step_time_s: f64,
    data_time_s: f64,
    /// Seconds that the step stood still for its data.
    data_wait_s: f64,
    mfu: f64,
    /// Seconds that the first of several ranks stood still for gradients and for weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    gradient_wait_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_wait_s: Option<f64>,
    /// Seconds that it spent in operations with the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    operations_s: Option<f64>,
    /// False when no token of the batch had a label, and nothing was updated.
    updated: bool,
    /// Share of tokens per class and block, the skip class last.
    expert_load: Vec<Vec<f64>>,
    expert_entropy: Vec<f64>,
    expert_max_violation: Vec<f64>,
    unix_time: f64,
    #[serde(flatten)]
    validation: Map<String, Value>,
    /// Saves that failed since this process began; absent when all went well.
    #[serde(skip_serializing_if = "is_zero")]
    checkpoint_failures: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// The line of the step that `step` (counted from 1) names.
pub fn line<'a>(
    step: u64,
    stage: Option<&'a str>,
    tokens_seen: u64,
    report: &StepReport,
    timing: &Timing,
    scores: &[Score],
    checkpoint_failures: u64,
) -> impl Serialize + use<'a> {
    let loads: Vec<_> = report.expert_counts.iter().map(|c| ExpertLoad::of(c)).collect();
    let tokens_per_s = timing.tokens_per_s(report.tokens);
    Line {
        step,
        stage,
        loss: report.mean_loss(),
        grad_norm: report.grad_norm,
        clipped_experts: report.clipped_experts as u64,
        lr: report.lr,
        tokens_per_s,
        tokens_seen,
        loss_tokens: report.loss.count,
        step_time_s: timing.step_s,
        data_time_s: timing.data.read_s,
        data_wait_s: timing.data.wait_s,
        mfu: tokens_per_s * timing.flops_per_token / timing.peak_flops,
        gradient_wait_s: timing.waits.map(|w| w.gradients.as_secs_f64()),
        weight_wait_s: timing.waits.map(|w| w.weights.as_secs_f64()),
        operations_s: timing.waits.map(|w| w.operations.as_secs_f64()),
        updated: report.updated,
        expert_load: loads.iter().map(|l| l.fractions.clone()).collect(),
        expert_entropy: loads.iter().map(|l| l.entropy).collect(),
        expert_max_violation: loads.iter().map(|l| l.max_violation).collect(),
        unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64()),
        validation: validation(scores),
        checkpoint_failures,
    }
}

/// Field that a line has when held-out data was scored at its step.
pub const VAL_LOSS: &str = "val_loss";

/// `val_loss` and `val_bpb` of the first set (the usual case of one), and all sets under `validation`.
pub fn validation(scores: &[Score]) -> Map<String, Value> {
    let mut out = Map::new();
    if let Some(first) = scores.first() {
        out.insert(VAL_LOSS.into(), json!(first.mean_loss()));
        out.insert("val_bpb".into(), json!(first.bits_per_byte()));
        let all = scores
            .iter()
            .map(|s| (s.name.clone(), json!({"loss": s.mean_loss(), "bpb": s.bits_per_byte(), "tokens": s.loss.count})));
        out.insert("validation".into(), Value::Object(all.collect()));
    }
    out
}

/// The text of the last line of metrics when it is that of `step` and has no validation.
pub fn without_validation(metrics: &Path, step: u64) -> Result<Option<String>> {
    let last = last_step(metrics)?.filter(|(_, line)| line["step"] == step && !line.contains_key(VAL_LOSS));
    Ok(last.map(|(text, _)| text))
}

const BENCHMARKS: &str = "benchmarks";

/// The event of benchmark tasks that ran on the weights of a step.
pub fn benchmarks(step: u64, stage: Option<&str>, results: &Results) -> Value {
    let mut event = json!({"event": BENCHMARKS, "at_step": step});
    if let Some(stage) = stage {
        event["stage"] = stage.into();
    }
    event["tasks"] = results.tasks.clone().into();
    event["seconds"] = results.seconds.into();
    event
}

/// Whether metrics tell of benchmark tasks at `step`.
pub fn has_benchmarks(metrics: &Path, step: u64) -> Result<bool> {
    let of_step = |line: &Map<String, Value>| line.get("event").is_some_and(|e| e == BENCHMARKS) && line["at_step"] == step;
    Ok(last_line(metrics, of_step)?.is_some())
}

/// The event of a save that failed; training may have gone on.
pub fn checkpoint_failed(step: u64, failures: u64, error: &anyhow::Error) -> Value {
    json!({"event": "checkpoint_failed", "at_step": step, "checkpoint_failures": failures, "error": format!("{error:#}")})
}

/// The event of a checkpoint that is safe.
pub fn checkpoint_saved(step: u64, stall: Stall, saved: &Saved) -> Value {
    json!({
        "event": "checkpoint_saved",
        "at_step": step,
        "stall_s": stall.whole_s,
        "wait_s": stall.wait_s,
        "write_s": saved.seconds,
        "bytes": saved.bytes,
        "reused_bytes": saved.reused_bytes,
    })
}

/// The event of a checkpoint that has arrived in a store, verified.
pub fn checkpoint_uploaded(url: &str, uploaded: &Uploaded) -> Value {
    json!({
        "event": "checkpoint_uploaded",
        "at_step": uploaded.step,
        "url": url,
        "bytes": uploaded.bytes,
        "skipped_bytes": uploaded.skipped_bytes,
        "seconds": uploaded.seconds,
    })
}

/// The event of an upload that did not succeed.
pub fn upload_failed(step: u64, failures: u64, url: &str, error: &anyhow::Error) -> Value {
    json!({"event": "upload_failed", "at_step": step, "upload_failures": failures, "url": url, "error": format!("{error:#}")})
}

/// The event of a batch that was not applied. `numbers`: mean loss and gradient norm; null where they are no numbers.
pub fn batch_refused(step: u64, batch: u64, why: &str, policy: &str, numbers: Option<(f64, f64)>) -> Value {
    let (loss, grad_norm) = numbers.unzip();
    json!({
        "event": "batch_refused",
        "at_step": step,
        "batch": batch,
        "why": why,
        "policy": policy,
        "loss": loss,
        "grad_norm": grad_norm,
    })
}

/// The event of a step that stands out and was applied all the same.
pub fn spike(step: u64, why: &str, loss: f64, grad_norm: f64) -> Value {
    json!({"event": "spike", "at_step": step, "why": why, "loss": loss, "grad_norm": grad_norm})
}

/// The event of a way back to a checkpoint; `batches`: the first and the last one that are passed over.
pub fn rolled_back(from: u64, to: u64, batches: [u64; 2]) -> Value {
    json!({"event": "rolled_back", "at_step": from, "to_step": to, "batches": batches})
}

/// The event of a look at long context, before or after training.
pub fn context(step: u64, stage: Option<&str>, when: &str, report: &ContextReport) -> Value {
    let mut out = json!({
        "event": "context_report",
        "at_step": step,
        "when": when,
        "seq_len": report.seq_len,
        "loss_by_position": report.loss_by_position,
        "retrieval": report.retrieval,
    });
    if let Some(stage) = stage {
        out["stage"] = stage.into();
    }
    out
}

/// The event of a start for which memory only sufficed with smaller micro-batches.
pub fn micro_batch_reduced(step: u64, asked: usize, used: usize) -> Value {
    json!({"event": "micro_batch_reduced", "at_step": step, "asked": asked, "used": used})
}

/// The event of a run that has measured how large its buckets should be.
pub fn buckets_sized(step: u64, found: &bucket::Found) -> Value {
    json!({"event": "buckets_sized", "at_step": step, "bucket_mib": found.bucket_mib, "reduce_scatter": found.rates})
}

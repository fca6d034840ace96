"""zaya's side: a real `zaya pretrain`, watched from outside, or `zaya bench`.

Both ways give {tokens_per_s, tokens_per_cpu_s, peak_rss (bytes)}; the first one also the losses.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from children import Failed, clean_env, run_json

TICK = os.sysconf("SC_CLK_TCK")


def settings(job):
    return {
        "train.precision": job["precision"], "train.head_precision": job["precision"], "train.global_batch_tokens": job["tokens"], "train.micro_batch": job["micro_batch"],
        "train.seq_len": job["seq_len"], "train.peak_flops": "1e12",
    }  # fmt: skip


def pretrain(job):
    """Trains warmup + steps steps. Stopped after the last one, so that no checkpoint counts, as the peers write none."""
    run = Path(job["work"]) / "run"
    shutil.rmtree(run, ignore_errors=True)
    keys = settings(job) | {
        "run.dir": run, "data.sources.0.path": job["data"], "train.steps": job["warmup"] + job["steps"] + 1,
        "schedule.kind": "constant", "schedule.lr": "1e-4", "schedule.warmup_steps": 0, "checkpoint.every": 1_000_000,
    }  # fmt: skip
    command = [job["zaya"], "pretrain", "--recipe", job["recipe"], "--threads", str(job["threads"]), "--init-from", f"hf:{job['init']}"]
    for key, value in keys.items():
        command += ["--set", f"{key}={value}"]
    log = Path(job["work"]) / "zaya.log"
    with open(log, "w") as out:
        child = subprocess.Popen([str(c) for c in command], stdout=out, stderr=out, env=clean_env())
    try:
        rows, marks, rss = watch(child, run / "metrics.jsonl", job["warmup"], job["steps"], time.monotonic() + job["timeout_s"], log)
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        child.wait()
    measured = rows[job["warmup"] : job["warmup"] + job["steps"]]
    tokens = job["tokens"] * len(measured)
    return {
        "tokens_per_s": tokens / sum(r["step_time_s"] for r in measured), "tokens_per_cpu_s": tokens / (marks[1] - marks[0]),
        "peak_rss": rss, "losses": [r["loss"] for r in rows], "step_s": [r["step_time_s"] for r in measured],
    }  # fmt: skip


def watch(child, metrics, warmup, steps, deadline, log):
    """Rows of the metrics; CPU seconds when the first measured step began and when the last one ended; peak memory."""
    marks = [0.0, 0.0]
    while True:
        alive = child.poll() is None
        rows = read_rows(metrics)
        if alive and len(rows) <= warmup:
            marks[0] = cpu_seconds(child.pid)
        if len(rows) >= warmup + steps:
            if not alive:
                raise Failed("zaya ended before its CPU time could be read: more steps are needed")
            marks[1] = cpu_seconds(child.pid)
            return rows, marks, peak_rss(child.pid)
        if not alive:
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            raise Failed(f"zaya ended early: {' / '.join(lines[-3:])[:400]}")
        if time.monotonic() > deadline:
            raise Failed("zaya did not finish in time")
        time.sleep(0.005)


def read_rows(path):
    try:
        text = path.read_text()
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "step" in row:
            rows.append(row)
    return rows


def cpu_seconds(pid):
    """User and system time of all threads, to 1/100 s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def peak_rss(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def bench_step(job):
    command = [job["zaya"], "bench", "--recipe", job["recipe"], "--parts", "step", "--threads", str(job["threads"]), "--json", "-"]
    for key, value in settings(job).items():
        command += ["--set", f"{key}={value}"]
    step = run_json([str(c) for c in command], {}, job["timeout_s"])["step"]
    return {
        "tokens_per_s": step["tokens_per_s"], "tokens_per_cpu_s": step["tokens"] / step["cpu_s"],
        "peak_rss": step["peak_resident_bytes"],
    }  # fmt: skip


def bench_case(zaya, case, threads, seconds, timeout_s):
    """{median_s, cpu_s} of one kernel of `zaya bench --case`."""
    command = [zaya, "bench", "--case", case, "--threads", str(threads), "--seconds", str(seconds), "--json", "-"]
    line = run_json([str(c) for c in command], {}, timeout_s)["cases"][0]
    return {"median_s": line["median_s"], "cpu_s": line["cpu_s"]}


def has_bench(zaya):
    return subprocess.run([zaya, "bench", "--help"], capture_output=True, check=False).returncode == 0

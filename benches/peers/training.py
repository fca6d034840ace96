"""The training step, side by side: which peers there are, how each is tuned, and the alternating rounds."""

import json
import math
import sys
from pathlib import Path

import machine
import zaya_side
from children import Failed, environments, run_json
from shape import BENCH_15M

TORCH_SIDE = Path(__file__).parent / "torch_side"
PEERS = {
    f"{model}-{precision}{'-compile' if compiled else ''}": {"model": model, "precision": precision, "compiled": compiled}
    for compiled in (False, True)
    for precision in ("f32", "bf16")
    for model in ("tuned", "hf")
}
# What a peer starts from, and the choices that are tried one after the other, each kept if it is faster
FIRST = {
    "tuned": {"experts": "loop", "loss": "chunked:512", "conv": "bmm", "gqa": "native"},
    "hf": {"experts": "grouped_mm"},
}
CHOICES = {
    "tuned": {"experts": ["grouped"], "loss": ["chunked:2048", "plain", "widened"], "conv": ["conv1d"], "gqa": ["repeat"]},
    "hf": {"experts": ["eager"]},
}


def say(text):
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One number of tokens a step."""

    def __init__(self, args, python, data, init, tokens, notes):
        self.args, self.python, self.tokens, self.notes = args, python, tokens, notes
        self.steps = args.steps or max(3, 40960 // tokens)
        self.shared = {
            "shape": BENCH_15M, "threads": args.threads, "seq_len": args.seq_len, "tokens": tokens,
            "data": f"{data}.bin", "init": str(init), "seed": 1,
        }  # fmt: skip
        self.data, self.init = data, init
        self.environments = environments()
        self.fastest_step_s = None

    def note(self, text):
        say(f"  {text}")
        self.notes.append(f"{self.tokens} tokens: {text}")

    def peer(self, name, how, micro_batch, environment, steps):
        spec = self.shared | PEERS[name] | {"how": how, "micro_batch": micro_batch, "steps": steps, "warmup": 2 if PEERS[name]["compiled"] else 1}
        if self.fastest_step_s:
            spec["hopeless_s"] = self.args.hopeless * self.fastest_step_s
        threads = str(self.args.threads)
        env = self.environments[environment] | {
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(self.args.work).resolve() / "inductor"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        result = run_json([self.python, str(TORCH_SIDE / "train_worker.py"), json.dumps(spec)], env, self.args.timeout)
        if "hopeless_s" in result:
            raise Failed(f"hopeless: a step takes {result['hopeless_s']:.1f} s or more, {result['hopeless_s'] / self.fastest_step_s:.0f} times the fastest")
        if not all(map(math.isfinite, result["losses"])):
            raise Failed(f"its losses are no numbers: {result['losses']}")
        step_s = sorted(result["step_s"])[len(result["step_s"]) // 2]
        self.fastest_step_s = min(step_s, self.fastest_step_s or step_s)
        return result

    def try_one(self, name, how, micro_batch, environment):
        """Result of a short run, or None with a note."""
        what = f"{name} {how} micro-batch {micro_batch}, {environment}"
        try:
            result = self.peer(name, how, micro_batch, environment, self.args.tuning_steps)
        except Failed as why:
            self.note(f"{what}: {why}")
            return None
        say(f"  {what}: {result['tokens_per_s']:.0f} tokens/s, {result['tokens_per_cpu_s']:.0f} per CPU-second")
        return result

    def score(self, result):
        return result[{"wall": "tokens_per_s", "cpu": "tokens_per_cpu_s"}[self.args.choose_by]] if result else 0.0

    def fits(self, micro_batch):
        """Whether plain logits, their gradient and two copies of them take less than half of the free memory."""
        logits = micro_batch * self.args.seq_len * BENCH_15M["vocab_size"] * 4
        return 4 * logits < machine.available_memory() / 2

    def tune(self):
        """{peer: (how, micro-batch)} of the peers that run, and the fastest environment."""
        first = next(iter(self.environments))
        whole = self.tokens // self.args.seq_len
        tuned, scores = {}, {}
        for name in sorted(self.args.peers, key=list(PEERS).index):
            kind = PEERS[name]["model"]
            how, micro = dict(FIRST[kind]), min(8, whole)
            eager = name.removesuffix("-compile")
            if name != eager and eager in self.args.peers and eager not in tuned:
                self.note(f"{name}: left out, since {eager} is")
                continue
            if eager in tuned:
                how, micro = dict(tuned[eager][0]), tuned[eager][1]
            best = self.score(self.try_one(name, how, micro, first))
            if not best:
                continue
            # a compiled peer takes over what its eager form chose, but for the loss, which compiling changes most
            choices = {k: v for k, v in CHOICES[kind].items() if name == eager or k == "loss"}
            if self.args.quick:
                choices = {}
            for key, values in choices.items():
                for value in (v for v in values if v != how[key]):
                    score = self.score(self.try_one(name, how | {key: value}, micro, first))
                    if score > best:
                        best, how = score, how | {key: value}
            if name == eager and not self.args.quick:
                for other in sorted({m for m in (2, 4, 16, 32, whole) if m <= whole and self.fits(m)} - {micro}):
                    score = self.score(self.try_one(name, how, other, first))
                    if score > best:
                        best, micro = score, other
            tuned[name], scores[name] = (how, micro), best
        if not tuned:
            return {}, first
        champion = max(scores, key=scores.get)
        best_environment, best = first, scores[champion]
        for environment in [] if self.args.quick else list(self.environments)[1:]:
            score = self.score(self.try_one(champion, *tuned[champion], environment))
            if score > best:
                best, best_environment = score, environment
        if self.args.finalists:
            keep = sorted(scores, key=scores.get, reverse=True)[: self.args.finalists]
            for name in set(tuned) - set(keep):
                self.note(f"{name}: {scores[name]:.0f} tokens/s{' per CPU' if self.args.choose_by == 'cpu' else ''} when tuned, not among the {len(keep)} fastest")
            tuned = {name: tuned[name] for name in keep}
        return tuned, best_environment

    def zaya(self, precision):
        job = {
            "work": str(Path(self.args.work).resolve()), "zaya": self.args.zaya, "recipe": self.args.recipe, "precision": precision, "tokens": self.tokens,
            "micro_batch": min(8, self.tokens // self.args.seq_len), "seq_len": self.args.seq_len, "data": self.data, "init": self.init, "warmup": 1,
            "steps": self.steps, "threads": self.args.threads, "timeout_s": self.args.timeout,
        }  # fmt: skip
        return zaya_side.pretrain(job) if self.args.zaya_by == "pretrain" else zaya_side.bench_step(job)

    def rounds(self, tuned, environment):
        """{name: [result of each round]}; a side that fails is left out from then on."""
        sides = {f"zaya-{p}": (lambda p=p: self.zaya(p)) for p in self.args.zaya_precisions}
        for name, (how, micro) in tuned.items():
            sides[name] = lambda name=name, how=how, micro=micro: self.peer(name, how, micro, environment, self.steps)
        results = {name: [] for name in sides}
        for number in range(self.args.rounds):
            for name in list(sides):
                try:
                    result = sides[name]()
                except Failed as why:
                    self.note(f"{name}: round {number + 1}: {why}; left out from here on")
                    del sides[name]
                    continue
                results[name].append(result)
                say(f"  round {number + 1}: {name}: {result['tokens_per_s']:.0f} tokens/s, {result['tokens_per_cpu_s']:.0f} per CPU-second, "
                    f"{result['peak_rss'] / 1e9:.2f} GB")  # fmt: skip
        return {name: rows for name, rows in results.items() if rows}


def run(args, python, data, init, tokens, notes):
    bench = Bench(args, python, data, init, tokens, notes)
    say(f"{tokens} tokens a step: tuning the peers")
    tuned, environment = bench.tune()
    say(f"{tokens} tokens a step: rounds")
    results = bench.rounds(tuned, environment)
    return {
        "tokens": tokens, "steps": bench.steps, "environment": environment,
        "how": {n: {"micro_batch": m, **h} for n, (h, m) in tuned.items()}, "results": results,
    }  # fmt: skip

"""Single kernels, `zaya bench --case` against the best way that PyTorch has, in alternating rounds."""

import json
import sys
from pathlib import Path

import zaya_side
from children import PASSIVE, TUNED_MALLOC, Failed, run_json

WORKER = Path(__file__).parent / "torch_side" / "kernel_worker.py"
GEMMS = ((4096, 256, 256), (4096, 1024, 256), (4096, 256, 1024), (1024, 256, 4096), (256, 512, 256), (2048, 8192, 256))
CASES = [
    ("linear_ce", {"tokens": 4096, "dim": 256, "vocab": 32768}),
    ("attention", {"batch": 4, "seq": 1024, "heads": 8, "kv_heads": 8, "head_dim": 64}),
    ("attention", {"batch": 1, "seq": 4096, "heads": 8, "kv_heads": 8, "head_dim": 64}),
    *(("gemm", {"m": m, "n": n, "k": k}) for m, n, k in GEMMS),
]
WAYS = {
    "linear_ce": ("chunked:512", "chunked:2048", "plain", "widened", "plain-compiled", "widened-compiled"),
    "attention": ("as projected", "contiguous"),
    "gemm": ("linear", "mm into place"),
}


class Hopeless(Failed):
    """Too slow to wait for."""


def name_of(kind, numbers):
    return f"{kind}:" + ",".join(f"{k}={v}" for k, v in numbers.items())


class Kernels:
    def __init__(self, args, python, compiles, notes):
        self.args, self.python, self.compiles, self.notes = args, python, compiles, notes

    def note(self, text):
        print(f"  {text}", file=sys.stderr, flush=True)
        self.notes.append(text)

    def torch(self, kind, numbers, precision, way, seconds, hopeless_s=None):
        spec = {"kind": kind, **numbers, "precision": precision, "way": way, "seconds": seconds, "threads": self.args.threads}
        if hopeless_s and hopeless_s < float("inf"):
            spec["hopeless_s"] = hopeless_s
        threads = str(self.args.threads)
        env = TUNED_MALLOC | PASSIVE | {
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(self.args.work).resolve() / "inductor"),
        }  # fmt: skip
        result = run_json([self.python, str(WORKER), json.dumps(spec)], env, self.args.timeout)
        if "hopeless_s" in result:
            raise Hopeless(f"hopeless: {result['hopeless_s']:.3g} s a call or more, {result['hopeless_s'] / hopeless_s * self.args.hopeless:.0f} times the fastest")
        return result

    def best_way(self, kind, numbers, precision, case, limit_s):
        """(way, why there is none, seconds); ways that take longer than `limit_s` are given up."""
        best, why, key = (None, float("inf")), "", "median_s" if self.args.choose_by == "wall" else "cpu_s"
        for way in WAYS[kind]:
            if way.endswith("-compiled") and not self.compiles:
                continue
            try:
                result = self.torch(kind, numbers, precision, way, 0.2, min(limit_s, self.args.hopeless * best[1]))
            except Hopeless as failure:
                # the ways differ in what they do beside the products: when one is hopeless at first, all are
                why = str(failure)
                if best[0] is None:
                    self.note(f"{case} {precision} {way}: {failure}; this precision is left out")
                    break
                continue
            except Failed as failure:
                why = str(failure)
                self.note(f"{case} {precision} {way}: {failure}")
                continue
            print(f"  {precision} {way}: {1e3 * result['median_s']:.2f} ms, {1e3 * result['cpu_s']:.2f} ms of CPU", file=sys.stderr, flush=True)
            if result[key] < best[1]:
                best = (way, result[key])
        return best[0], why, best[1]

    def measure(self, has_bench):
        lines = []
        for kind, numbers in CASES:
            case = name_of(kind, numbers)
            if self.args.kernel_cases not in case:
                continue
            print(case, file=sys.stderr, flush=True)
            here, limit_s = [], float("inf")
            for precision in ("f32", "bf16"):
                way, why, seconds = self.best_way(kind, numbers, precision, case, limit_s)
                limit_s = min(limit_s, self.args.hopeless * seconds)
                here.append({"case": case, "precision": precision, "way": way, "why": why, "zaya": [], "torch": []})
            for _ in range(self.args.rounds):
                for line in here:
                    self.one_round(line, kind, numbers, has_bench)
            lines += here
        return lines

    def one_round(self, line, kind, numbers, has_bench):
        case, precision, seconds = line["case"], line["precision"], self.args.kernel_seconds
        try:
            if has_bench:
                what = f"{case},precision={precision}"
                line["zaya"].append(zaya_side.bench_case(self.args.zaya, what, self.args.threads, seconds, self.args.timeout))
        except Failed as why:
            self.note(f"zaya bench {case}, {precision}: {why}")
        try:
            if line["way"]:
                line["torch"].append(self.torch(kind, numbers, precision, line["way"], seconds))
        except Failed as why:
            self.note(f"torch {case}, {precision}: {why}")


def measure(args, python, compiles, notes):
    has_bench = zaya_side.has_bench(args.zaya)
    if not has_bench:
        notes.append(f"{args.zaya} has no `bench`: its column is empty")
    return Kernels(args, python, compiles, notes).measure(has_bench)

"""Child processes: each measurement in a fresh one, with an environment of its own."""

import json
import os
import subprocess

# glibc's allocator told to keep what it has: fresh pages for every large tensor cost more than anything else here
TUNED_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "20000000000", "MALLOC_TOP_PAD_": "268435456"}
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
LIBRARIES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
    "mimalloc": ("libmimalloc.so.2", "libmimalloc.so"),
}


class Failed(Exception):
    """A child that gave no result; the message is for the report."""


def environments():
    """Allocator and waiting of the peers, by name; the first is the usual one."""
    found = {
        "tuned malloc, passive wait": TUNED_MALLOC | PASSIVE,
        "stock malloc, passive wait": PASSIVE,
        "tuned malloc, active wait": TUNED_MALLOC,
    }
    listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    paths = {line.split()[0]: line.split()[-1] for line in listing.splitlines() if "=>" in line}
    for name, files in LIBRARIES.items():
        path = next((paths[f] for f in files if f in paths), None)
        if path:
            found[f"{name}, passive wait"] = PASSIVE | {"LD_PRELOAD": path}
    return found


def clean_env():
    """This process's environment without what would tune a child behind our back."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "OMP_", "GOMP_", "MKL_", "KMP_")) and k != "LD_PRELOAD"}


def run_json(command, env, timeout_s):
    """The JSON that the child prints: its whole stdout, or its last line."""
    try:
        done = subprocess.run(command, env=clean_env() | env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"not finished after {timeout_s:.0f} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Failed(f"exit code {done.returncode}: {lines[-1][:300] if lines else 'nothing on stderr'}")
    for text in (done.stdout, done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""):
        try:
            return json.loads(text)
        except ValueError:
            continue
    raise Failed("printed no JSON")

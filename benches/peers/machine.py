"""What the figures were measured on."""

import os
import platform
from pathlib import Path


def cpu():
    """Name, cores this process may use, and the flags that decide how fast bf16 is."""
    fields = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    flags = fields.get("flags", "").split()
    return {
        "name": fields.get("model name", platform.processor() or platform.machine()),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "flags": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
    }


def available_memory():
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def load():
    """Mean number of runnable processes of the last minute; the benchmark's own included."""
    return os.getloadavg()[0]


def describe(c):
    return f"{c['name']} (family/model {c['family_model']}), {c['cores']} cores, {' '.join(c['flags']) or 'no AVX2'}"

"""The virtual environment with PyTorch and transformers: made on first use, then used again."""

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch", "transformers>=5.13", "numpy")
PROBE = "import torch, transformers; from transformers import ZayaForCausalLM; print(torch.__version__, transformers.__version__)"


def probe(python, program):
    """(versions of torch and transformers) or why they do not work."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.split(), None
    lines = done.stderr.strip().splitlines()
    return None, lines[-1] if lines else f"exit code {done.returncode}"


def ensure(path, pip_args, packages=PACKAGES, program=PROBE):
    """The environment's Python and the versions in it. Raises RuntimeError, with what to do next."""
    python = Path(path) / "bin" / "python"
    if not python.exists():
        print(f"making a virtual environment in {path}", file=sys.stderr)
        done = subprocess.run([sys.executable, "-m", "venv", str(path)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"cannot make a virtual environment in {path}: {(done.stderr or done.stdout).strip()[-300:]}. "
                               "Make one and name it with --venv PATH")  # fmt: skip
    versions, why = probe(python, program)
    if versions is None:
        print(f"installing {', '.join(packages)} into {path}", file=sys.stderr)
        command = [str(python), "-m", "pip", "install", "--quiet", *pip_args, *packages]
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(f"cannot install PyTorch: `{' '.join(command)}` failed (its message is above). Run it by hand with what "
                               "your network needs, or pass such options with --pip-args, or name a ready environment with --venv PATH")  # fmt: skip
        versions, why = probe(python, program)
    if versions is None:
        raise RuntimeError(f"the environment {path} has no working PyTorch with transformers' ZAYA (5.13 or newer): {why}")
    return os.fspath(python), versions


def compiler_missing():
    """Why torch.compile cannot work here, or None."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and subprocess.run(["sh", "-c", 'command -v "$1"', "sh", name], capture_output=True, check=False).returncode == 0:
            return None
    return "torch.compile needs a C++ compiler (g++ or clang++), and there is none"

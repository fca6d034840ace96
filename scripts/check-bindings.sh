#!/bin/sh
# Compares what crates/hip-sys and crates/rccl-sys declare with AMD's own Python bindings, which know ROCm's headers. Neither ROCm nor
# a GPU is needed, but Python with venv, and once a network: 12 MB from PyPI into a virtual environment.
#
#   scripts/check-bindings.sh [VENV]      the virtual environment, target/bindings-venv if not given
#
# Exit status: 0 all equal, 1 differences, each printed, 2 nothing was compared, and a sentence why.
set -eu
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
venv="${1:-$target/bindings-venv}"
# HIP 7.15, hipBLASLt 1.x and RCCL 2.30.4: the versions that the crates were written after.
version=10.0.0.0.1.2
packages="rocm-bindings-core==$version rocm-bindings-hip==$version rocm-bindings-libraries==$version rocm-bindings-systems==$version"

log="$target/bindings-venv.log"
mkdir -p "$target"
has_packages() {
    "$venv/bin/python" -c "
from importlib.metadata import version
import sys
sys.exit(any(version(p.split('==')[0]) != '$version' for p in '$packages'.split()))" 2>/dev/null
}
install() {
    python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check $packages
}
if ! has_packages && ! install >"$log" 2>&1; then
    echo "not compared: AMD's bindings (rocm-bindings-* $version from PyPI) could not be installed into $venv; $log says why" >&2
    exit 2
fi

for library in hip rccl; do
    cargo run --quiet --release --locked --target-dir "$target" -p "$library-sys" --example "describe_$library" >"$target/$library-sys.json"
done
"$venv/bin/python" tests/python/check_hip_bindings.py "$target/hip-sys.json" "$target/rccl-sys.json"
"$venv/bin/python" tests/python/check_hip_bindings.py --mutate "$target/hip-sys.json" "$target/rccl-sys.json"

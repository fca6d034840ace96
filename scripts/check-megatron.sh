#!/bin/sh
# Reads zaya's shards with Megatron-Core's own IndexedDataset, and the other way round: scripts/check-megatron.sh [ZAYA]
#
# Needs Python 3.10 or newer and pip. MEGATRON chooses the version; VENV the folder of the virtual environment, which is made if
# it is not there.
set -eu
cd "$(dirname "$0")/.."
zaya=${1:-target/release/zaya}
megatron=${MEGATRON:-0.16.1}
venv=${VENV:-target/megatron-venv}
[ -x "$zaya" ] || { echo "error: there is no executable $zaya: make build, or give one" >&2; exit 2; }
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
# Without PyTorch and the rest of its dependencies, none of which reading needs.
"$venv/bin/python" -c "import numpy, importlib.metadata as m; assert m.version('megatron-core') == '$megatron'" 2>/dev/null \
    || "$venv/bin/pip" install --quiet numpy \
    && "$venv/bin/pip" install --quiet --no-deps "megatron-core==$megatron"
exec "$venv/bin/python" scripts/check-megatron.py "$zaya"

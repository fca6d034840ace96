#!/bin/sh
# The benchmark: the 15 M parameter model of recipes/bench-cpu.toml on the demo's shards. Prints medians of the steps after
# the tenth, as metrics.jsonl has them.
#
# usage: scripts/bench.sh ZAYA     from the repository's root
set -eu
export LC_ALL=C

zaya=$1
run=runs/bench

rm -rf "$run"
"$zaya" pretrain --recipe recipes/bench-cpu.toml
median() {
    sed -n "s/^{\"step\":\([0-9]*\),.*\"$1\":\([^,}]*\).*/\1 \2/p" "$run/metrics.jsonl" | awk '$1 > 10 { print $2 }' | sort -g |
        awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}
printf '\nmedian of steps 11 to 50, %s cores (%s):\n' "$(nproc)" "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
printf '  %.0f tokens/s\n' "$(median tokens_per_s)"
printf '  %.1f %% MFU, against f32 matrix products of 1024 x 1024 measured at the start of the run\n' "$(median mfu | awk '{ print 100 * $1 }')"

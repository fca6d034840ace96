#!/bin/sh
# Trains the demo for 300 steps in f32 and in bf16 (head too), from the same seed, and compares the loss curves: means over 20 steps must
# agree within 1 %. Needs the demo's data (`make demo-data`).
#
# usage: scripts/precision-curves.sh ZAYA     from the repository's root
set -eu
export LC_ALL=C

zaya=$1
for precision in f32 bf16; do
    rm -rf "runs/precision-$precision"
    "$zaya" pretrain --recipe recipes/demo-cpu.toml --set "run.dir=../runs/precision-$precision" --set train.steps=300 \
        --set "train.precision=$precision" --set "train.head_precision=$precision" --set checkpoint.every=1000 --set eval.every=300
done
losses() { sed -n 's/^{"step":\([0-9]*\),.*"loss":\([^,}]*\).*/\1 \2/p' "runs/precision-$1/metrics.jsonl"; }
{ losses f32; echo; losses bf16; } | awk '
    NF == 0 { which++; next }
    { sum[which + 0, int(($1 - 1) / 20)] += $2 }
    END {
        for (i = 0; i < 15; i++) {
            f32 = sum[0, i] / 20; bf16 = sum[1, i] / 20; off = bf16 / f32 - 1
            printf "steps %3d-%3d  f32 %.4f  bf16 %.4f  %+.3f %%\n", 20 * i + 1, 20 * i + 20, f32, bf16, 100 * off
            if (off < 0) off = -off
            if (off > worst) worst = off
        }
        printf "largest difference %.3f %%, allowed 1 %%\n", 100 * worst
        exit worst > 0.01
    }'

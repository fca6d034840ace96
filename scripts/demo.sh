#!/bin/sh
# The demo: train a small model on the data of scripts/demo-data.sh, kill it and resume it, then use what came out.
# Everything it writes lies in demo/; what an earlier demo left there is replaced.
#
# usage: scripts/demo.sh ZAYA     from the repository's root
set -eu
export LC_ALL=C

zaya=$1
run=demo/run
recipe=recipes/demo-cpu.toml
# Twenty steps after the checkpoint at step 100.
kill_after=120
begin=$(date +%s)

heading() { printf '\n== %s\n' "$1"; }
show() {
    printf '$ zaya'
    for word; do
        case $word in *[!A-Za-z0-9_./:=,-]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
}
# Shows a command of zaya and runs it.
zaya() {
    show "$@"
    "$zaya" "$@"
}
# "step field" lines of metrics.jsonl: the field as it stands there, to the last digit.
field() { sed -n "s/^{\"step\":\([0-9]*\),.*\"$1\":\([^,}]*\).*/\1 \2/p" "$run/metrics.jsonl"; }

rm -rf "$run" demo/results.json demo/hf

heading "Training, killed (SIGKILL) after step $kill_after as if the power had failed"
show pretrain --recipe "$recipe" --set "run.dir=../$run"
status=0
ZAYA_FAIL=step:kill@$kill_after "$zaya" pretrain --recipe "$recipe" --set "run.dir=../$run" || status=$?
if [ "$status" -ne 137 ]; then
    echo "error: expected the training to be killed (status 137), and it ended with status $status" >&2
    exit 1
fi

heading "Going on from the last checkpoint"
zaya pretrain --recipe "$recipe" --set "run.dir=../$run" --resume

heading "Was anything lost? The steps after the checkpoint were computed twice: before the kill and after"
{ field loss; echo; field grad_norm; } | awk '
    NF == 0 { what++; next }
    ($1, what) in first { twice++; if (first[$1, what] != $2) { different++; print "step " $1 ": " first[$1, what] ", then " $2 } else if (!what && shown++ < 3) print "step " $1 ": loss " first[$1, what] ", then " $2; next }
    { first[$1, what] = $2 }
    END { print twice / 2 " steps twice, losses and gradient norms " (different ? "DIFFERENT" : "equal to the last digit"); exit different || !twice }'

heading "Perplexity on crates that were held out"
zaya eval --model "$run" --tasks perplexity --data demo/data/valid --output demo/results.json

heading "A sample"
zaya generate --model "$run" --prompt 'pub fn new(' --max-tokens 200 --seed 1

heading "Export for Hugging Face transformers"
zaya reshard --from "$run" --to hf --output demo/hf

printf '\nThe demo took %s seconds. All of it lies in demo/.\n' $(($(date +%s) - begin))

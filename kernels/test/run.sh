#!/usr/bin/env bash
# Builds the kernels for fibers, the runtime and the tests, and runs them: kernels/test/run.sh [arguments of the tests]
#
#   OUT=folder          for what is built; kernels/build/cpu by default
#   CLANG=clang++-19    compiler
#   BUILD_ONLY=1        builds, and makes libzk_cpu.so too
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
out=${OUT:-$here/build/cpu}
mkdir -p "$out"
clang=${CLANG:-$(command -v clang++-19 || command -v clang++)}
common=(-std=c++20 -O2 -fPIC -fno-strict-aliasing -Wall -Wextra -Wno-unused-function -ffp-contract=off)
# The runtime stands in for the sanitizer's library, so nothing is linked with -fsanitize.
watched=(-fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=false -mllvm -tsan-instrument-atomics=false)

build() {
    local source=$1 object=$2
    shift 2
    if [ -s "$object" ] && [ -z "$(find "$here" -maxdepth 2 \( -name '*.h' -o -samefile "$source" \) -newer "$object")" ]; then return; fi
    "$clang" "${common[@]}" "$@" -c "$source" -o "$object.tmp"
    mv "$object.tmp" "$object"
}

objects=() jobs=()
start() {
    objects+=("$2")
    build "$@" &
    jobs+=($!)
    if [ ${#jobs[@]} -ge "${JOBS:-2}" ]; then
        wait "${jobs[0]}"
        jobs=("${jobs[@]:1}")
    fi
}
for source in "$here"/cpu/*.cpp; do start "$source" "$out/rt-$(basename "$source" .cpp).o"; done
for source in "$here"/*.zk.cpp; do start "$source" "$out/k-$(basename "$source" .zk.cpp).o" "${watched[@]}"; done
library=${#objects[@]}
for source in "$here"/test/*.zk.cpp; do start "$source" "$out/tk-$(basename "$source" .zk.cpp).o" "${watched[@]}"; done
for source in "$here"/test/*.cpp; do
    [[ $source == *.zk.cpp ]] || start "$source" "$out/t-$(basename "$source" .cpp).o"
done
for job in "${jobs[@]}"; do wait "$job"; done
"$clang" "${objects[@]}" -ldl -o "$out/zk-test"
if [ -n "${BUILD_ONLY:-}" ]; then
    "$clang" -shared "${objects[@]:0:$library}" -o "$out/libzk_cpu.so"
    exit 0
fi
exec "$out/zk-test" "$@"

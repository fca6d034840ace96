#!/usr/bin/env bash
# Compiles the kernels with a stock clang, without ROCm: kernels/build.sh [folder for what is built]
# Only says which clang that would be: kernels/build.sh --which
#
#   ARCHS="gfx942 gfx90a"   architectures; by default these, and gfx950 where the compiler knows it
#   CLANG=clang-19          compiler
#
# Makes FOLDER/NAME.ARCH.co of each NAME.zk.cpp, and prints a table of what each kernel takes. Fails when a kernel spills registers
# or uses scratch memory, since either means traffic to HBM that nobody planned.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

clang=${CLANG:-}
if [ -z "$clang" ]; then
    for c in clang-22 clang-20 clang-19 clang /opt/rocm/llvm/bin/clang; do
        if command -v "$c" >/dev/null && "$c" --print-targets 2>/dev/null | grep -q amdgcn; then clang=$c; break; fi
    done
fi
[ -n "$clang" ] || { echo "error: no clang that compiles for AMD; on Debian: apt install clang-19 lld-19" >&2; exit 1; }
if [ "${1:-}" = --which ]; then
    echo "$clang"
    exit
fi
out=${1:-$here/build}
mkdir -p "$out"

flags=(-x hip --cuda-device-only --no-gpu-bundle-output -nogpuinc -nogpulib -std=c++17 -O3 -fno-strict-aliasing -mcode-object-version=5
       -Wall -Wextra -Werror -Wno-unused-function -Wno-pass-failed -Rpass-analysis=kernel-resource-usage)

# Whether the compiler knows an architecture.
knows() { echo | "$clang" "${flags[@]}" --offload-arch="$1" -c -o /dev/null - 2>/dev/null; }

archs=${ARCHS:-}
if [ -z "$archs" ]; then
    archs="gfx942 gfx90a"
    knows gfx950 && archs="$archs gfx950"
fi

# Compiles one file for one architecture, unless that was done with the same headers.
compile() {
    local source=$1 arch=$2 name object
    name=$(basename "$source" .zk.cpp)
    object=$out/$name.$arch.co
    if [ -s "$object" ] && [ -z "$(find "$here" -maxdepth 2 \( -name '*.h' -o -name "$name.zk.cpp" -o -name build.sh \) -newer "$object")" ]; then
        return
    fi
    if ! "$clang" "${flags[@]}" --offload-arch="$arch" "$source" -o "$object.tmp" 2>"$object.log"; then
        cat "$object.log" >&2
        return 1
    fi
    mv "$object.tmp" "$object"
}
export -f compile

jobs=()
for arch in $archs; do
    for source in "$here"/*.zk.cpp; do
        compile "$source" "$arch" &
        jobs+=($!)
        # Two at a time: the machines that build this are small.
        if [ ${#jobs[@]} -ge "${JOBS:-2}" ]; then
            wait "${jobs[0]}" || exit 1
            jobs=("${jobs[@]:1}")
        fi
    done
done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done

# Number of matrix instructions of each kernel.
objdump=$(command -v llvm-objdump-19 || command -v llvm-objdump || command -v /opt/rocm/llvm/bin/llvm-objdump || true)
mfmas() {
    [ -n "$objdump" ] || return 0
    "$objdump" -d "$1" | awk '/^[0-9a-f]+ <.*>:/ { gsub(/[<>:]/, "", $2); name = $2 } /v_mfma/ { n[name]++ } END { for (k in n) print "mfma", k, n[k] }'
}

printf '%-8s %-34s %5s %5s %5s %6s %7s %6s %5s %5s\n' arch kernel VGPR AGPR SGPR LDS scratch spills occ. MFMA
bad=0
for arch in $archs; do
    for source in "$here"/*.zk.cpp; do
        object=$out/$(basename "$source" .zk.cpp).$arch.co
        { mfmas "$object"; cat "$object.log"; } | awk -v arch="$arch" '
            function number() { return $(NF - 1) }
            $1 == "mfma" { mfma[$2] = $3 }
            /Function Name:/ { name = number() }
            / SGPRs:/ { sgpr = number() } / TotalSGPRs:/ { sgpr = number() }
            / VGPRs:/ { vgpr = number() } / AGPRs:/ { agpr = number() }
            /ScratchSize/ { scratch = number() }
            /Occupancy/ { occupancy = number() }
            /SGPRs Spill:/ { spill = number() } /VGPRs Spill:/ { spill += number() }
            /LDS Size/ {
                printf "%-8s %-34s %5d %5d %5d %6d %7d %6d %5d %5d\n", arch, name, vgpr, agpr, sgpr, number(), scratch, spill, occupancy, mfma[name]
                if (scratch > 0 || spill > 0) bad = 1
            }
            END { exit bad }' || bad=1
    done
done
[ $bad = 0 ] || { echo "error: kernels spill registers or use scratch memory" >&2; exit 1; }

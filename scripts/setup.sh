#!/bin/sh
# Sees to what a build needs: Rust, which only you can choose how to install; a C compiler, and clang for the GPU kernels, which are
# installed here. Without that clang the executable trains on the processor only.
set -eu

if ! cargo --version >/dev/null 2>&1; then
    echo "error: zaya is built with Rust, and \`cargo\` does not run here." >&2
    echo "       Install Rust 1.89 or newer (see rust-lang.org, \"Install\"), open a new shell, and try again." >&2
    exit 1
fi

if ! "$(dirname "$0")/../kernels/build.sh" --which >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" -eq 0 ]; then
    echo "installing a compiler for the GPU kernels: clang-19, lld-19, llvm-19"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends clang-19 lld-19 llvm-19; } ||
        echo "note: there is none to install; the executable will be built without GPU kernels" >&2
fi

if command -v cc >/dev/null 2>&1; then exit 0; fi

if ! command -v apt-get >/dev/null 2>&1; then
    echo "error: a C compiler (\`cc\`) is needed, and there is no apt-get here to install one: install gcc or clang, and try again." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "error: a C compiler (\`cc\`) is needed, and only root can install one. Please run, then try again:" >&2
    echo "       sudo apt-get update && sudo apt-get install -y gcc libc6-dev" >&2
    exit 1
fi
echo "installing a C compiler: gcc, libc6-dev"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends gcc libc6-dev ca-certificates

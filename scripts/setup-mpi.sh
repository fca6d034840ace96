#!/bin/sh
# Sees to what a build with `--features mpi` needs beside the rest: an MPI library with mpicc and mpirun, and libclang, with which the
# crate reads MPI's header. What is there is used; what is missing is installed here where that is possible.
set -eu

# libclang is where LIBCLANG_PATH says, or in one of the folders that are searched for it.
has_libclang() {
    if [ -n "${LIBCLANG_PATH:-}" ]; then return 0; fi
    for folder in /usr/lib/llvm-*/lib /usr/lib/*-linux-gnu /usr/lib64 /usr/lib /usr/local/lib; do
        for file in "$folder"/libclang.so* "$folder"/libclang-[0-9]*.so*; do
            if [ -e "$file" ]; then return 0; fi
        done
    done
    return 1
}
missing=
if ! command -v mpicc >/dev/null 2>&1; then missing="$missing libopenmpi-dev"; fi
if ! command -v mpirun >/dev/null 2>&1; then missing="$missing openmpi-bin"; fi
# clang brings the headers that the library needs of its own.
if ! has_libclang; then missing="$missing libclang-dev clang"; fi
if [ -z "$missing" ]; then exit 0; fi

if ! command -v apt-get >/dev/null 2>&1; then
    echo "error: a build with MPI needs \`mpicc\`, \`mpirun\` and libclang; there is no apt-get here to install what is missing." >&2
    echo "       Install an MPI library with its development files, and clang (on Debian they are:$missing), and try again." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "error: a build with MPI needs \`mpicc\`, \`mpirun\` and libclang, and only root can install what is missing. Please run, then" >&2
    echo "       try again: sudo apt-get update && sudo apt-get install -y$missing" >&2
    exit 1
fi
echo "installing what a build with MPI needs:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # one word a package
apt-get install -y -qq --no-install-recommends $missing

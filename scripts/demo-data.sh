#!/bin/sh
# The demo's data: text that every machine which has just built zaya holds, and that is the same everywhere.
#
# The text is the Rust and Markdown of the crates in Cargo.lock, as `cargo metadata` finds them on this machine. The platform is
# fixed, so that the list of crates does not depend on where this runs; a build on x86-64 Linux has downloaded all of them.
#
# usage: scripts/demo-data.sh ZAYA     from the repository's root; writes demo/, and does nothing where that is up to date
set -eu
export LC_ALL=C

zaya=$1
out=demo/data
vocabulary=2048
# Crates of generated tables and bindings: millions of lines that teach nothing.
generated='libc linux-raw-sys'
# Held out for validation, by name, so that no other version of one is trained on.
held_out='either itoa smallvec'
# In 512-byte blocks; larger files are mostly tables.
max_blocks=128

if ! cargo --version >/dev/null 2>&1; then
    echo "error: the demo's text is the source of the crates that zaya is built from, and finding it takes \`cargo\`, which does not run here" >&2
    exit 1
fi
stamp=$(cat Cargo.lock scripts/demo-data.sh | cksum)
if [ -f "$out/stamp" ] && [ "$(cat "$out/stamp")" = "$stamp" ]; then
    echo "demo/ holds the data already"
    exit 0
fi
rm -rf "$out" demo/tokenizer.json
mkdir -p "$out"

printf '\n== Text, tokenizer, token shards\n'
# One line a crate: name-version, tab, folder. Taken from the JSON by hand, since a bare machine has no tool that reads it.
cargo metadata --locked --format-version 1 --filter-platform x86_64-unknown-linux-gnu >"$out/metadata.json"
grep -o '{"name":"[^"]*","version":"[^"]*","id":"' "$out/metadata.json" | sed 's/{"name":"//; s/","version":"/-/; s/",.*//' >"$out/names"
grep -o '"manifest_path":"[^"]*"' "$out/metadata.json" | sed 's/"manifest_path":"//; s/\/Cargo.toml"$//' >"$out/folders"
if [ "$(wc -l <"$out/names")" -lt 2 ] || [ "$(wc -l <"$out/names")" -ne "$(wc -l <"$out/folders")" ]; then
    echo "error: cannot read what \`cargo metadata\` of $(cargo --version) prints: names and folders of the crates do not pair up" >&2
    exit 1
fi
paste "$out/names" "$out/folders" | sort >"$out/crates"

# Whether crate $1 (name-version) bears one of the names that follow.
named() {
    crate=$1
    shift
    for name; do
        case $crate in "$name"-[0-9]*) return 0 ;; esac
    done
    return 1
}

tab=$(printf '\t')
crates=0
while IFS=$tab read -r crate folder; do
    # zaya's own sources are the only ones that change.
    if named "$crate" zaya $generated; then
        continue
    fi
    crates=$((crates + 1))
    list=$out/train.list
    if named "$crate" $held_out; then list=$out/valid.list; fi
    (cd "$folder" && find . -type f \( -name '*.rs' -o -name '*.md' \) ! -iname 'license*' -size "-$((max_blocks + 1))" -size +0) | sort |
        while IFS= read -r file; do printf '%s/%s\n' "$folder" "${file#./}"; done >>"$list"
done <"$out/crates"

echo "text: Rust and Markdown of $crates crates; held out: $held_out"

# Shows a command of zaya and runs it.
zaya() {
    echo "\$ zaya $*"
    "$zaya" "$@"
}
zaya tokenize --train-vocab "$vocabulary" --input-list "$out/train.list" --output demo/tokenizer.json
zaya tokenize --tokenizer demo/tokenizer.json --input-list "$out/train.list" --output "$out/train"
zaya tokenize --tokenizer demo/tokenizer.json --input-list "$out/valid.list" --output "$out/valid"
rm "$out/metadata.json" "$out/names" "$out/folders" "$out/crates"
echo "$stamp" >"$out/stamp"

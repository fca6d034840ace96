//! What `zaya reshard` holds in memory, by its own account of the system's figure (`VmHWM`).
//!
//! Why this bounds any model: the two models here differ in the rows of one tensor alone, 64 against 102 million numbers, and what is
//! held may differ by far less than that tensor has, on every way from format to format. So it does not depend on how large a tensor is;
//! what is left to depend on is how many there are, of which the program keeps a name, a shape and a hash each: some hundred bytes, of
//! some 8,000 tensors in ZAYA1-8B's training state.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Map, Value, json};
use zaya::checkpoint::Checkpoint;
use zaya::hf::{self, Layout, SaveOptions, StoredDtype};
use zaya::model::config::{AttentionKind, ModelConfig};
use zaya::model::numbers::each_piece;
use zaya::model::params::ParamTable;
use zaya::model::presets;

const COLUMNS: usize = 512;
/// 390 MiB in f32.
const MANY_ROWS: usize = 200_000;
/// What is held may grow by this when a tensor grows by 390 MiB: two buffers of 16 MiB, and what the allocator leaves.
const ALLOWANCE: f64 = 64.0;
/// And may be this in all: the executable itself, its buffers, this model.
const WHOLE: f64 = 160.0;

fn config(rows: usize) -> ModelConfig {
    ModelConfig {
        vocab_size: rows,
        hidden_size: COLUMNS,
        num_experts: 2,
        expert_width: 8,
        attention: vec![AttentionKind::Full],
        ..presets::demo_6m()
    }
}

/// The numbers of a row of the embedding; all but some rows are zero, and no file has to hold them. Every one has a bf16.
fn number(row: usize, column: usize) -> f32 {
    if row % 4999 == 17 { ((row + column) % 251) as f32 / 64.0 - 2.0 } else { 0.0 }
}

/// A Hugging Face model in f32, its file full of holes.
fn sparse_model(dir: &Path, rows: usize) {
    let cfg = config(rows);
    let table = ParamTable::new(&cfg);
    // The same model with a few rows gives the config.
    let few = config(64);
    let small = ParamTable::new(&few);
    let options = SaveOptions { dtype: StoredDtype::F32, ..SaveOptions::default() };
    hf::save(dir, &few, &options, |id| Ok(vec![0.0; small.specs[id].numel()])).unwrap();
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["vocab_size"] = rows.into();
    fs::write(path, config.to_string()).unwrap();

    let (mut header, mut at, mut embed) = (Map::new(), 0, 0);
    for tensor in hf::names::file_tensors(&table, Layout::Native) {
        let end = at + 4 * tensor.shape.iter().product::<usize>() as u64;
        if tensor.params == [table.embed] {
            embed = at;
        }
        header.insert(tensor.name, json!({"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = File::create(dir.join("model.safetensors")).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&text).unwrap();
    let data = 8 + text.len() as u64;
    file.set_len(data + at).unwrap();
    for row in (17..rows).step_by(4999) {
        let bytes: Vec<u8> = (0..COLUMNS).flat_map(|column| number(row, column).to_le_bytes()).collect();
        file.write_all_at(&bytes, data + embed + (row * COLUMNS * 4) as u64).unwrap();
    }
}

/// MiB that a conversion held at most.
fn held(place: &Path, from: &str, to: &str, output: &str, more: &[&str]) -> f64 {
    let mut command = crate::program::zaya();
    command.current_dir(place).args(["reshard", "--from", from, "--to", to, "--output", output]).args(more);
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{from} to {output}: {}", String::from_utf8_lossy(&out.stderr));
    let said = text.lines().find_map(|line| line.strip_prefix("most memory held: ")).expect(&text);
    said.strip_suffix(" MiB").unwrap_or_else(|| panic!("{said}")).parse().unwrap()
}

/// Both ways between both formats, and what each held. At the end `back` holds the weights, and the largest folders are gone.
fn all_ways(place: &Path, rows: usize) -> Vec<(&'static str, f64)> {
    sparse_model(&place.join("model"), rows);
    let mut out = vec![("hf to zck", held(place, "model", "zck", "f32", &[]))];
    out.push(("zck to zck", held(place, "f32", "zck", "bf16", &["--dtype", "bf16", "--weights-only"])));
    out.push(("zck to hf", held(place, "f32", "hf", "hf", &["--dtype", "bf16"])));
    differ_in_format_alone(place);
    fs::remove_dir_all(place.join("f32")).unwrap();
    out.push(("hf to hf", held(place, "hf", "hf-legacy", "legacy", &[])));
    fs::remove_dir_all(place.join("hf")).unwrap();
    out.push(("legacy hf to zck", held(place, "legacy", "zck", "back", &["--dtype", "bf16"])));
    out
}

/// `diff` says nothing of memory, so it is given little: less address space than one of the tensors needs.
fn differ_in_format_alone(place: &Path) {
    let mut command = crate::program::zaya();
    command.current_dir(place).args(["reshard", "diff", "f32", "bf16"]);
    let out = with_little_memory(&mut command);
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(said.contains("0 differ"), "{said}{}", String::from_utf8_lossy(&out.stderr));
}

fn with_little_memory(command: &mut Command) -> Output {
    let bytes = 384 << 20;
    assert!(bytes < MANY_ROWS as u64 * COLUMNS as u64 * 4);
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: one system call between fork and exec, on a value of its own.
    unsafe {
        command.pre_exec(move || {
            if libc::setrlimit(libc::RLIMIT_AS, &limit) == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    };
    command.output().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn it_does_not_grow_with_a_tensor() {
    let [few, many] = [64, MANY_ROWS].map(|rows| {
        let place = tempfile::tempdir().unwrap();
        let held = all_ways(place.path(), rows);
        // And what came out is what went in.
        let back = Checkpoint::open(&place.path().join("back")).unwrap();
        let (mut numbers, mut at, mut wrong) = (back.numbers("embed").unwrap(), 0, 0);
        each_piece(&mut numbers, rows * COLUMNS, &mut Vec::new(), &mut |piece| {
            for x in piece {
                wrong += usize::from(*x != number(at / COLUMNS, at % COLUMNS));
                at += 1;
            }
            Ok(())
        })
        .unwrap();
        assert_eq!((at, wrong), (rows * COLUMNS, 0));
        held
    });
    println!("few rows: {few:?}\nmany rows: {many:?}");
    for ((way, few), (_, many)) in few.iter().zip(&many) {
        assert!(many - few < ALLOWANCE && *many < WHOLE, "{way}: {few} MiB, and {many} MiB with a large tensor");
    }
}

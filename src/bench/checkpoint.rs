//! A recipe's state saved and loaded, against what memory and disk do with as many bytes, in alternating rounds.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde::Serialize;

use crate::checkpoint::{self, Checkpoint, Meta};
use crate::model::ParamTable;
use crate::model::init::initial_values;
use crate::recipe::Recipe;
use crate::robust::median;
use crate::tensor::cpu::Cpu;
use crate::train::config::balance_config;
use crate::train::save_options;
use crate::train::staging::Staging;
use crate::train::state::TrainState;

const ROUNDS: usize = 5;
/// Bytes written or read at a time by the plain passes.
const CHUNK_BYTES: usize = 1 << 20;

/// Seconds are medians of the rounds; each fraction is the limit's time over ours, the medians of its rounds' quotients.
#[derive(Debug, Clone, Serialize)]
pub struct CheckpointLine {
    pub dir: PathBuf,
    /// Of all tensors.
    pub bytes: u64,
    pub files: usize,
    pub rounds: usize,
    /// Copying as many bytes from one array to another on all threads.
    pub copy_s: f64,
    /// Copying the state: what a training step waits for.
    pub stall_s: f64,
    /// `stall_s` over `copy_s`.
    pub stall_ratio: f64,
    /// Writing as many bytes to one file, and syncing it.
    pub write_s: f64,
    pub save_s: f64,
    pub save_fraction: f64,
    /// Reading the checkpoint's files from end to end, one after the other.
    pub read_s: f64,
    /// Loading the state, the hash of every byte checked.
    pub load_s: f64,
    pub load_fraction: f64,
    /// Verifying every tensor: what a resume does first.
    pub verify_s: f64,
    pub verify_fraction: f64,
    /// Verifying the files' own hashes too, as `zaya reshard verify` does.
    pub verify_all_s: f64,
    pub verify_all_fraction: f64,
    /// Whether the system was told to forget the files before each pass of reading.
    pub cache_dropped: bool,
}

/// Seconds of one round.
struct Round {
    copy: f64,
    stall: f64,
    write: f64,
    save: f64,
    read: f64,
    load: f64,
    verify: f64,
    verify_all: f64,
}

/// `dir`: where files are written; None = a temporary folder beside the recipe's run.
pub fn measure(recipe: &Recipe, dir: Option<&Path>) -> Result<CheckpointLine> {
    let beside = match dir {
        Some(dir) => dir,
        None => {
            let existing = recipe.run.dir.ancestors().skip(1).find(|a| a.is_dir());
            existing.with_context(|| format!("no folder above {} exists", recipe.run.dir.display()))?
        }
    };
    fs::create_dir_all(beside).with_context(|| format!("creating {}", beside.display()))?;
    let folder = tempfile::Builder::new()
        .prefix(".zaya-bench-")
        .tempdir_in(beside)
        .with_context(|| format!("creating a temporary folder in {}", beside.display()))?;
    let (root, plain) = (folder.path().join("ckpt"), folder.path().join("plain"));

    let model = &recipe.model;
    let table = ParamTable::new(model);
    let backend = Cpu::with_head(recipe.train.precision, recipe.train.head_precision);
    let mut state = TrainState::new(&backend, model, &balance_config(recipe), |id| {
        Ok(initial_values(&table.specs[id], model, recipe.run.seed))
    })?;
    let mut staging = Staging::new(state.tensors())?;
    let bytes = Staging::bytes(staging.tensors());
    let numbers = (bytes / size_of::<f32>() as u64) as usize;
    let (from, mut to) = (vec![1f32; numbers], vec![2f32; numbers]);
    let mut meta = Meta { recipe: recipe.to_toml(), ..Meta::new(model.clone()) };
    state.describe(&mut meta);

    let options = save_options(false, &table, staging.tensors());
    let mut rounds = Vec::with_capacity(ROUNDS);
    let (mut files, mut cache_dropped) = (0, true);
    for round in 0..=ROUNDS {
        let share = numbers.div_ceil(rayon::current_num_threads()).max(1);
        let copy = timed(|| {
            to.par_chunks_mut(share).zip(from.par_chunks(share)).for_each(|(to, from)| to.copy_from_slice(from));
            Ok(())
        })?;
        let stall = timed(|| staging.copy(&state.views(&backend)?))?;
        // The bytes of the state itself, so that no file system has an easier time with one of the two.
        let write = timed(|| write_plain(&plain, &staging))?;
        fs::remove_file(&plain).with_context(|| format!("removing {}", plain.display()))?;
        let mut dir = PathBuf::new();
        let save = timed(|| {
            let slices = staging.slices();
            dir = checkpoint::save_slices(&root, &meta, staging.tensors(), &slices, &options)?.dir;
            Ok(())
        })?;
        let opened = Checkpoint::open(&dir)?;
        let paths: Vec<PathBuf> = opened.manifest().files.iter().map(|f| dir.join(&f.name)).collect();
        files = paths.len();
        cache_dropped &= forget(&paths);
        let read = timed(|| paths.iter().try_for_each(|path| read_plain(path)))?;
        cache_dropped &= forget(&paths);
        let load = timed(|| state.load(&backend, &Checkpoint::open(&dir)?))?;
        cache_dropped &= forget(&paths);
        let verify = timed(|| Checkpoint::open(&dir)?.verify_tensors())?;
        cache_dropped &= forget(&paths);
        let verify_all = timed(|| Checkpoint::open(&dir)?.verify())?;
        fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))?;
        // The first round warms up.
        if round > 0 {
            rounds.push(Round { copy, stall, write, save, read, load, verify, verify_all });
        }
    }
    let of = |f: fn(&Round) -> f64| median(rounds.iter().map(f).collect());
    Ok(CheckpointLine {
        dir: beside.to_path_buf(),
        bytes,
        files,
        rounds: ROUNDS,
        copy_s: of(|r| r.copy),
        stall_s: of(|r| r.stall),
        stall_ratio: of(|r| r.stall / r.copy),
        write_s: of(|r| r.write),
        save_s: of(|r| r.save),
        save_fraction: of(|r| r.write / r.save),
        read_s: of(|r| r.read),
        load_s: of(|r| r.load),
        load_fraction: of(|r| r.read / r.load),
        verify_s: of(|r| r.verify),
        verify_fraction: of(|r| r.read / r.verify),
        verify_all_s: of(|r| r.verify_all),
        verify_all_fraction: of(|r| r.read / r.verify_all),
        cache_dropped,
    })
}

fn timed(f: impl FnOnce() -> Result<()>) -> Result<f64> {
    let began = Instant::now();
    f()?;
    Ok(began.elapsed().as_secs_f64().max(1e-9))
}

fn write_plain(path: &Path, staging: &Staging) -> Result<()> {
    let what = || format!("writing {}", path.display());
    let mut file = File::create(path).with_context(what)?;
    for slice in staging.slices() {
        for chunk in bytemuck::cast_slice::<f32, u8>(slice).chunks(CHUNK_BYTES) {
            file.write_all(chunk).with_context(what)?;
        }
    }
    file.sync_all().with_context(what)
}

fn read_plain(path: &Path) -> Result<()> {
    let what = || format!("reading {}", path.display());
    let mut file = File::open(path).with_context(what)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    while file.read(&mut buffer).with_context(what)? > 0 {}
    Ok(())
}

/// Asks the system to forget what it keeps of these files. They are synced, so that it can.
fn forget(paths: &[PathBuf]) -> bool {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        paths.iter().all(|path| {
            // SAFETY: an open file, advice about all of it; no memory of ours is involved.
            File::open(path).is_ok_and(|f| unsafe { libc::posix_fadvise(f.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) == 0 })
        })
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = paths;
        false
    }
}

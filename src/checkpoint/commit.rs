//! Saving: how a checkpoint becomes visible all at once, or not at all.
//!
//! 1. Everything is written and synced in `step-N.tmp-<uuid>`, the manifest last.
//! 2. The folder is renamed to `step-N`, its parent synced. This rename is the commit.
//! 3. If `step-N` is there already (a run that saves a step again), its folder must not vanish even for a moment: the new
//!    files, which have other names, move in beside the old ones; then the new manifest replaces the old one in one rename,
//!    which is the commit; then the old files go.
//! 4. `LATEST` is replaced. It is a hint for people.
//!
//! With a pool, files that it holds already are not written in step 1 (`super::pool`).

use std::ffi::CString;
use std::fs::{self, File, TryLockError};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};

use super::layout::{Limits, PlannedFile, TensorInfo, plan, rows_of};
use super::manifest::{Contents, Entry, Manifest, Meta};
use super::names::{is_tmp_dir, step_dir, tmp_dir};
use super::pool::{MAX_FILE_BYTES, Pool};
use super::write::{Source, Unsynced, Written, hash_file, sync_dir, write_file, write_small};
use super::{Checkpoint, LATEST, MANIFEST};
use crate::failpoint::{self, WriteFault};

/// The lock that a save holds, so that two processes never write into one folder of checkpoints.
const LOCK: &str = ".lock";
/// A child that is just being started holds copies of its parent's files until it runs its own program, so the lock may look
/// taken for a moment although its holder is gone.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
/// Where locks do not work, a temporary folder this old belongs to a dead writer.
const DEAD_AFTER: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Tensors larger than this are cut into row blocks.
    pub max_part_bytes: u64,
    /// A file is full when the next row block would take it beyond this.
    pub max_file_bytes: u64,
    pub contents: Contents,
    /// Of each tensor, the group of readers that needs it: tensors of two groups share no file. Empty = all are of one.
    pub groups: Vec<usize>,
    /// Refuse numbers that are not finite.
    pub finite: bool,
    /// Keep files in a pool beside the checkpoints, and take from it what is there already; files are small then.
    pub pool: bool,
}

impl Default for SaveOptions {
    /// 512 MiB a row block, 1 GiB a file, a whole training state.
    fn default() -> Self {
        Self {
            max_part_bytes: 512 << 20,
            max_file_bytes: 1 << 30,
            contents: Contents::Training,
            groups: Vec::new(),
            finite: false,
            pool: false,
        }
    }
}

#[derive(Debug)]
pub struct Saved {
    pub dir: PathBuf,
    /// Bytes of all tensor files.
    pub bytes: u64,
    /// Of these, bytes that the pool held already.
    pub reused_bytes: u64,
    pub seconds: f64,
    /// What did not work and does not matter for the checkpoint: sentences for the log.
    pub notes: Vec<String>,
}

/// Saves a checkpoint as `<root>/step-<N>`, durable when this returns. `read(i)` gives the data of `tensors[i]`, `[numel]`;
/// it is called once a tensor (with a pool up to twice for each of its files), and only one tensor is in memory at a time.
///
/// # Errors
/// When the disk is full or cannot be written, when another process is saving here, or when `read` fails. Then no checkpoint
/// has changed, what was written is removed again as far as possible, and the run may go on.
pub fn save(
    root: &Path,
    meta: &Meta,
    tensors: &[TensorInfo],
    read: &mut dyn FnMut(usize) -> Result<Vec<f32>>,
    options: &SaveOptions,
) -> Result<Saved> {
    save_from(root, meta, tensors, &mut Source::read(read), options)
}

/// As [`save`], of tensors that all lie in memory: `values[i]` is the data of `tensors[i]`.
///
/// # Errors
/// As [`save`].
pub fn save_slices(root: &Path, meta: &Meta, tensors: &[TensorInfo], values: &[&[f32]], options: &SaveOptions) -> Result<Saved> {
    save_from(root, meta, tensors, &mut Source::Slices(values), options)
}

fn save_from(root: &Path, meta: &Meta, tensors: &[TensorInfo], source: &mut Source, options: &SaveOptions) -> Result<Saved> {
    let started = Instant::now();
    let name = step_dir(meta.step);
    let saving = || format!("saving the checkpoint {name} into {}", root.display());
    failpoint::hit("ckpt.begin").with_context(saving)?;
    fs::create_dir_all(root).with_context(saving)?;
    let lock = lock(root).with_context(saving)?;
    let mut notes = remove_leftovers(root, lock.is_some());

    let dir = root.join(&name);
    let tmp = root.join(tmp_dir(meta.step));
    let exists = dir.symlink_metadata().is_ok();
    let mut pool = options.pool.then(|| Pool::of(root));
    let bytes = write_dir(&tmp, root, meta, tensors, source, options, exists, pool.as_mut())
        .and_then(|bytes| {
            failpoint::hit("ckpt.before_commit")?;
            if exists {
                replace(&tmp, &dir)?;
            } else {
                fs::rename(&tmp, &dir).with_context(|| format!("renaming {}", tmp.display()))?;
            }
            Ok(bytes)
        })
        .inspect_err(|_| {
            // Best effort: the space may be what the run lacks.
            let _ = fs::remove_dir_all(&tmp);
        })
        .with_context(saving)?;
    failpoint::hit("ckpt.after_commit")?;
    if let Err(e) = write_latest(root, &name) {
        notes.push(format!("the hint {LATEST} could not be written: {e:#}"));
    }
    // Both renames.
    sync_dir(root).with_context(|| format!("{name} is complete, but may not outlive a power cut"))?;
    let reused_bytes = pool.as_ref().map_or(0, |pool| pool.reused_bytes);
    notes.extend(pool.into_iter().flat_map(|pool| pool.notes));
    Ok(Saved { dir, bytes, reused_bytes, seconds: started.elapsed().as_secs_f64(), notes })
}

/// Writes a complete checkpoint into the new folder `tmp`; its bytes. `space` is a folder of the same file system.
#[allow(clippy::too_many_arguments)]
pub(super) fn write_dir(
    tmp: &Path,
    space: &Path,
    meta: &Meta,
    tensors: &[TensorInfo],
    source: &mut Source,
    options: &SaveOptions,
    distinct_names: bool,
    mut pool: Option<&mut Pool>,
) -> Result<u64> {
    let suffix = if distinct_names { format!("-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]) } else { String::new() };
    let most = if pool.is_some() { MAX_FILE_BYTES } else { u64::MAX };
    let limits = Limits { part_bytes: options.max_part_bytes.min(most), file_bytes: options.max_file_bytes.min(most) };
    ensure_space(space, tensors)?;
    let files = plan(tensors, &options.groups, limits, &suffix)?;
    fs::create_dir(tmp).with_context(|| format!("creating {}", tmp.display()))?;
    failpoint::hit("ckpt.tmp_created")?;

    let mut entries: Vec<Entry> = tensors
        .iter()
        .map(|t| Entry { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone(), parts: Vec::new() })
        .collect();
    let mut written = Vec::with_capacity(files.len());
    // The disk still works on a file while the next one is written: of no more than two, so that memory is not filled by what waits for it.
    let mut before: Option<Unsynced> = None;
    for file in &files {
        let (entry, parts) = match &mut pool {
            None => {
                let (written, unsynced) = write_file(tmp, file, tensors, source, options.finite)?;
                if let Some(before) = before.replace(unsynced) {
                    before.sync()?;
                }
                written
            }
            Some(pool) => write_or_take(pool, tmp, file, tensors, source, options.finite)?,
        };
        written.push(entry);
        for (tensor, part) in parts {
            entries[tensor].parts.push(part);
        }
    }
    if let Some(last) = before {
        last.sync()?;
    }
    failpoint::hit("ckpt.before_manifest")?;
    let manifest = Manifest::new(meta, options.contents, entries, written)?;
    let text = manifest.to_text()?;
    let (half_done, done) = (tmp.join("manifest.json.tmp"), tmp.join(MANIFEST));
    write_small(&half_done, text.as_bytes(), failpoint::hit_write("ckpt.manifest_write")?)?;
    failpoint::hit("ckpt.before_manifest_rename")?;
    fs::rename(&half_done, &done).with_context(|| format!("renaming {}", half_done.display()))?;
    sync_dir(tmp)?;
    // What will be believed later must be believable now: the manifest is read back, the files' sizes are compared.
    Checkpoint::open(tmp)?;
    Ok(manifest.total_bytes())
}

/// Takes a file's content from the pool, or writes it and puts it there.
fn write_or_take(
    pool: &mut Pool,
    tmp: &Path,
    file: &PlannedFile,
    tensors: &[TensorInfo],
    source: &mut Source,
    finite: bool,
) -> Result<Written> {
    let path = tmp.join(&file.name);
    let known = hash_file(file, tensors, source, finite)?;
    if pool.take(&known.0, &path)? {
        return Ok(known);
    }
    let (written, unsynced) = write_file(tmp, file, tensors, source, finite)?;
    unsynced.sync()?;
    pool.put(&written.0, &path)?;
    Ok(written)
}

/// Commits `tmp` into the folder `dir` that exists already: at every moment one of the two manifests holds, and all the
/// files that it names are there.
fn replace(tmp: &Path, dir: &Path) -> Result<()> {
    let fresh = Checkpoint::open(tmp)?;
    for f in &fresh.manifest().files {
        failpoint::hit("ckpt.replace_file")?;
        fs::rename(tmp.join(&f.name), dir.join(&f.name)).with_context(|| format!("moving {} into {}", f.name, dir.display()))?;
    }
    sync_dir(dir)?;
    failpoint::hit("ckpt.before_replace")?;
    fs::rename(tmp.join(MANIFEST), dir.join(MANIFEST)).with_context(|| format!("replacing the manifest of {}", dir.display()))?;
    sync_dir(dir)?;
    failpoint::hit("ckpt.after_replace")?;
    // From here on the old data is garbage, and so is what an earlier attempt may have left.
    for entry in fs::read_dir(dir)?.flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|n| n == "manifest.json.tmp" || n.ends_with(".safetensors"));
        if ours && fresh.manifest().files.iter().all(|f| name != f.name.as_str()) {
            let _ = fs::remove_file(entry.path());
        }
    }
    let _ = fs::remove_dir_all(tmp);
    Ok(())
}

fn write_latest(root: &Path, name: &str) -> Result<()> {
    failpoint::hit("ckpt.before_latest")?;
    let half_done = root.join("LATEST.tmp");
    write_small(&half_done, format!("{name}\n").as_bytes(), WriteFault::None)?;
    failpoint::hit("ckpt.before_latest_rename")?;
    fs::rename(&half_done, root.join(LATEST)).with_context(|| format!("renaming {}", half_done.display()))
}

/// Takes the lock of a folder of checkpoints; None where the file system has no locks.
pub(super) fn lock(root: &Path) -> Result<Option<File>> {
    let path = root.join(LOCK);
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))?;
    let started = Instant::now();
    let mut outcome = file.try_lock();
    while matches!(outcome, Err(TryLockError::WouldBlock)) && started.elapsed() < LOCK_PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
        outcome = file.try_lock();
    }
    match outcome {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => bail!("another process is saving into {} right now", root.display()),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Deletes what dead writers left. Under the lock every temporary folder is a dead writer's; without one, an old one is.
fn remove_leftovers(root: &Path, locked: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let Ok(entries) = fs::read_dir(root) else { return notes };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|n| is_tmp_dir(n)) else { continue };
        let old = || {
            let modified = entry.metadata().and_then(|m| m.modified()).unwrap_or_else(|_| SystemTime::now());
            modified.elapsed().is_ok_and(|age| age > DEAD_AFTER)
        };
        if locked || old() {
            match fs::remove_dir_all(entry.path()) {
                Ok(()) => notes.push(format!("removed {name}, which an interrupted save had left")),
                Err(e) => notes.push(format!("could not remove {name}, which an interrupted save had left: {e}")),
            }
        }
    }
    notes
}

/// Refuses a save that would fill the disk: 1.1 times the tensors' bytes must be free. A save that ends in a full disk
/// would leave nothing to the other users of it either.
fn ensure_space(dir: &Path, tensors: &[TensorInfo]) -> Result<()> {
    let bytes_of = |t: &TensorInfo| rows_of(&t.shape).and_then(|(rows, row)| (rows * row).checked_mul(t.dtype.bytes()));
    let bytes = tensors.iter().try_fold(0u64, |sum, t| sum.checked_add(bytes_of(t)?));
    let needed = bytes.and_then(|b| (b / 10).checked_mul(11)?.checked_add(1 << 20)).unwrap_or(u64::MAX);
    let free = free_bytes(dir)?;
    ensure!(
        needed <= free,
        "not enough space: the checkpoint needs {} MiB, {} MiB are free on the file system of {}",
        needed >> 20,
        free >> 20,
        dir.display()
    );
    Ok(())
}

/// Bytes that this user may still write on a folder's file system.
pub fn free_bytes(dir: &Path) -> Result<u64> {
    let path = CString::new(dir.as_os_str().as_bytes()).context("a path with a NUL byte")?;
    // SAFETY: `path` is a C string, and `stat` is only read after the call that fills it has succeeded.
    unsafe {
        let mut stat = std::mem::zeroed::<libc::statvfs>();
        if libc::statvfs(path.as_ptr(), &mut stat) != 0 {
            return Err(std::io::Error::last_os_error())
                .with_context(|| format!("asking for the free space of {}", dir.display()));
        }
        #[allow(clippy::unnecessary_cast)]
        Ok((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64))
    }
}

//! Whether a folder's file system does what checkpoints rely on: rename over a file, sync, locks, hard links.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{Finding, Topic, gib};
use crate::checkpoint::free_bytes;

/// Bytes written and synced to see how fast that is.
const SAMPLE_BYTES: usize = 64 << 20;

pub fn examine(dir: &Path) -> Result<Vec<Finding>> {
    ensure!(dir.is_dir(), "{} is no folder: name one where runs are to write, with --dir", dir.display());
    let line = |what: &str, found: String| Finding::new(Topic::Files, what, found);
    let kind = kind(dir).unwrap_or("a file system that does not say");
    let free = free_bytes(dir).map_or_else(|_| "unknown space".into(), gib);
    let mut out = vec![line("folder", format!("{} on {kind}, {free} free", dir.display()))];
    let folder = match tempfile::Builder::new().prefix(".zaya-doctor-").tempdir_in(dir) {
        Ok(folder) => folder,
        Err(e) => {
            out.push(line("writing", "refused".into()).advise(format!("nothing can be written there: {e}")));
            return Ok(out);
        }
    };
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let mut check = |what: &str, outcome: Result<()>, advice: &str| {
        out.push(match outcome {
            Ok(()) => line(what, "works".into()),
            Err(e) => line(what, format!("does not work: {e:#}")).advise(advice),
        });
    };
    check(
        "renaming over a file, syncing the folder",
        rename(folder.path(), &a, &b),
        "checkpoints cannot be committed safely here: use a local disk",
    );
    check("locks", lock(&a), "two runs in one directory will not notice each other");
    check("hard links", link(&a, &folder.path().join("c")), "checkpoint.incremental keeps no pool here: files are written whole");
    match write_rate(&folder.path().join("d")) {
        Ok(rate) => out.push(line("writing and syncing", format!("{:.0} MB/s ({} MiB)", rate / 1e6, SAMPLE_BYTES >> 20))),
        Err(e) => out.push(line("writing and syncing", format!("fails: {e:#}")).advise("is the disk full?")),
    }
    Ok(out)
}

fn rename(dir: &Path, a: &Path, b: &Path) -> Result<()> {
    fs::write(a, "old")?;
    fs::write(b, "new")?;
    fs::rename(b, a)?;
    File::open(dir)?.sync_all().context("syncing")?;
    ensure!(fs::read(a)? == b"new", "the old content is still there");
    Ok(())
}

fn lock(path: &Path) -> Result<()> {
    let (first, second) = (File::open(path)?, File::open(path)?);
    first.try_lock().context("taking a lock")?;
    ensure!(second.try_lock().is_err(), "a second lock was given");
    Ok(())
}

fn link(from: &Path, to: &Path) -> Result<()> {
    fs::hard_link(from, to)?;
    ensure!(fs::read(to)? == fs::read(from)?, "the linked file is another one");
    Ok(())
}

/// Bytes a second.
fn write_rate(path: &Path) -> Result<f64> {
    let block: Vec<u8> = (0..1usize << 20).map(|i| ((i * 31) >> 3) as u8).collect();
    let began = Instant::now();
    let mut file = File::create(path)?;
    for _ in 0..SAMPLE_BYTES / block.len() {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(SAMPLE_BYTES as f64 / began.elapsed().as_secs_f64().max(1e-9))
}

/// The file system's kind.
fn kind(dir: &Path) -> Option<&'static str> {
    let path = CString::new(dir.as_os_str().as_bytes()).ok()?;
    // SAFETY: `path` is a C string, and `stat` a place for the answer, which is only read after the call has succeeded.
    let stat = unsafe {
        let mut stat = std::mem::zeroed::<libc::statfs>();
        if libc::statfs(path.as_ptr(), &mut stat) != 0 {
            return None;
        }
        stat
    };
    // From statfs(2).
    let name = match stat.f_type {
        0xEF53 => "ext2/3/4",
        0x5846_5342 => "XFS",
        0x9123_683E => "Btrfs",
        0x2FC1_2FC1 => "ZFS",
        0x0102_1994 => "tmpfs (memory: gone after a restart)",
        0x6969 => "NFS",
        0x0BD0_0BD0 => "Lustre",
        0x794C_7630 => "overlayfs",
        _ => "another file system",
    };
    Some(name)
}

//! Several shards of bounded size, and going on where a killed run stopped.
//!
//! A shard is closed before the document that would make it larger than wanted, and says in its sidecar which records it was made
//! from. Since everything about a set follows from its inputs and options, a run that goes on after the last whole shard writes
//! the bytes that an undisturbed one would have written.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::json;

use super::tally::{Taken, Tally, source_of};
use super::{Seen, Selection, Task, TokenizeJob, Watcher, suffixes, tool};
use crate::data::companions::{Companion, Origin};
use crate::data::manifest::{FORMAT, MOST_SHARDS, Manifest, SHARD_DIGITS, ShardEntry, manifest_path, shard_prefix};
use crate::data::shard::{prefix_of, with_suffix};
use crate::data::sidecar::{Part, Sidecar, SourceInfo};
use crate::data::upkeep::check_hashes;
use crate::data::writer::{self, ShardWriter, Tokens, check_prefix};
use crate::error::bad_input;
use crate::text::corpus::Place;

/// When a shard is full. A document that is larger alone gets a shard of its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShardLimits {
    pub tokens: Option<u64>,
    /// Of the `.bin`.
    pub bytes: Option<u64>,
}

impl ShardLimits {
    fn allow(&self, tokens: u64, bytes: u64) -> bool {
        self.tokens.is_none_or(|most| tokens <= most) && self.bytes.is_none_or(|most| bytes <= most)
    }
}

/// Writes the shards `output_00000`, `output_00001`, ... and `output.manifest.json`. With `resume`, whole shards that are there already
/// are verified and kept.
pub fn tokenize_set(
    job: &TokenizeJob,
    selection: &Selection,
    companions: &[Companion],
    limits: ShardLimits,
    resume: bool,
    watcher: &mut impl Watcher,
) -> Result<Manifest> {
    let prefix = prefix_of(&job.output);
    check_prefix(&prefix, true)?;
    let manifest_file = manifest_path(&prefix);
    if !resume && !job.overwrite {
        let there =
            [manifest_file.clone()].into_iter().chain(suffixes(companions).map(|s| with_suffix(&shard_prefix(&prefix, 0), s)));
        if let Some(path) = there.into_iter().find(|path| path.exists()) {
            let text = "exists: go on with its set by --resume, replace it with --overwrite, or choose another --output";
            return Err(bad_input(format!("{} {text}", path.display())));
        }
    }
    let task = Task::prepare(job, selection, &files_at_stake(job, &prefix, &manifest_file), None)?;
    // Held until the end: one process writes a set.
    let draft = Draft { file: writer::create_temporary(&with_suffix(&manifest_file, ".tmp"))?, path: manifest_file.clone() };
    let set = set_hash(&task, companions, limits);
    let kept = if resume { kept_shards(&prefix, &set, watcher)? } else { Vec::new() };
    if !resume && job.overwrite {
        writer::remove_if_there(&manifest_file)?;
        remove_from(&prefix, 0)?;
    }
    let mut tally = Tally::new(&job.corpus, watcher);
    let from = kept.last().and_then(|s| Some(s.part.as_ref()?.to)).unwrap_or_default();
    let mut run = Run {
        task: &task,
        companions,
        limits,
        prefix: prefix.clone(),
        set,
        names: task.source_names(),
        entries: Vec::new(),
        sources: job.corpus.inputs.iter().map(source_of).collect(),
        unknown_tokens: 0,
        from,
        shard: None,
    };
    kept.iter().try_for_each(|sidecar| run.keep(sidecar))?;
    if from.input < job.corpus.inputs.len() {
        let mut seen = if selection.dedup && from > Place::default() { task.texts_before(from)? } else { Seen::default() };
        let result = task.run(from, &mut seen, &mut tally, |tally, place, taken, tokens| run.push(tally, place, taken, tokens));
        result.map_err(|e| {
            let shards = run.entries.len();
            e.context(format!("tokenizing stopped; {shards} shards are complete, and --resume goes on after them"))
        })?;
    }
    let manifest = run.finish(&mut tally)?;
    draft.publish(&manifest)?;
    remove_from(&prefix, manifest.shards.len() as u32)?;
    Ok(manifest)
}

/// Files that the set replaces, or removes as what an older one has left, as far as they can be files that are read: the manifest, and
/// inputs with the names of a shard's files.
fn files_at_stake(job: &TokenizeJob, prefix: &Path, manifest: &Path) -> Vec<PathBuf> {
    let stem = format!("{}_", prefix.file_name().unwrap_or_default().to_string_lossy());
    let is_of_a_shard = |name: &str| {
        let rest = name.strip_prefix(&stem).and_then(|rest| rest.split_at_checked(SHARD_DIGITS));
        rest.is_some_and(|(number, suffix)| {
            number.bytes().all(|b| b.is_ascii_digit()) && writer::all_suffixes().any(|known| known == suffix)
        })
    };
    let read = job.corpus.inputs.iter().map(|input| &input.path).chain([&job.tokenizer]);
    let named = read.filter_map(|path| path.file_name()?.to_str()).filter(|name| is_of_a_shard(name));
    named.map(|name| prefix.with_file_name(name)).chain([manifest.to_path_buf()]).collect()
}

/// Hash of all that decides about the bytes of the set.
fn set_hash(task: &Task<'_>, companions: &[Companion], limits: ShardLimits) -> String {
    let corpus = &task.job.corpus;
    let inputs: Vec<_> =
        corpus.inputs.iter().map(|i| json!([i.path.to_string_lossy(), i.file_bytes, format!("{:?}", i.layout)])).collect();
    let mut all = json!([
        tool(),
        task.encoder.sha256(),
        task.encoder.eod().map(|(_, id)| id),
        corpus.field,
        format!("{:?}", corpus.on_bad),
        inputs,
        task.selection.info(),
        task.selection.max_record_bytes,
        format!("{companions:?}"),
        [limits.tokens, limits.bytes],
    ]);
    if let (Some(chat), Some(job), Some(all)) = (&task.chat, &task.job.chat, all.as_array_mut()) {
        all.push(json!([chat.template().sha256(), format!("{:?}", job.date), format!("{:?}", job.options)]));
    }
    crate::text::sha256_hex(all.to_string().as_bytes())
}

/// Sidecars of the shards that an earlier run of the same set has completed, up to the first that is not whole.
fn kept_shards(prefix: &Path, set: &str, watcher: &mut impl Watcher) -> Result<Vec<Sidecar>> {
    let mut kept: Vec<Sidecar> = Vec::new();
    for number in 0..MOST_SHARDS {
        let shard = shard_prefix(prefix, number);
        if !with_suffix(&shard, ".idx").exists() {
            break;
        }
        let Some(sidecar) = Sidecar::read(&with_suffix(&shard, ".json"))? else { break };
        let Some(part) = &sidecar.part else { break };
        if part.set != set {
            return Err(bad_input(format!(
                "--resume: {}.json was written from other inputs or with other options; repeat the command that was stopped, or begin anew \
                 with --overwrite",
                shard.display()
            )));
        }
        let follows = part.from == kept.last().and_then(|s| Some(s.part.as_ref()?.to)).unwrap_or_default();
        if let Err(e) = check_hashes(&shard, &sidecar) {
            watcher.warn(&format!("--resume: {e:#}; it is written again, with those after it"));
            break;
        }
        if !follows || part.number != number {
            break;
        }
        kept.push(sidecar);
    }
    Ok(kept)
}

/// Removes shards numbered `first` and up, as an older, longer set may have left them.
fn remove_from(prefix: &Path, first: u32) -> Result<()> {
    for number in first..MOST_SHARDS {
        let shard = shard_prefix(prefix, number);
        if !super::SUFFIXES.iter().any(|s| with_suffix(&shard, s).exists()) {
            break;
        }
        writer::remove_shard(&shard)?;
    }
    Ok(())
}

/// The manifest under its temporary name, which goes unless it is published.
struct Draft {
    file: File,
    path: PathBuf,
}

impl Draft {
    fn publish(self, manifest: &Manifest) -> Result<()> {
        writer::publish_file(&self.file, &self.path, (serde_json::to_string_pretty(manifest)? + "\n").as_bytes())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After it was published there is no such file any more.
        let _ = std::fs::remove_file(with_suffix(&self.path, ".tmp"));
    }
}

/// The set while it is written.
struct Run<'a> {
    task: &'a Task<'a>,
    companions: &'a [Companion],
    limits: ShardLimits,
    prefix: PathBuf,
    set: String,
    names: Vec<String>,
    entries: Vec<ShardEntry>,
    /// Counts of all complete shards.
    sources: Vec<SourceInfo>,
    unknown_tokens: u64,
    /// First record of the shard in work.
    from: Place,
    /// The shard in work; none before its first document.
    shard: Option<ShardWriter>,
}

impl Run<'_> {
    fn number(&self) -> u32 {
        self.entries.len() as u32
    }

    fn name(&self) -> String {
        let prefix = shard_prefix(&self.prefix, self.number());
        prefix.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned())
    }

    /// Counts a shard of an earlier run.
    fn keep(&mut self, sidecar: &Sidecar) -> Result<()> {
        self.entries.push(ShardEntry::of(self.name(), sidecar)?);
        let first = sidecar.part.as_ref().map_or(0, |p| p.from.input);
        for (total, source) in self.sources.iter_mut().skip(first).zip(&sidecar.sources) {
            total.add(source);
        }
        self.unknown_tokens += sidecar.unknown_tokens;
        Ok(())
    }

    fn push<W: Watcher>(&mut self, tally: &mut Tally<'_, W>, place: Place, taken: &Taken, tokens: Tokens<'_>) -> Result<()> {
        if let Some(shard) = &self.shard
            && !self.limits.allow(shard.tokens() + taken.tokens, shard.bytes() + tokens.bytes.len() as u64)
        {
            self.close(tally, place)?;
        }
        let shard = match &mut self.shard {
            Some(shard) => shard,
            None => self.shard.insert(self.create()?),
        };
        shard.push_tokens(tokens, &Origin { source: &self.names[place.input], line: place.line })?;
        tally.take(place, taken);
        Ok(())
    }

    fn create(&self) -> Result<ShardWriter> {
        if self.number() >= MOST_SHARDS {
            return Err(bad_input(format!("the set needs more than {MOST_SHARDS} shards: give them more tokens")));
        }
        self.task.create(&shard_prefix(&self.prefix, self.number()), true, self.companions)
    }

    /// Publishes the shard in work, whose records end before `to`.
    fn close<W: Watcher>(&mut self, tally: &mut Tally<'_, W>, to: Place) -> Result<()> {
        let shard = match self.shard.take() {
            Some(shard) => shard,
            None => self.create()?,
        };
        let end = if to.is_inside() { to.input + 1 } else { to.input };
        let mut sidecar = self.task.sidecar(tally);
        sidecar.sources = tally.sources[self.from.input..end].to_vec();
        sidecar.part = Some(Part { set: self.set.clone(), number: self.number(), from: self.from, to });
        shard.publish_from(&sidecar.tokenizer.file.clone(), |written| {
            sidecar.set_written(written);
            sidecar.to_text()
        })?;
        self.keep(&sidecar)?;
        let inputs = &self.task.job.corpus.inputs;
        tally.sources = inputs.iter().map(source_of).collect();
        (tally.unknown_tokens, tally.learnt_tokens, tally.trimmed) = (0, 0, 0);
        self.from = to;
        Ok(())
    }

    /// Publishes the last shard; returns the manifest.
    fn finish<W: Watcher>(&mut self, tally: &mut Tally<'_, W>) -> Result<Manifest> {
        let inputs = self.task.job.corpus.inputs.len();
        if self.shard.is_some() || self.entries.is_empty() {
            if self.shard.is_none() {
                tally.check_some_use()?;
                tally.watcher.warn("the inputs hold no text: the only shard has no documents");
            }
            self.close(tally, Place { input: inputs, ..Place::default() })?;
        }
        let all = SourceInfo::sum(&self.sources);
        Ok(Manifest {
            format: FORMAT.into(),
            tool: tool(),
            tokenizer: self.task.tokenizer_info(),
            eod: self.task.eod_info(),
            dtype: self.task.token_type.name().into(),
            selection: self.task.selection.info(),
            set: self.set.clone(),
            documents: all.documents,
            tokens: all.tokens,
            text_bytes: all.text_bytes,
            skipped: all.skipped,
            replaced: all.replaced,
            unknown_tokens: self.unknown_tokens,
            shards: std::mem::take(&mut self.entries),
            sources: std::mem::take(&mut self.sources),
        })
    }
}

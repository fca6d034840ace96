//! What a run is checked for before its first step: another run's checkpoint, a changed recipe, data and tokenizer that do
//! not belong together, weights of another shape. Whatever is refused here is refused before anything is written.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Options;
use super::lock::RunLock;
use super::validate::NamedSet;
use crate::checkpoint::remote::Remote;
use crate::checkpoint::{self, CKPT_DIR, Checkpoint, Contents, Meta};
use crate::data::dataset::Dataset;
use crate::data::{Loader, ValidationSet};
use crate::error::bad_input;
use crate::hf;
use crate::model::ParamTable;
use crate::recipe::{self, Recipe};

/// Takes a run directory that is there. None where there is none: a start that is refused leaves none behind, and
/// [`claim`] makes it later.
pub fn claim_existing(dir: &Path, options: &Options) -> Result<Option<RunLock>> {
    if dir.exists() && !dir.is_dir() {
        return Err(bad_input(format!("`run.dir` {} is a file: expected a directory, or nothing at all", dir.display())));
    }
    if !options.resume {
        // Before the lock, which would leave a file.
        refuse_used(dir)?;
    }
    dir.is_dir().then(|| RunLock::take(dir)).transpose()
}

/// Makes and takes a run directory that was not there when the start began.
pub fn claim(dir: &Path) -> Result<RunLock> {
    std::fs::create_dir_all(dir)
        .map_err(|e| bad_input(format!("cannot make the run directory {}: {e}; choose another run.dir", dir.display())))?;
    let lock = RunLock::take(dir)?;
    // Another process may have come, trained and gone meanwhile.
    refuse_used(dir)?;
    Ok(lock)
}

fn refuse_used(dir: &Path) -> Result<()> {
    let root = dir.join(CKPT_DIR);
    match checkpoint::list(&root)?.first() {
        Some(step) => Err(bad_input(format!(
            "{} already holds a checkpoint of step {step}: go on with it by --resume, or choose another run.dir",
            root.display()
        ))),
        None => Ok(()),
    }
}

/// A new run does not upload to where another one has: step by step it would take that one's place.
fn refuse_used_store(recipe: &Recipe) -> Result<()> {
    let Some(url) = &recipe.checkpoint.upload else { return Ok(()) };
    match Remote::open(url, recipe.checkpoint.upload_retry.min(ASK_STORE))?.steps() {
        Ok(steps) => match steps.first() {
            Some(step) => Err(bad_input(format!(
                "checkpoint.upload: {url} already holds a checkpoint of step {step}: go on with it by --resume, or choose another place"
            ))),
            None => Ok(()),
        },
        Err(e) => {
            tell!("warning: {e:#}; whether another run has uploaded there is not known, and training begins");
            Ok(())
        }
    }
}

/// How long a start waits for a store that does not answer.
const ASK_STORE: Duration = Duration::from_secs(10);

/// The checkpoint to go on from; None = step 0. Where the run directory holds none it is fetched: from `--resume-from`, else from
/// where the recipe uploads to.
pub fn find_start(recipe: &Recipe, options: &Options) -> Result<Option<Checkpoint>> {
    let dir = &recipe.run.dir;
    if !options.resume {
        refuse_used(dir)?;
        refuse_used_store(recipe)?;
        return Ok(None);
    }
    let root = dir.join(CKPT_DIR);
    let local = checkpoint::latest_valid(&root)?;
    local.skipped.iter().for_each(|s| tell!("warning: {s}"));
    let source = options.resume_from.as_deref().map(url_of).or_else(|| recipe.checkpoint.upload.clone());
    let found = match source {
        Some(url) if local.checkpoint.is_none() => fetch_start(&url, &root, recipe, options.resume_from.is_some())?,
        _ => None,
    };
    if let (Some(from), Some(local)) = (&options.resume_from, &local.checkpoint) {
        tell!(
            "note: --resume-from {from} is for a run directory without a checkpoint: the run goes on from step {}",
            local.meta().step
        );
    }
    match local.checkpoint.or(found) {
        Some(c) if c.contents() != Contents::Training => {
            Err(bad_input(format!("{} holds weights only, and no optimizer state to resume with", c.dir().display())))
        }
        Some(c) => Ok(Some(c)),
        None if !local.skipped.is_empty() => bail!(
            "{} holds {} checkpoints, and none of them is valid (see the warnings). Move them away to start at step 0",
            root.display(),
            local.skipped.len()
        ),
        None => {
            tell!("--resume: {} holds no checkpoint yet, so this run starts at step 0", root.display());
            Ok(None)
        }
    }
}

/// A folder as the URL of a store: a run directory means its checkpoints.
fn url_of(source: &str) -> String {
    if source.contains("://") {
        return source.into();
    }
    let path = std::path::absolute(source).unwrap_or_else(|_| source.into());
    let inner = path.join(CKPT_DIR);
    url::Url::from_file_path(if inner.is_dir() { inner } else { path }).map_or_else(|()| source.into(), String::from)
}

/// Fetches the newest whole checkpoint of a store. That there is none is an error only where the user has `asked` for this store.
fn fetch_start(url: &str, root: &Path, recipe: &Recipe, asked: bool) -> Result<Option<Checkpoint>> {
    let remote = Remote::open(url, recipe.checkpoint.upload_retry)?;
    tell!("--resume: {} holds no valid checkpoint; looking for one in {url}", root.display());
    // Refused before anything of it is here.
    let wanted = |meta: &Meta| refuse_other_run(recipe, meta, url);
    let found = remote.fetch_latest(root, &wanted)?;
    found.skipped.iter().for_each(|s| tell!("warning: {s}"));
    match &found.checkpoint {
        Some(c) => tell!("fetched {} from {url}, and verified it", c.dir().display()),
        None if asked => {
            return Err(bad_input(format!(
                "--resume-from: {url} holds no valid checkpoint{}",
                match found.skipped.len() {
                    0 => "",
                    _ => " (see the warnings)",
                }
            )));
        }
        // A run that would begin anew beside what it has uploaded would write over it.
        None if !found.skipped.is_empty() => bail!(
            "{url} holds {} checkpoints, and none of them is valid (see the warnings). Move them away, or upload to another place, to start at step 0",
            found.skipped.len()
        ),
        None => {}
    }
    Ok(found.checkpoint)
}

/// Refuses to go on with a recipe that makes it another run.
pub fn refuse_other_run(recipe: &Recipe, from: &Meta, place: &str) -> Result<()> {
    let differences = changes(recipe, from, place)?;
    if !differences.refused.is_empty() {
        return Err(bad_input(format!(
            "resuming {}: the recipe is not the one that the run was started with:\n  - {}\nSet these back, or start a new run \
             with another run.dir (docs/RECIPE.md lists what may change)",
            place,
            differences.refused.join("\n  - ")
        )));
    }
    Ok(())
}

/// Tells what has changed and may.
pub fn tell_changes(recipe: &Recipe, from: &Checkpoint) -> Result<()> {
    changes(recipe, from.meta(), &from.dir().display().to_string())?.allowed.iter().for_each(|d| tell!("note: {d}"));
    Ok(())
}

fn changes(recipe: &Recipe, from: &Meta, place: &str) -> Result<recipe::ResumeDifferences> {
    Ok(recipe.resume_differences(&recipe::load_resolved(&format!("{place} (its recipe)"), &from.recipe)?))
}

/// A model to take weights from; its parameters must be those of the recipe's model.
pub fn open_init(dir: &Path, recipe: &Recipe) -> Result<hf::HfModel> {
    let model = hf::load(dir)?;
    if let Some(detail) = ParamTable::new(&recipe.model).difference_from(&model.table) {
        return Err(bad_input(format!(
            "--init-from hf:{}: the model there has another shape than the recipe's `model`: {detail}",
            dir.display()
        )));
    }
    if model.config != recipe.model {
        tell!("note: {} was trained with other settings (RoPE, norms, skip mode or token ids); the recipe's hold", dir.display());
    }
    Ok(model)
}

pub fn open_validation(recipe: &Recipe) -> Result<Vec<NamedSet>> {
    let (train, data) = (&recipe.train, &recipe.data);
    let open = |s: &recipe::DataSource| {
        let set = ValidationSet::open(&s.shards, train.seq_len, data.document_mask, recipe.model.vocab_size)
            .with_context(|| format!("held-out data `{}`", s.name))?;
        Ok(NamedSet { name: s.name.clone(), set: set.eod_mask_loss(data.eod_mask_loss) })
    };
    data.validation.iter().map(open).collect()
}

/// Hash of the recipe's tokenizer file, which must be the one that wrote the shards, where they say which.
pub fn check_tokenizer(recipe: &Recipe, loader: &Loader, validation: &[NamedSet]) -> Result<Option<String>> {
    let training = loader.source_names().enumerate().map(|(i, name)| (name, loader.dataset(i)));
    let held_out = validation.iter().map(|v| (v.name.as_str(), v.set.dataset()));
    let all: Vec<(&str, &Dataset)> = training.chain(held_out).collect();
    for (name, data) in &all {
        check_vocabulary(name, data, recipe.model.vocab_size)?;
    }
    let of_shards: Vec<(&str, &str)> = all.iter().filter_map(|(name, data)| Some((*name, data.tokenizer_sha256()?))).collect();
    let (expected, what) = match (&recipe.tokenizer, of_shards.first()) {
        (Some(path), _) => (crate::text::tokenizer_sha256(path)?, format!("the recipe's tokenizer {}", path.display())),
        (None, Some((name, hash))) => (hash.to_string(), format!("data source `{name}`")),
        (None, None) => return Ok(None),
    };
    if let Some((name, _)) = of_shards.iter().find(|(_, hash)| *hash != expected) {
        return Err(bad_input(format!(
            "the shards of `{name}` were written with another tokenizer than {what}: their ids mean other text. Tokenize the \
             data again, or name the right tokenizer"
        )));
    }
    Ok(Some(expected))
}

/// Says that sources are mixed by new weights from here on, and what was drawn of each by the old ones.
pub fn tell_shares(loader: &Loader, counts: &[u64]) {
    let drawn: Vec<String> = loader.source_names().zip(counts).map(|(name, count)| format!("{count} of `{name}`")).collect();
    tell!("note: sources are mixed by new weights from here on; drawn so far, in sequences: {}", drawn.join(", "));
}

/// Refuses a stage whose sources will have been gone through as often as they may before it ends.
pub fn refuse_short_data(loader: &Loader, batches: u64, recipe: &Recipe) -> Result<()> {
    let needed = batches * recipe.train.sequences_per_step();
    match loader.ends_at()? {
        Some(there) if there < needed => Err(bad_input(format!(
            "the data end before the run does: with data.sources.*.max_epochs the sources give {there} sequences of {} tokens, and {needed} \
             are asked for. Raise max_epochs, add data, or make the run shorter",
            recipe.train.seq_len
        ))),
        _ => Ok(()),
    }
}

/// Refuses data of another tokenizer than a model was trained with, where both are known.
pub fn refuse_other_tokenizer(source: &Checkpoint, tokenizer_hash: Option<&str>) -> Result<()> {
    match (source.meta().tokenizer_hash.as_deref(), tokenizer_hash) {
        (Some(theirs), Some(ours)) if theirs != ours => Err(bad_input(format!(
            "{} was trained with another tokenizer than the recipe's data were written with: ids would mean other text. Tokenize the data with \
             the model's tokenizer",
            source.dir().display()
        ))),
        _ => Ok(()),
    }
}

/// Refuses shards whose tokenizer has more ids than the model. Shards that do not say are found out when they are read.
fn check_vocabulary(name: &str, data: &Dataset, vocab_size: usize) -> Result<()> {
    let of_shard = data.shards().iter().filter_map(|s| Some((s, s.sidecar()?.tokenizer.vocab_size)));
    match of_shard.into_iter().find(|(_, ids)| *ids > vocab_size) {
        Some((shard, ids)) => Err(bad_input(format!(
            "data source `{name}`: {} was written with a tokenizer of {ids} ids, but the model has `vocab_size` {vocab_size}: \
             its ids do not fit. Make model.vocab_size at least {ids}, or tokenize again",
            shard.bin_path().display()
        ))),
        None => Ok(()),
    }
}

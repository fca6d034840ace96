//! From text to a vocabulary: `zaya tokenize --train-vocab`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;

use super::encode::shrink;
use super::tally::{Left, Taken, Tally};
use super::{Corpus, Watcher, check_not_read, pool};
use crate::data::sidecar::{Replaced, Skipped};
use crate::data::writer::write_file;
use crate::error::bad_input;
use crate::text::corpus::{self, Block, Blocks, Wanted};
use crate::text::record::{Fault, document_of, field_names};
use crate::text::vocab;

/// What `zaya tokenize --train-vocab` is asked to do.
#[derive(Debug, Clone)]
pub struct TrainVocabJob {
    pub corpus: Corpus,
    /// Entries of the vocabulary.
    pub size: usize,
    /// Special tokens beside `<|endoftext|>`.
    pub special: Vec<String>,
    /// `tokenizer.json` to write.
    pub output: PathBuf,
    pub overwrite: bool,
    /// Threads; 0 = one for each core. The output does not depend on it.
    pub workers: usize,
}

/// Outcome of [`train_vocab`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainedVocab {
    pub documents: u64,
    pub text_bytes: u64,
    pub skipped: Skipped,
    pub replaced: Replaced,
}

/// Learns a vocabulary and writes its `tokenizer.json`.
pub fn train_vocab(job: &TrainVocabJob, watcher: &mut (impl Watcher + Send)) -> Result<TrainedVocab> {
    check_file(&job.output, job.overwrite)?;
    check_not_read(&job.output, job.corpus.inputs.iter().map(|i| &i.path))?;
    job.corpus.inputs.iter().try_for_each(|i| i.check_columns(&job.corpus.field, &[]))?;
    let special = vocab::special_tokens(&job.special);
    vocab::check_size(job.size, &special)?;
    let pool = pool(job.workers)?;
    let mut tally = Tally::new(&job.corpus, watcher);
    let blocks = corpus::read(Arc::new(job.corpus.inputs.clone()), Wanted::all(&job.corpus.field));
    let mut documents = Documents { blocks, block: Block::default(), next: 0, room: Vec::new(), tally: &mut tally };
    let json = pool.install(|| vocab::train(job.size, &special, &mut documents));
    tally.check_some_use()?;
    write_file(&job.output, json?.as_bytes())?;
    let all = tally.all();
    Ok(TrainedVocab { documents: all.documents, text_bytes: all.text_bytes, skipped: all.skipped, replaced: all.replaced })
}

/// Texts of a corpus, one after the other.
struct Documents<'t, 'c, W> {
    blocks: Blocks,
    block: Block,
    /// Record of the block that comes next.
    next: usize,
    /// For a text.
    room: Vec<u8>,
    tally: &'t mut Tally<'c, W>,
}

impl<W: Watcher> Documents<'_, '_, W> {
    /// The text of record `number` of the block; None if it is passed over.
    fn text(&mut self, number: usize) -> Result<Option<String>> {
        let record = &self.block.records[number];
        let corpus = self.tally.corpus;
        let layout = corpus.inputs[record.place.input].layout;
        let document = match document_of(&self.block, number, layout, &corpus.field, corpus.on_bad, &[], &mut self.room) {
            Ok((document, _)) => document,
            Err(fault) => {
                let fields = if fault == Fault::NoField { field_names(self.block.bytes(record)) } else { Vec::new() };
                self.tally.bad(record.place, &fault, &fields)?;
                return Ok(None);
            }
        };
        if document.text.is_empty() {
            self.tally.leave(record.place, Left::Empty);
            return Ok(None);
        }
        if document.replaced > 0 {
            self.tally.repaired(record.place, document.replaced, false);
        }
        let text_bytes = document.text.len() as u64;
        self.tally.take(record.place, &Taken { text_bytes, replaced: document.replaced, ..Taken::default() });
        Ok(Some(document.text.into_owned()))
    }
}

impl<W: Watcher> Iterator for Documents<'_, '_, W> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        loop {
            if self.next == self.block.records.len() {
                self.tally.watcher.progress(self.block.bytes_read);
                self.next = 0;
                // The old block goes first: a very long record in it keeps the reader of the next one waiting.
                self.block = Block::default();
                shrink(&mut self.room);
                match self.blocks.next()? {
                    Ok(block) => self.block = block,
                    Err(e) => return Some(Err(e)),
                }
                continue;
            }
            self.next += 1;
            if let Some(text) = self.text(self.next - 1).transpose() {
                return Some(text);
            }
        }
    }
}

/// Refuses, before anything is read, an output file that cannot be written; creates its directory.
fn check_file(path: &Path, overwrite: bool) -> Result<()> {
    let shown = path.display();
    if path.is_dir() || path.file_name().is_none() {
        return Err(bad_input(format!(
            "--output {shown} is a directory: give the file, e.g. {}",
            path.join("tokenizer.json").display()
        )));
    }
    if path.exists() && !overwrite {
        return Err(bad_input(format!("{shown} exists: choose another --output, or replace it with --overwrite")));
    }
    match path.parent().filter(|p| !p.as_os_str().is_empty()) {
        Some(parent) => std::fs::create_dir_all(parent)
            .map_err(|e| bad_input(format!("--output {shown}: the directory {} cannot be made: {e}", parent.display()))),
        None => Ok(()),
    }
}

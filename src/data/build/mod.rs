//! From text to token shards, and from text to a vocabulary: what `zaya tokenize` does.

mod encode;
mod learn;
mod set;
mod tally;

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};

pub use learn::{TrainVocabJob, TrainedVocab, train_vocab};
pub use set::{ShardLimits, tokenize_set};

use super::companions::{Companion, Origin};
use super::mask;
use super::shard::{TokenType, prefix_of, with_suffix};
use super::sidecar::{ChatInfo, EodInfo, FORMAT, MASK_FORMAT, SelectionInfo, Sidecar, TokenizerInfo};
use super::writer::{SUFFIXES, ShardWriter, Tokens, Written, check_prefix};
use crate::error::bad_input;
use crate::text::chat::{ChatEncoder, ChatOptions, ChatTemplate};
use crate::text::corpus::{self, Input, MAX_RECORD_BYTES, Place, Wanted};
use crate::text::filter::Condition;
use crate::text::record::OnBad;
use crate::text::{Encoder, Eod};
use encode::{Rules, TextHash, Verdict};
use tally::{Left, Taken, Tally};

/// Where the text comes from, and what to do with what is not text.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// In the order in which documents are written.
    pub inputs: Vec<Input>,
    /// Field of a JSON line, or column of a table, that holds the text.
    pub field: String,
    pub on_bad: OnBad,
}

/// Which documents are wanted; by default all.
#[derive(Debug, Clone)]
pub struct Selection {
    /// Characters (Unicode scalar values) that a text must have, and may have.
    pub min_chars: Option<u64>,
    pub max_chars: Option<u64>,
    /// Conditions on the record's fields, all of which must be met.
    pub keep: Vec<Condition>,
    /// Of equal texts only the first.
    pub dedup: bool,
    /// Records with more bytes are bad.
    pub max_record_bytes: u64,
}

impl Default for Selection {
    fn default() -> Self {
        Self { min_chars: None, max_chars: None, keep: Vec::new(), dedup: false, max_record_bytes: MAX_RECORD_BYTES }
    }
}

impl Selection {
    /// A text of so many characters is neither too short nor too long.
    fn fits(&self, chars: impl FnOnce() -> u64) -> bool {
        if self.min_chars.is_none() && self.max_chars.is_none() {
            return true;
        }
        let chars = chars();
        self.min_chars.is_none_or(|min| chars >= min) && self.max_chars.is_none_or(|max| chars <= max)
    }

    fn info(&self) -> Option<SelectionInfo> {
        let keep: Vec<String> = self.keep.iter().map(Condition::to_string).collect();
        let info = SelectionInfo { dedup: self.dedup, min_chars: self.min_chars, max_chars: self.max_chars, keep };
        (info != SelectionInfo::default()).then_some(info)
    }
}

/// What the work tells while it goes on.
pub trait Watcher {
    /// So many bytes of the input files, as they lie on disk, are done.
    fn progress(&mut self, bytes: u64);
    /// A record that is not as it should be, or something to know.
    fn warn(&mut self, text: &str);
}

/// What `zaya tokenize` is asked to do.
#[derive(Debug, Clone)]
pub struct TokenizeJob {
    pub corpus: Corpus,
    /// `tokenizer.json`.
    pub tokenizer: PathBuf,
    pub eod: Eod,
    /// Prefix of the shard; a trailing `.bin` or `.idx` is taken off.
    pub output: PathBuf,
    pub overwrite: bool,
    /// Threads that encode; 0 = one for each core. The output does not depend on it.
    pub workers: usize,
    /// Records are conversations, and `output.mask` says what of them is learnt.
    pub chat: Option<ChatJob>,
}

/// How conversations are rendered and marked.
#[derive(Debug, Clone)]
pub struct ChatJob {
    /// None = the one beside the tokenizer.
    pub template: Option<PathBuf>,
    /// The day that the template is told.
    pub date: Option<chrono::NaiveDate>,
    pub options: ChatOptions,
}

fn pool(workers: usize) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new().num_threads(workers).build().context("starting the worker threads")
}

/// Writes the shard `output.bin`, `.idx`, `.json` of all documents.
pub fn tokenize(job: &TokenizeJob, watcher: &mut impl Watcher) -> Result<Sidecar> {
    tokenize_selected(job, &Selection::default(), &[], watcher)
}

/// As [`tokenize`], with `encoder`, which is the job's tokenizer with its choice of `eod`.
pub fn tokenize_loaded(job: &TokenizeJob, encoder: Arc<Encoder>, watcher: &mut impl Watcher) -> Result<Sidecar> {
    tokenize_one(job, &Selection::default(), &[], Some(encoder), watcher)
}

/// Writes the shard `output.bin`, `.idx`, `.json`, of conversations `.mask`, of the documents that `selection` wants, and `companions`. Nothing is left under
/// these names unless all of it went well.
pub fn tokenize_selected(
    job: &TokenizeJob,
    selection: &Selection,
    companions: &[Companion],
    watcher: &mut impl Watcher,
) -> Result<Sidecar> {
    tokenize_one(job, selection, companions, None, watcher)
}

fn tokenize_one(
    job: &TokenizeJob,
    selection: &Selection,
    companions: &[Companion],
    encoder: Option<Arc<Encoder>>,
    watcher: &mut impl Watcher,
) -> Result<Sidecar> {
    let output = prefix_of(&job.output);
    check_prefix(&output, job.overwrite)?;
    let mask = job.chat.as_ref().map(|_| mask::SUFFIX);
    let files: Vec<PathBuf> = suffixes(companions).chain(mask).map(|suffix| with_suffix(&output, suffix)).collect();
    let task = Task::prepare(job, selection, &files, encoder)?;
    let mut writer = task.create(&output, job.overwrite, companions)?;
    let mut tally = Tally::new(&job.corpus, watcher);
    let names = task.source_names();
    let result = task.run(Place::default(), &mut Seen::default(), &mut tally, |tally, place, taken, tokens| {
        writer.push_tokens(tokens, &Origin { source: &names[place.input], line: place.line })?;
        tally.take(place, taken);
        Ok(())
    });
    result
        .map_err(|e| e.context(format!("tokenizing stopped after {} documents, and nothing was written", writer.documents())))?;
    tally.check_some_use()?;
    if writer.documents() == 0 {
        tally.watcher.warn("the inputs hold no text: the shard has no documents");
    }
    let mut sidecar = task.sidecar(&tally);
    writer.publish_from(&sidecar.tokenizer.file.clone(), |written| {
        sidecar.set_written(written);
        sidecar.to_text()
    })?;
    Ok(sidecar)
}

/// Suffixes of all files of a shard.
fn suffixes(companions: &[Companion]) -> impl Iterator<Item = &'static str> {
    SUFFIXES.into_iter().chain(companions.iter().flat_map(|c| c.suffixes()).copied())
}

/// Texts that came before, where duplicates are looked for.
type Seen = std::collections::HashSet<TextHash>;

/// A job whose inputs and tokenizer were looked at.
struct Task<'a> {
    job: &'a TokenizeJob,
    selection: &'a Selection,
    encoder: Arc<Encoder>,
    chat: Option<ChatEncoder>,
    token_type: TokenType,
    workers: usize,
}

impl<'a> Task<'a> {
    /// Finds what can be found wrong before anything is written. `output`: files that will be.
    fn prepare(
        job: &'a TokenizeJob,
        selection: &'a Selection,
        output: &[PathBuf],
        encoder: Option<Arc<Encoder>>,
    ) -> Result<Self> {
        for file in output {
            check_not_read(file, job.corpus.inputs.iter().map(|i| &i.path).chain([&job.tokenizer]))?;
        }
        if job.chat.is_some() {
            check_chat(&job.corpus)?;
        }
        let text = job.corpus.inputs.iter().find(|i| i.layout == corpus::Layout::Text);
        if let (Some(condition), Some(input)) = (selection.keep.first(), text) {
            let path = input.path.display();
            return Err(bad_input(format!("--keep '{condition}' asks for a field, but {path} is plain text and has none")));
        }
        job.corpus.inputs.iter().try_for_each(|i| i.check_columns(&job.corpus.field, &selection.keep))?;
        let encoder = encoder.map_or_else(|| Encoder::load(&job.tokenizer, &job.eod).map(Arc::new), Ok)?;
        let chat = job.chat.as_ref().map(|chat| chat_encoder(job, chat, &encoder)).transpose()?;
        let token_type = TokenType::for_vocab(encoder.vocab_size());
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let workers = if job.workers == 0 { cores() } else { job.workers };
        Ok(Self { job, selection, encoder, chat, token_type, workers })
    }

    /// The writer of a shard.
    fn create(&self, prefix: &Path, overwrite: bool, companions: &[Companion]) -> Result<ShardWriter> {
        let writer = ShardWriter::create_with(prefix, self.token_type, overwrite, companions)?;
        if self.chat.is_some() { writer.with_mask() } else { Ok(writer) }
    }

    fn wanted(&self, start: Place) -> Wanted {
        Wanted {
            field: self.job.corpus.field.clone(),
            keep: Arc::new(self.selection.keep.clone()),
            max_record_bytes: self.selection.max_record_bytes,
            // One decompresses as fast as several encode; a second one covers the ends of files.
            readers: self.workers.div_ceil(4) + 1,
            start,
        }
    }

    /// Names of the inputs as they are given.
    fn source_names(&self) -> Vec<String> {
        self.job.corpus.inputs.iter().map(|i| i.path.display().to_string()).collect()
    }

    /// Hands every wanted document from `start` on to `push`, in order, and counts all others in `tally`.
    fn run<W: Watcher>(
        &self,
        start: Place,
        seen: &mut Seen,
        tally: &mut Tally<'_, W>,
        mut push: impl FnMut(&mut Tally<'_, W>, Place, &Taken, Tokens<'_>) -> Result<()>,
    ) -> Result<()> {
        let (corpus, selection, token_type) = (&self.job.corpus, self.selection, self.token_type);
        let rules = Rules { corpus, selection, encoder: Some(&self.encoder), chat: self.chat.as_ref(), token_type };
        let blocks = corpus::read(Arc::new(corpus.inputs.clone()), self.wanted(start));
        encode::run(&rules, blocks, self.workers, |encoded| {
            let (mut bytes, mut marks) = (&encoded.bytes[..], &encoded.marks[..]);
            for (place, verdict) in std::mem::take(&mut encoded.verdicts) {
                match verdict {
                    Verdict::Document { taken, utf16, hash } => {
                        let (ids, rest) = bytes.split_at((taken.tokens * token_type.bytes()) as usize);
                        bytes = rest;
                        let marked = if self.chat.is_some() { taken.tokens as usize } else { 0 };
                        let (its_marks, rest) = marks.split_at(marked);
                        marks = rest;
                        if hash.is_some_and(|hash| !seen.insert(hash)) {
                            tally.leave(place, Left::Duplicate);
                            continue;
                        }
                        if taken.replaced > 0 {
                            tally.repaired(place, taken.replaced, utf16);
                        }
                        push(tally, place, &taken, Tokens { bytes: ids, marks: its_marks })?;
                    }
                    Verdict::Left(why) => tally.leave(place, why),
                    Verdict::Bad { fault, fields } => tally.bad(place, &fault, &fields)?,
                    Verdict::Failed(error) => return Err(error),
                }
            }
            tally.watcher.progress(encoded.bytes_read);
            Ok(())
        })
    }

    /// Texts of the records before `end`, without encoding them; conversations are what they become.
    fn texts_before(&self, end: Place) -> Result<Seen> {
        let (corpus, selection, token_type) = (&self.job.corpus, self.selection, self.token_type);
        let chat = self.chat.as_ref();
        let rules = Rules { corpus, selection, encoder: chat.map(|_| &*self.encoder), chat, token_type };
        let inputs = corpus.inputs[..corpus.inputs.len().min(end.input + 1)].to_vec();
        let mut seen = Seen::default();
        encode::run(&rules, corpus::read(Arc::new(inputs), self.wanted(Place::default())), self.workers, |encoded| {
            let before = encoded.verdicts.iter().filter(|(place, _)| *place < end);
            seen.extend(before.filter_map(|(_, verdict)| match verdict {
                Verdict::Document { hash, .. } => *hash,
                _ => None,
            }));
            Ok(())
        })?;
        Ok(seen)
    }

    fn tokenizer_info(&self) -> TokenizerInfo {
        let file = self.job.tokenizer.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        TokenizerInfo {
            file,
            sha256: self.encoder.sha256().into(),
            vocab_size: self.encoder.vocab_size(),
            unicode: self.encoder.unicode_version().map(String::from),
        }
    }

    fn eod_info(&self) -> Option<EodInfo> {
        self.encoder.eod().map(|(token, id)| EodInfo { token: token.into(), id })
    }

    /// The sidecar of what `tally` has counted; sizes and hashes are not known yet.
    fn sidecar<W: Watcher>(&self, tally: &Tally<'_, W>) -> Sidecar {
        let all = tally.all();
        Sidecar {
            format: FORMAT.into(),
            tool: tool(),
            tokenizer: self.tokenizer_info(),
            eod: self.eod_info(),
            dtype: self.token_type.name().into(),
            documents: all.documents,
            tokens: all.tokens,
            text_bytes: all.text_bytes,
            skipped: all.skipped,
            replaced: all.replaced,
            unknown_tokens: tally.unknown_tokens,
            selection: self.selection.info(),
            part: None,
            chat: self.chat.as_ref().map(|chat| chat_info(chat, tally.learnt_tokens, tally.trimmed)),
            sources: tally.sources.clone(),
            bin_bytes: 0,
            bin_xxh3_64: String::new(),
            idx_bytes: 0,
            idx_xxh3_64: String::new(),
        }
    }
}

/// Refuses what conversations cannot be asked for.
fn check_chat(corpus: &Corpus) -> Result<()> {
    if let Some(input) = corpus.inputs.iter().find(|i| i.layout != corpus::Layout::JsonLines) {
        let path = input.path.display();
        return Err(bad_input(format!("--chat reads JSON lines, and {path} is to be read as something else")));
    }
    Ok(())
}

fn chat_encoder(job: &TokenizeJob, chat: &ChatJob, encoder: &Encoder) -> Result<ChatEncoder> {
    let template = ChatTemplate::find(&job.tokenizer, chat.template.as_deref(), chat.date)?;
    ChatEncoder::new(&job.tokenizer, encoder, template, chat.options.clone())
}

/// What a sidecar says of conversations; size and hash of the mask are not known yet.
fn chat_info(chat: &ChatEncoder, learnt_tokens: u64, trimmed: u64) -> ChatInfo {
    let (template, options) = (chat.template(), chat.options());
    ChatInfo {
        template_file: template.path().file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned()),
        template_sha256: template.sha256().into(),
        learn: options.learn.name().into(),
        reasoning_tags: options.reasoning.clone(),
        trim: options.trim,
        trimmed,
        learnt_tokens,
        mask_format: MASK_FORMAT.into(),
        mask_bytes: 0,
        mask_xxh3_64: String::new(),
    }
}

pub(super) fn tool() -> String {
    format!("zaya {}", env!("CARGO_PKG_VERSION"))
}

impl Sidecar {
    /// Fills in sizes and hashes.
    pub(super) fn set_written(&mut self, written: &Written) {
        self.bin_bytes = written.bin_bytes;
        self.bin_xxh3_64 = written.bin_xxh3_64.clone();
        self.idx_bytes = written.idx_bytes;
        self.idx_xxh3_64 = written.idx_xxh3_64.clone();
        if let (Some(chat), Some(mask)) = (&mut self.chat, &written.mask) {
            (chat.mask_bytes, chat.mask_xxh3_64) = mask.clone();
        }
    }
}

/// Refuses an output that would replace a file the run reads.
fn check_not_read<'a>(output: &Path, mut read: impl Iterator<Item = &'a PathBuf>) -> Result<()> {
    let Ok(output) = output.canonicalize() else { return Ok(()) };
    match read.find(|path| path.canonicalize().is_ok_and(|path| path == output)) {
        Some(path) => Err(bad_input(format!("--output would replace {}, which this run reads: choose another", path.display()))),
        None => Ok(()),
    }
}

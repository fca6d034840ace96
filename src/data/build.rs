//! From text to token shards, and from text to a vocabulary: what `zaya tokenize` does.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use anyhow::{Context, Result};
use rayon::prelude::*;

use super::mask::{self, MaskWriter};
use super::shard::{TokenType, prefix_of, with_suffix};
use super::sidecar::{ChatInfo, EodInfo, FORMAT, MASK_FORMAT, Replaced, Sidecar, Skipped, SourceInfo, TokenizerInfo};
use super::writer::{self, ShardWriter, check_prefix, write_file};
use crate::error::{bad_input, did_you_mean};
use crate::text::chat::{ChatEncoder, ChatOptions, ChatTemplate, marks};
use crate::text::corpus::{self, Batch, Input, Record};
use crate::text::record::{Document, Fault, OnBad, document, field_names};
use crate::text::{Encoder, Eod, vocab};

/// Where the text comes from, and what to do with what is not text.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// In the order in which documents are written.
    pub inputs: Vec<Input>,
    /// Field of a JSON line that holds the text.
    pub field: String,
    pub on_bad: OnBad,
}

/// What the work tells while it goes on.
pub trait Watcher {
    /// So many bytes of the input files, as they lie on disk, are done.
    fn progress(&mut self, bytes: u64);
    /// A record that is not as it should be, or something to know.
    fn warn(&mut self, text: &str);
}

/// Records that are told one by one; the rest are only counted.
const TOLD: u64 = 5;

/// Counts of one run, per input and in all.
struct Tally<'a, W> {
    corpus: &'a Corpus,
    sources: Vec<SourceInfo>,
    watcher: &'a mut W,
    told: u64,
    /// First record without the field, for the message if none has it.
    without_field: Option<Vec<u8>>,
}

impl<'a, W: Watcher> Tally<'a, W> {
    fn new(corpus: &'a Corpus, watcher: &'a mut W) -> Self {
        let source = |input: &Input| SourceInfo {
            path: input.path.display().to_string(),
            file_bytes: input.file_bytes,
            ..SourceInfo::default()
        };
        Self { corpus, sources: corpus.inputs.iter().map(source).collect(), watcher, told: 0, without_field: None }
    }

    fn tell(&mut self, text: &str) {
        self.told += 1;
        if self.told <= TOLD {
            self.watcher.warn(text);
        }
        if self.told == TOLD + 1 {
            self.watcher.warn("further records like this are only counted");
        }
    }

    /// Text repaired and counted; None for a record that is passed over.
    fn take(&mut self, record: &Record, document: Result<Document, Fault>) -> Result<Option<Document>> {
        let place = self.corpus.inputs[record.input].place(record.line);
        let source = &mut self.sources[record.input];
        match document {
            Ok(d) if d.text.is_empty() => {
                source.skipped.empty += 1;
                Ok(None)
            }
            Ok(d) => {
                if d.replaced > 0 {
                    source.replaced.documents += 1;
                    source.replaced.characters += d.replaced;
                    let utf16 = [&b"\xff\xfe"[..], b"\xfe\xff"].iter().any(|mark| record.bytes.starts_with(mark));
                    let hint = if utf16 { "; it looks like UTF-16: convert it to UTF-8 first" } else { "" };
                    let fault = Fault::NotUnicode(d.replaced).explain(&self.corpus.field);
                    self.tell(&format!("{place} {fault}: replaced by U+FFFD{hint}"));
                }
                Ok(Some(d))
            }
            Err(fault) => {
                let text = format!("{place} {}", fault.explain(&self.corpus.field));
                if self.corpus.on_bad == OnBad::Fail {
                    return Err(bad_input(format!("{text}; to go on in spite of such records, use --on-bad replace or skip")));
                }
                source.skipped.bad += 1;
                if fault == Fault::NoField && self.without_field.is_none() {
                    self.without_field = Some(record.bytes.clone());
                }
                self.tell(&format!("{text}: passed over"));
                Ok(None)
            }
        }
    }

    fn total<T: std::iter::Sum>(&self, count: impl Fn(&SourceInfo) -> T) -> T {
        self.sources.iter().map(count).sum()
    }

    fn skipped(&self) -> Skipped {
        Skipped { empty: self.total(|s| s.skipped.empty), bad: self.total(|s| s.skipped.bad) }
    }

    fn replaced(&self) -> Replaced {
        Replaced { documents: self.total(|s| s.replaced.documents), characters: self.total(|s| s.replaced.characters) }
    }

    /// Refuses a corpus in which every record was bad: that is a wrong `--field` or `--format`, not a poor corpus.
    fn check_some_use(&self) -> Result<()> {
        let (used, empty, bad) = (self.total(|s| s.documents), self.total(|s| s.skipped.empty), self.total(|s| s.skipped.bad));
        if used + empty > 0 || bad == 0 {
            return Ok(());
        }
        let field = &self.corpus.field;
        let why = match &self.without_field {
            Some(line) => {
                let names = field_names(line);
                let guess = did_you_mean(field, names.iter().map(String::as_str));
                format!("the first of them has the fields {}; name the one with the text by --field{guess}", names.join(", "))
            }
            None => "see the messages above; is --format right?".into(),
        };
        Err(bad_input(format!("none of the {bad} records can be used: {why}")))
    }
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

/// What a record becomes.
struct Encoded {
    document: Document,
    /// Bytes of text that the ids stand for.
    text_bytes: u64,
    ids: Vec<u32>,
    /// One an id, of conversations.
    marks: Vec<u8>,
    trimmed: bool,
}

/// Tokens of one text, with the token that ends a document.
fn encode_text(encoder: &Encoder, record: &Record, corpus: &Corpus) -> Result<Result<Encoded, Fault>> {
    let layout = corpus.inputs[record.input].layout;
    let document = match document(&record.bytes, layout, &corpus.field, corpus.on_bad) {
        Ok(document) => document,
        Err(fault) => return Ok(Err(fault)),
    };
    let mut ids = encoder.encode(&document.text)?;
    if !ids.is_empty() {
        ids.extend(encoder.eod().map(|(_, id)| id));
    }
    let text_bytes = document.text.len() as u64;
    Ok(Ok(Encoded { document, text_bytes, ids, marks: Vec::new(), trimmed: false }))
}

/// Tokens of one conversation.
fn encode_chat(encoder: &Encoder, chat: &ChatEncoder, record: &Record, on_bad: OnBad) -> Result<Result<Encoded, Fault>> {
    Ok(chat.encode(encoder, &record.bytes, on_bad)?.map(|example| Encoded {
        // Only counts and a text that is not empty are looked at.
        document: Document {
            text: if example.ids.is_empty() { String::new() } else { "chat".into() },
            replaced: example.replaced,
        },
        text_bytes: example.text_bytes,
        ids: example.ids,
        marks: example.marks,
        trimmed: example.trimmed,
    }))
}

/// Writes the shard `output.bin`, `.idx`, `.json`. Nothing is left under these names unless all of it went well.
pub fn tokenize(job: &TokenizeJob, watcher: &mut impl Watcher) -> Result<Sidecar> {
    let output = prefix_of(&job.output);
    check_prefix(&output, job.overwrite)?;
    for suffix in writer::SUFFIXES {
        let file = with_suffix(&output, suffix);
        check_not_read(&file, job.corpus.inputs.iter().map(|i| &i.path).chain([&job.tokenizer]))?;
    }
    let encoder = Encoder::load(&job.tokenizer, &job.eod)?;
    let chat = job.chat.as_ref().map(|chat| chat_encoder(job, chat, &encoder)).transpose()?;
    let mut mask = chat.as_ref().map(|_| MaskWriter::create(&output)).transpose()?;
    let (mut learnt_tokens, mut trimmed) = (0, 0);
    let token_type = TokenType::for_vocab(encoder.vocab_size());
    let mut writer = ShardWriter::create(&output, token_type, job.overwrite)?;
    let pool = pool(job.workers)?;
    let mut tally = Tally::new(&job.corpus, watcher);
    let mut unknown_tokens = 0;
    for batch in corpus::read(Arc::new(job.corpus.inputs.clone())) {
        let Batch { records, bytes_read } = batch.map_err(|e| nothing_written(e, &writer))?;
        let encode = |record: &Record| match &chat {
            Some(chat) => encode_chat(&encoder, chat, record, job.corpus.on_bad),
            None => encode_text(&encoder, record, &job.corpus),
        };
        // One record is enough work for a thread to come back for.
        let encoded: Vec<Result<Result<Encoded, Fault>>> =
            pool.install(|| records.par_iter().with_max_len(1).map(encode).collect());
        for (record, encoded) in records.iter().zip(encoded) {
            let place = || job.corpus.inputs[record.input].place(record.line);
            let (text, encoded) = match encoded.with_context(place)? {
                Ok(mut encoded) => (Ok(std::mem::take(&mut encoded.document)), Some(encoded)),
                Err(fault) => (Err(fault), None),
            };
            let (Some(_), Some(encoded)) = (tally.take(record, text)?, encoded) else { continue };
            let ids = encoded.ids;
            let source = &mut tally.sources[record.input];
            if ids.is_empty() {
                // Text of which the tokenizer leaves nothing, such as white space that its normaliser drops.
                source.skipped.empty += 1;
                continue;
            }
            unknown_tokens += ids.iter().filter(|id| Some(**id) == encoder.unknown()).count() as u64;
            writer.push(&ids).with_context(place)?;
            if let Some(mask) = &mut mask {
                mask.write(&encoded.marks)?;
                learnt_tokens += encoded.marks.iter().filter(|m| **m & marks::LEARN != 0).count() as u64;
                trimmed += u64::from(encoded.trimmed);
            }
            source.documents += 1;
            source.tokens += ids.len() as u64;
            source.text_bytes += encoded.text_bytes;
        }
        tally.watcher.progress(bytes_read);
    }
    tally.check_some_use()?;
    if writer.documents() == 0 {
        tally.watcher.warn("the inputs hold no text: the shard has no documents");
    }
    let mut sidecar = sidecar_of(job, &encoder, token_type, &tally, unknown_tokens);
    sidecar.chat = chat.map(|chat| chat_info(&chat, learnt_tokens, trimmed));
    writer.publish(|written| {
        mask::remove_old(&output)?;
        if let (Some(mask), Some(info)) = (&mut mask, &mut sidecar.chat) {
            (info.mask_bytes, info.mask_xxh3_64) = mask.publish()?;
        }
        sidecar.bin_bytes = written.bin_bytes;
        sidecar.bin_xxh3_64 = written.bin_xxh3_64.clone();
        sidecar.idx_bytes = written.idx_bytes;
        sidecar.idx_xxh3_64 = written.idx_xxh3_64.clone();
        Ok(serde_json::to_string_pretty(&sidecar)? + "\n")
    })?;
    Ok(sidecar)
}

fn chat_encoder(job: &TokenizeJob, chat: &ChatJob, encoder: &Encoder) -> Result<ChatEncoder> {
    let template = ChatTemplate::find(&job.tokenizer, chat.template.as_deref(), chat.date)?;
    ChatEncoder::new(&job.tokenizer, encoder, template, chat.options.clone())
}

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

fn nothing_written(error: anyhow::Error, writer: &ShardWriter) -> anyhow::Error {
    error.context(format!("tokenizing stopped after {} documents, and nothing was written", writer.documents()))
}

fn sidecar_of<W: Watcher>(
    job: &TokenizeJob,
    encoder: &Encoder,
    token_type: TokenType,
    tally: &Tally<'_, W>,
    unknown_tokens: u64,
) -> Sidecar {
    let file = job.tokenizer.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
    Sidecar {
        format: FORMAT.into(),
        tool: format!("zaya {}", env!("CARGO_PKG_VERSION")),
        tokenizer: TokenizerInfo { file, sha256: encoder.sha256().into(), vocab_size: encoder.vocab_size() },
        eod: encoder.eod().map(|(token, id)| EodInfo { token: token.into(), id }),
        dtype: token_type.name().into(),
        documents: tally.total(|s| s.documents),
        tokens: tally.total(|s| s.tokens),
        text_bytes: tally.total(|s| s.text_bytes),
        skipped: tally.skipped(),
        replaced: tally.replaced(),
        unknown_tokens,
        sources: tally.sources.clone(),
        bin_bytes: 0,
        bin_xxh3_64: String::new(),
        idx_bytes: 0,
        idx_xxh3_64: String::new(),
        chat: None,
    }
}

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
    let special = vocab::special_tokens(&job.special);
    vocab::check_size(job.size, &special)?;
    let pool = pool(job.workers)?;
    let mut tally = Tally::new(&job.corpus, watcher);
    let batches = corpus::read(Arc::new(job.corpus.inputs.clone()));
    let mut documents = Documents { batches, records: Vec::new().into_iter(), bytes_read: 0, tally: &mut tally };
    let json = pool.install(|| vocab::train(job.size, &special, &mut documents));
    tally.check_some_use()?;
    write_file(&job.output, json?.as_bytes())?;
    Ok(TrainedVocab {
        documents: tally.total(|s| s.documents),
        text_bytes: tally.total(|s| s.text_bytes),
        skipped: tally.skipped(),
        replaced: tally.replaced(),
    })
}

/// Texts of a corpus, one after the other.
struct Documents<'t, 'c, W> {
    batches: Receiver<Result<Batch>>,
    records: std::vec::IntoIter<Record>,
    bytes_read: u64,
    tally: &'t mut Tally<'c, W>,
}

impl<W: Watcher> Iterator for Documents<'_, '_, W> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        loop {
            let Some(record) = self.records.next() else {
                self.tally.watcher.progress(self.bytes_read);
                match self.batches.recv().ok()? {
                    Ok(batch) => (self.records, self.bytes_read) = (batch.records.into_iter(), batch.bytes_read),
                    Err(e) => return Some(Err(e)),
                }
                continue;
            };
            let corpus = self.tally.corpus;
            let found = document(&record.bytes, corpus.inputs[record.input].layout, &corpus.field, corpus.on_bad);
            match self.tally.take(&record, found) {
                Ok(Some(d)) => {
                    let source = &mut self.tally.sources[record.input];
                    source.documents += 1;
                    source.text_bytes += d.text.len() as u64;
                    return Some(Ok(d.text));
                }
                Ok(None) => {}
                Err(e) => return Some(Err(e)),
            }
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

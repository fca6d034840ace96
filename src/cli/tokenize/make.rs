//! `zaya tokenize` itself: text in, shards or a vocabulary out.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};

use super::upkeep::CompanionName;
use crate::data::build::{
    ChatJob, Corpus, Selection, ShardLimits, TokenizeJob, TrainVocabJob, Watcher, tokenize_selected, tokenize_set, train_vocab,
};
use crate::data::manifest::manifest_path;
use crate::data::shard::prefix_of;
use crate::data::sidecar::{Replaced, Skipped};
use crate::error::{bad_input, exit_code};
use crate::text::Eod;
use crate::text::chat::{ChatOptions, Learn, parse_date};
use crate::text::corpus::{Layout, MAX_RECORD_BYTES, expand, layout_of, read_list};
use crate::text::filter::Condition;
use crate::text::record::OnBad;

#[derive(Debug, clap::Args)]
pub(super) struct Make {
    /// Hugging Face tokenizer.json to encode with
    #[arg(long, value_name = "FILE", required_unless_present = "train_vocab", conflicts_with = "train_vocab")]
    tokenizer: Option<PathBuf>,

    /// Learn a byte-level BPE vocabulary of N entries instead
    #[arg(long, value_name = "N")]
    train_vocab: Option<usize>,

    /// Files to read, in this order; directories (their files, sorted) and patterns such as 'x/**/*.parquet' too
    #[arg(long, value_name = "F", num_args = 1..)]
    input: Vec<PathBuf>,

    /// File that lists further inputs, one path a line; `-` is standard input
    #[arg(long, value_name = "FILE")]
    input_list: Vec<PathBuf>,

    /// PREFIX of the shard or shards; with --train-vocab, the tokenizer.json to write
    #[arg(long, value_name = "PREFIX", required = true)]
    output: Option<PathBuf>,

    /// How files are cut into documents; auto goes by the name: .jsonl, .ndjson and .json are JSON lines, .parquet is Parquet, all
    /// else is text
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    format: Format,

    /// Field of a JSON line, or column of a table, that holds the text, or with --chat the messages [default: text; messages, else
    /// conversations]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,

    /// Records are conversations: rendered by the tokenizer's chat template, with PREFIX.mask saying what is learnt
    #[arg(long, conflicts_with = "train_vocab")]
    chat: bool,

    /// Chat template [default: chat_template.jinja beside the tokenizer, else `chat_template` in tokenizer_config.json]
    #[arg(long, value_name = "FILE", requires = "chat")]
    chat_template: Option<PathBuf>,

    /// The day that a chat template is told when it asks; without it none
    #[arg(long, value_name = "YYYY-MM-DD", requires = "chat", value_parser = parse_date)]
    chat_date: Option<chrono::NaiveDate>,

    /// Which turns of a conversation are learnt
    #[arg(long, value_enum, default_value_t = LearnName::Assistant, requires = "chat")]
    learn: LearnName,

    /// Tags around reasoning in a turn of the assistant
    #[arg(long, value_names = ["OPEN", "CLOSE"], num_args = 2, default_values = ["<think>", "</think>"], requires = "chat")]
    reasoning_tags: Vec<String>,

    /// Trim conversations to N tokens: reasoning is cut, answers never are
    #[arg(long, value_name = "N", requires = "chat")]
    trim: Option<usize>,

    /// Token that ends a document [default: the special token known to mean it, if there is exactly one]
    #[arg(long, value_name = "TOKEN", conflicts_with_all = ["no_eod", "train_vocab"], allow_hyphen_values = true)]
    eod: Option<String>,

    /// End documents with no token
    #[arg(long, conflicts_with = "train_vocab")]
    no_eod: bool,

    /// Special token of a new vocabulary beside <|endoftext|>, may be repeated
    #[arg(long, value_name = "TOKEN", requires = "train_vocab", allow_hyphen_values = true)]
    special: Vec<String>,

    /// What to do with records that are not Unicode, not JSON, or without the field
    #[arg(long, value_enum, default_value_t = BadRecords::Replace)]
    on_bad: BadRecords,

    /// Only documents of at least N characters
    #[arg(long, value_name = "N", conflicts_with = "train_vocab")]
    min_chars: Option<u64>,

    /// Only documents of at most N characters
    #[arg(long, value_name = "N", conflicts_with = "train_vocab")]
    max_chars: Option<u64>,

    /// Only records whose field compares so, such as 'score>=0.5' or 'meta.language==en'; may be repeated, all must hold
    #[arg(long, value_name = "CONDITION", conflicts_with = "train_vocab")]
    keep: Vec<Condition>,

    /// Only the first of documents with equal text
    #[arg(long, conflicts_with = "train_vocab")]
    dedup: bool,

    /// Records with more bytes are bad: what memory is bounded by
    #[arg(long, value_name = "N", default_value_t = MAX_RECORD_BYTES, conflicts_with = "train_vocab")]
    max_record_bytes: u64,

    /// Also write files with which other programs read the same .bin: ds (datatrove, nanotron), olmo (OLMo-core, Dolma)
    #[arg(long, value_enum, value_name = "NAME", value_delimiter = ',', conflicts_with = "train_vocab")]
    sidecars: Vec<CompanionName>,

    /// Write shards PREFIX_00000, PREFIX_00001, ... of at most N tokens each, and PREFIX.manifest.json
    #[arg(long, value_name = "N", conflicts_with = "train_vocab", value_parser = clap::value_parser!(u64).range(1..))]
    shard_tokens: Option<u64>,

    /// The same, of at most N bytes of .bin each
    #[arg(long, value_name = "N", conflicts_with = "train_vocab", value_parser = clap::value_parser!(u64).range(1..))]
    shard_bytes: Option<u64>,

    /// Go on with a set that a stopped run began: its complete shards are verified and kept
    #[arg(long, conflicts_with_all = ["train_vocab", "overwrite"])]
    resume: bool,

    /// Threads [default: one for each core]; the output does not depend on it
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    workers: usize,

    /// Replace an output that exists
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// By the file's name
    Auto,
    /// One document a file
    Text,
    /// One JSON object a line
    Jsonl,
    /// One row of a table
    Parquet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LearnName {
    /// All turns of the assistant
    Assistant,
    /// Its last turn
    Last,
    /// Everything
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BadRecords {
    /// Put U+FFFD where text is not Unicode; pass over what cannot be repaired
    Replace,
    /// Pass over both
    Skip,
    /// Stop at the first
    Fail,
}

pub(super) fn run(mut args: Make) -> Result<u8> {
    let corpus = corpus(&args)?;
    let output = args.output.take().ok_or_else(|| bad_input("--output is missing"))?;
    let total = corpus.inputs.iter().map(|i| i.file_bytes).sum();
    let mut bar = Bar::new(total);
    let begin = Instant::now();
    let summary = match args.train_vocab {
        Some(size) => {
            let (overwrite, workers) = (args.overwrite, args.workers);
            let job = TrainVocabJob { corpus, size, special: args.special, output, overwrite, workers };
            let done = train_vocab(&job, &mut bar)?;
            format!(
                "learned {} entries from {} documents, {}{}: {}",
                HumanCount(size as u64),
                HumanCount(done.documents),
                HumanBytes(done.text_bytes),
                faults(done.skipped, done.replaced),
                job.output.display()
            )
        }
        None => tokenize(args, corpus, output, &mut bar)?,
    };
    let seconds = begin.elapsed().as_secs_f64();
    bar.bar.finish_and_clear();
    say!("{summary} ({seconds:.1} s, {}/s)", HumanBytes((total as f64 / seconds.max(1e-3)) as u64));
    Ok(exit_code::OK)
}

/// Returns what is to be said.
fn tokenize(args: Make, corpus: Corpus, output: PathBuf, bar: &mut Bar) -> Result<String> {
    let limits = ShardLimits { tokens: args.shard_tokens, bytes: args.shard_bytes };
    let is_set = limits.tokens.is_some() || limits.bytes.is_some();
    if args.resume && !is_set {
        return Err(bad_input(
            "--resume goes on with a set of shards: give the --shard-tokens or --shard-bytes of the run that was stopped",
        ));
    }
    let chat = args.chat.then(|| chat_job(&args)).transpose()?;
    let job = TokenizeJob {
        corpus,
        chat,
        tokenizer: args.tokenizer.ok_or_else(|| bad_input("--tokenizer is missing"))?,
        eod: match args.eod {
            Some(token) => Eod::Token(token),
            None if args.no_eod => Eod::Absent,
            None => Eod::Find,
        },
        output,
        overwrite: args.overwrite,
        workers: args.workers,
    };
    let selection = Selection {
        min_chars: args.min_chars,
        max_chars: args.max_chars,
        keep: args.keep,
        dedup: args.dedup,
        max_record_bytes: args.max_record_bytes,
    };
    let companions = CompanionName::all(&args.sidecars);
    let prefix = prefix_of(&job.output);
    let counts = |documents, tokens, dtype: &str, text_bytes, skipped, replaced| {
        let (documents, tokens, faults) = (HumanCount(documents), HumanCount(tokens), faults(skipped, replaced));
        format!("{documents} documents, {tokens} tokens ({dtype}), {} of text{faults}", HumanBytes(text_bytes))
    };
    if is_set {
        let done = tokenize_set(&job, &selection, &companions, limits, args.resume, bar)?;
        let text = counts(done.documents, done.tokens, &done.dtype, done.text_bytes, done.skipped, done.replaced);
        return Ok(format!("{text}: {} shards, {}", HumanCount(done.shards.len() as u64), manifest_path(&prefix).display()));
    }
    let done = tokenize_selected(&job, &selection, &companions, bar)?;
    let text = counts(done.documents, done.tokens, &done.dtype, done.text_bytes, done.skipped, done.replaced);
    let learnt = done.chat.as_ref().map_or(String::new(), |chat| {
        format!(", {} tokens learnt, {} examples trimmed", HumanCount(chat.learnt_tokens), HumanCount(chat.trimmed))
    });
    Ok(format!("{text}{learnt}: {}.bin", prefix.display()))
}

fn chat_job(args: &Make) -> Result<ChatJob> {
    let [open, close] = args.reasoning_tags.as_slice() else { return Err(bad_input("--reasoning-tags takes two texts")) };
    let learn = match args.learn {
        LearnName::Assistant => Learn::Assistant,
        LearnName::Last => Learn::Last,
        LearnName::All => Learn::All,
    };
    let reasoning = [open.clone(), close.clone()];
    let options = ChatOptions { learn, field: args.field.clone(), reasoning, trim: args.trim };
    Ok(ChatJob { template: args.chat_template.clone(), date: args.chat_date, options })
}

fn corpus(args: &Make) -> Result<Corpus> {
    let mut paths = args.input.clone();
    for list in &args.input_list {
        paths.extend(read_list(list)?);
    }
    if paths.is_empty() {
        return Err(bad_input("there is nothing to read: give files with --input, or a list of them with --input-list"));
    }
    let layout = match args.format {
        Format::Text | Format::Parquet if args.chat => {
            return Err(bad_input("--chat reads JSON lines: leave --format text or parquet out"));
        }
        Format::Auto if args.chat => Some(Layout::JsonLines),
        Format::Auto => None,
        Format::Text => Some(Layout::Text),
        Format::Jsonl => Some(Layout::JsonLines),
        Format::Parquet => Some(Layout::Parquet),
    };
    let on_bad = match args.on_bad {
        BadRecords::Replace => OnBad::Replace,
        BadRecords::Skip => OnBad::Skip,
        BadRecords::Fail => OnBad::Fail,
    };
    let found = expand(&paths, layout)?;
    if let Some(note) = found.note() {
        tell!("note: {note}");
    }
    let table = found.inputs.iter().find(|i| args.chat && layout_of(&i.path) == Layout::Parquet);
    if let Some(table) = table {
        return Err(bad_input(format!("--chat reads JSON lines: {} is Parquet by its name", table.path.display())));
    }
    let field = args.field.clone().unwrap_or_else(|| if args.chat { "messages" } else { "text" }.into());
    Ok(Corpus { inputs: found.inputs, field, on_bad })
}

/// What was not taken as it came; nothing if all was.
fn faults(skipped: Skipped, replaced: Replaced) -> String {
    let mut text = String::new();
    let counts = [
        (skipped.empty, "empty"),
        (skipped.bad, "bad passed over"),
        (skipped.length, "too short or too long"),
        (skipped.field, "not kept by --keep"),
        (skipped.duplicate, "seen before"),
        (replaced.documents, "repaired"),
    ];
    for (count, what) in counts {
        if count > 0 {
            text += &format!(", {} {what}", HumanCount(count));
        }
    }
    text
}

/// Progress on standard error; nothing where that is no terminal.
struct Bar {
    bar: ProgressBar,
    total: u64,
}

impl Bar {
    fn new(total: u64) -> Self {
        let bar = ProgressBar::new(total);
        let look = "{spinner} {bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  ETA {eta} {msg}";
        if let Ok(style) = ProgressStyle::with_template(look) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, total }
    }
}

impl Watcher for Bar {
    fn progress(&mut self, bytes: u64) {
        self.bar.set_position(bytes);
        if bytes >= self.total {
            self.bar.set_message("finishing");
        }
    }

    fn warn(&mut self, text: &str) {
        self.bar.suspend(|| tell!("warning: {text}"));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

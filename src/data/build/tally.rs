//! Counts of a run, per input and in all, and what is told of records that are not as they should be.

use anyhow::Result;

use super::{Corpus, Watcher};
use crate::data::sidecar::SourceInfo;
use crate::error::{bad_input, did_you_mean};
use crate::text::corpus::{Input, Place};
use crate::text::record::{Fault, OnBad};

/// Records that are told one by one; the rest are only counted.
const TOLD: u64 = 5;

/// Why a good record is no document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// No text, or text of which the tokenizer leaves nothing.
    Empty,
    /// Too few or too many characters.
    Length,
    /// A condition on a field is not met.
    Field,
    /// The same text came before.
    Duplicate,
}

/// A document that is taken.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Taken {
    pub tokens: u64,
    pub text_bytes: u64,
    /// U+FFFD put in.
    pub replaced: u64,
    /// Tokens that stand for unknown text.
    pub unknown: u64,
    /// Of a conversation: tokens that are learnt, and whether reasoning was cut.
    pub learnt: u64,
    pub trimmed: bool,
}

pub(super) struct Tally<'a, W> {
    pub corpus: &'a Corpus,
    pub sources: Vec<SourceInfo>,
    pub unknown_tokens: u64,
    /// Of conversations.
    pub learnt_tokens: u64,
    pub trimmed: u64,
    pub watcher: &'a mut W,
    told: u64,
    /// Names of the fields of the first record that lacks the one wanted, for the message if none has it.
    fields_instead: Option<Vec<String>>,
}

pub(super) fn source_of(input: &Input) -> SourceInfo {
    SourceInfo { path: input.path.display().to_string(), file_bytes: input.file_bytes, ..SourceInfo::default() }
}

impl<'a, W: Watcher> Tally<'a, W> {
    pub fn new(corpus: &'a Corpus, watcher: &'a mut W) -> Self {
        let sources = corpus.inputs.iter().map(source_of).collect();
        Self { corpus, sources, unknown_tokens: 0, learnt_tokens: 0, trimmed: 0, watcher, told: 0, fields_instead: None }
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

    /// Says that text was repaired. `utf16`: it begins like UTF-16.
    pub fn repaired(&mut self, place: Place, characters: u64, utf16: bool) {
        let hint = if utf16 { "; it looks like UTF-16: convert it to UTF-8 first" } else { "" };
        let fault = Fault::NotUnicode(characters).explain(&self.corpus.field);
        let at = self.corpus.inputs[place.input].place(place.line);
        self.tell(&format!("{at} {fault}: replaced by U+FFFD{hint}"));
    }

    pub fn take(&mut self, place: Place, taken: &Taken) {
        let source = &mut self.sources[place.input];
        source.documents += 1;
        source.tokens += taken.tokens;
        source.text_bytes += taken.text_bytes;
        if taken.replaced > 0 {
            source.replaced.documents += 1;
            source.replaced.characters += taken.replaced;
        }
        self.unknown_tokens += taken.unknown;
        self.learnt_tokens += taken.learnt;
        self.trimmed += u64::from(taken.trimmed);
    }

    pub fn leave(&mut self, place: Place, why: Left) {
        let skipped = &mut self.sources[place.input].skipped;
        match why {
            Left::Empty => skipped.empty += 1,
            Left::Length => skipped.length += 1,
            Left::Field => skipped.field += 1,
            Left::Duplicate => skipped.duplicate += 1,
        }
    }

    /// A record that cannot be used. `fields`: names of what is there instead of the field.
    ///
    /// # Errors
    /// With `--on-bad fail`.
    pub fn bad(&mut self, place: Place, fault: &Fault, fields: &[String]) -> Result<()> {
        let text = format!("{} {}", self.corpus.inputs[place.input].place(place.line), fault.explain(&self.corpus.field));
        if self.corpus.on_bad == OnBad::Fail {
            return Err(bad_input(format!("{text}; to go on in spite of such records, use --on-bad replace or skip")));
        }
        self.sources[place.input].skipped.bad += 1;
        if *fault == Fault::NoField && self.fields_instead.is_none() {
            self.fields_instead = Some(fields.to_vec());
        }
        self.tell(&format!("{text}: passed over"));
        Ok(())
    }

    /// Counts of all inputs together.
    pub fn all(&self) -> SourceInfo {
        SourceInfo::sum(&self.sources)
    }

    /// Refuses a corpus in which every record was bad: that is a wrong `--field` or `--format`, not a poor corpus.
    pub fn check_some_use(&self) -> Result<()> {
        let SourceInfo { documents, skipped, .. } = self.all();
        let used = documents + skipped.all() - skipped.bad;
        if used > 0 || skipped.bad == 0 {
            return Ok(());
        }
        let field = &self.corpus.field;
        let why = match &self.fields_instead {
            Some(names) => {
                let guess = did_you_mean(field, names.iter().map(String::as_str));
                format!("the first of them has the fields {}; name the one with the text by --field{guess}", names.join(", "))
            }
            None => "see the messages above; is --format right?".into(),
        };
        Err(bad_input(format!("none of the {} records can be used: {why}", skipped.bad)))
    }
}

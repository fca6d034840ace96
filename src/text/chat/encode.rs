//! From a record of messages to marked tokens.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conversation::Conversation;
use super::special::{Piece, SpecialToken, SpecialTokens};
use super::template::ChatTemplate;
use super::trim::{Trimmed, apply, trim};
use super::turns;
use super::widths::Widths;
use super::{BREAK, marks};
use crate::error::bad_input;
use crate::text::Encoder;
use crate::text::filter::Condition;
use crate::text::record::{Fault, OnBad};

/// Which tokens count in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learn {
    /// Those of all turns of the assistant.
    Assistant,
    /// Those of its last turn.
    Last,
    All,
}

impl Learn {
    pub fn name(self) -> &'static str {
        match self {
            Self::Assistant => "assistant",
            Self::Last => "last",
            Self::All => "all",
        }
    }
}

/// How conversations become tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatOptions {
    pub learn: Learn,
    /// Field of a record that holds the messages; None = `messages`, else `conversations`.
    pub field: Option<String>,
    /// Tags around reasoning.
    pub reasoning: [String; 2],
    /// Most tokens of an example, its end-of-document token included: what is longer is trimmed.
    pub trim: Option<usize>,
}

/// One conversation as tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Example {
    pub ids: Vec<u32>,
    /// One a token, see [`marks`].
    pub marks: Vec<u8>,
    /// Bytes of the rendered text.
    pub text_bytes: u64,
    /// Characters of it.
    pub text_chars: u64,
    /// U+FFFD put in.
    pub replaced: u64,
    pub trimmed: bool,
    /// The record meets all conditions; if not, it was not encoded.
    pub met: bool,
}

/// Encodes conversations; shared by threads.
#[derive(Debug)]
pub struct ChatEncoder {
    template: ChatTemplate,
    options: ChatOptions,
    special: SpecialTokens,
    widths: Widths,
}

impl ChatEncoder {
    /// `tokenizer`: the file that `encoder` was loaded from.
    ///
    /// # Errors
    /// When the file cannot be read again, or the tags of reasoning are empty.
    pub fn new(tokenizer: &Path, encoder: &Encoder, template: ChatTemplate, options: ChatOptions) -> Result<Self> {
        if options.reasoning.iter().any(String::is_empty) {
            return Err(bad_input("the tags of reasoning cannot be empty: --reasoning-tags '<think>' '</think>'"));
        }
        let bytes = std::fs::read(tokenizer).with_context(|| format!("reading the tokenizer {}", tokenizer.display()))?;
        let json: Value =
            serde_json::from_slice(&bytes).with_context(|| format!("reading the tokenizer {}", tokenizer.display()))?;
        let mut special = SpecialToken::all(&json);
        if let Some((text, id)) = encoder.eod().filter(|(text, _)| special.iter().all(|t| t.text != *text)) {
            special.push(SpecialToken { text: text.into(), id, lstrip: false, rstrip: false });
        }
        let widths = Widths::of(encoder, &json);
        Ok(Self { template, options, special: SpecialTokens::new(special)?, widths })
    }

    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    pub fn options(&self) -> &ChatOptions {
        &self.options
    }

    /// The example in a record, its end-of-document token included. Without a message it is empty.
    ///
    /// # Errors
    /// The outer one when the tokenizer fails, the inner one when the record cannot be used.
    pub fn encode(&self, encoder: &Encoder, record: &[u8], on_bad: OnBad, keep: &[Condition]) -> Result<Result<Example, Fault>> {
        let reasoning = &self.options.reasoning;
        let conversation = Conversation::read(record, self.options.field.as_deref(), on_bad, keep, &self.special, reasoning);
        let conversation = match conversation {
            Ok(conversation) => conversation,
            Err(fault) => return Ok(Err(fault)),
        };
        if conversation.roles.is_empty() {
            return Ok(Ok(Example { met: conversation.met, ..Example::default() }));
        }
        let rendered = match turns::render(&self.template, &conversation, &self.special) {
            Ok(rendered) => rendered,
            Err(why) => return Ok(Err(Fault::Unusable(format!("cannot be rendered: {why}")))),
        };
        if rendered.turns.is_empty() && self.options.learn != Learn::All {
            return Ok(Err(Fault::Unusable("has no turn of the assistant, so that there is nothing to learn".into())));
        }
        let mut example = self.tokens(encoder, &rendered)?;
        (example.replaced, example.met) = (conversation.replaced, conversation.met);
        if let Some((_, eod)) = encoder.eod()
            && example.ids.last() != Some(&eod)
        {
            example.ids.push(eod);
            example.marks.push(if self.options.learn == Learn::All { marks::LEARN } else { 0 });
        }
        match self.options.trim.map_or(Trimmed::Whole, |budget| trim(&example.marks, budget)) {
            Trimmed::Whole => {}
            Trimmed::Parts(parts) => {
                (example.ids, example.marks) = (apply(&parts, &example.ids), apply(&parts, &example.marks));
                example.trimmed = true;
            }
            Trimmed::TooLong => {
                let text = format!("has {} tokens, which no trimming of its reasoning brings down to", example.ids.len());
                return Ok(Err(Fault::Unusable(format!("{text} {}", self.options.trim.unwrap_or_default()))));
            }
        }
        Ok(Ok(example))
    }

    fn tokens(&self, encoder: &Encoder, rendered: &turns::Rendered) -> Result<Example> {
        let text = &rendered.text;
        // What is known of each byte, in the bits of tokens.
        let mut known = vec![if self.options.learn == Learn::All { marks::LEARN } else { 0 }; text.len()];
        let mut paint = |range: Range<usize>, bit: u8| known[range].iter_mut().for_each(|byte| *byte |= bit);
        for (i, turn) in rendered.turns.iter().enumerate() {
            let last = i + 1 == rendered.turns.len();
            if self.options.learn != Learn::Last || last {
                paint(turn.clone(), marks::LEARN);
            }
            if last {
                paint(turn.clone(), marks::LAST);
            }
            for block in turns::blocks(text, turn, &self.options.reasoning) {
                if last {
                    paint(block.open.clone(), marks::LAST);
                }
                paint(block.open, marks::TAG);
                paint(block.inner, marks::REASONING);
                paint(block.close, marks::TAG);
            }
        }
        let mut out = Example::default();
        let (mut clean, mut bytes) = (String::new(), Vec::new());
        for piece in self.special.cut(text) {
            match piece {
                Piece::Token { id, start, end } => {
                    out.ids.push(id);
                    out.marks.push(mark_of(&known[start..end]));
                    out.text_bytes += (end - start) as u64;
                    out.text_chars += text[start..end].chars().count() as u64;
                }
                Piece::Text { start, end } => {
                    clean.clear();
                    bytes.clear();
                    for (at, c) in text[start..end].char_indices().filter(|(_, c)| *c != BREAK) {
                        clean.push(c);
                        bytes.extend_from_slice(&known[start + at..start + at + c.len_utf8()]);
                    }
                    out.text_bytes += clean.len() as u64;
                    out.text_chars += clean.chars().count() as u64;
                    for (id, range) in self.widths.encode(encoder, &clean)? {
                        out.ids.push(id);
                        out.marks.push(mark_of(&bytes[range]));
                    }
                }
            }
        }
        Ok(out)
    }
}

/// What is known of a token from what is known of its bytes: it is learnt if any of it is (as in Hugging Face's masks), and it may
/// only be cut away if all of it may.
fn mark_of(bytes: &[u8]) -> u8 {
    let any = bytes.iter().fold(0, |bits, byte| bits | byte);
    let block = marks::REASONING | marks::TAG;
    let reasoning = match () {
        () if bytes.is_empty() || bytes.iter().any(|byte| byte & block == 0) => 0,
        () if bytes.iter().all(|byte| byte & block == marks::REASONING) => marks::REASONING,
        () => marks::TAG,
    };
    any & (marks::LEARN | marks::LAST) | reasoning
}

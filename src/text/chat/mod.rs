//! Conversations as training text: read, rendered by a chat template, encoded, and marked token by token.
//!
//! [`conversation`] reads a record, [`template`] renders it, [`turns`] finds what the model is to learn in the rendered text,
//! [`special`] tells the template's special tokens from text that merely spells them, [`encode`] puts it all together, and
//! [`trim`] shortens an example without touching its answers.

pub mod conversation;
pub mod encode;
pub mod special;
pub mod template;
pub mod trim;
pub mod turns;
mod widths;

pub use encode::{ChatEncoder, ChatOptions, Example, Learn};
pub use template::{ChatTemplate, parse_date};

/// What is known of a token of a conversation: one byte a token, as `PREFIX.mask` holds it.
pub mod marks {
    /// The token is to be predicted: it counts in the loss.
    pub const LEARN: u8 = 1;
    /// The token lies within a block of reasoning, between its tags.
    pub const REASONING: u8 = 2;
    /// The token is of a tag that opens or closes a block of reasoning, or of the white space after the block.
    pub const TAG: u8 = 4;
    /// The token belongs to the last turn of the assistant.
    pub const LAST: u8 = 8;
}

/// Characters that no text has (Unicode keeps them for programs): those of this range mark places in a rendered conversation.
const PRIVATE: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';
/// Stands within what spells a special token in a record's own text.
const BREAK: char = '\u{fdd0}';
/// Where `{% generation %}` begins and ends.
const GENERATION: char = '\u{fdd1}';
const END_GENERATION: char = '\u{fdd2}';

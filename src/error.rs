//! Errors a user can cause, told apart from failures of the machine: the exit code depends on it.

use std::any::Any;
use std::fmt;

/// Exit codes of every subcommand, documented in the README.
pub mod exit_code {
    /// Done.
    pub const OK: u8 = 0;
    /// Something failed while running: disk, memory, a damaged file.
    pub const FAILURE: u8 = 1;
    /// The command line, a recipe or an input file asks for something impossible. Nothing was started.
    pub const BAD_INPUT: u8 = 2;
    /// Evaluated, but some of the tasks were left out, as their data is not at hand.
    pub const PARTIAL: u8 = 3;
    /// Stopped by SIGINT after saving a checkpoint (128 + 2).
    pub const INTERRUPTED: u8 = 130;
    /// Stopped by SIGTERM after saving a checkpoint (128 + 15).
    pub const TERMINATED: u8 = 143;
}

/// What the user gave cannot be used. The text says what was being done, where, what was expected, and what to do.
#[derive(Debug)]
pub struct BadInput(pub String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// A `BadInput` as an `anyhow::Error`.
pub fn bad_input(text: impl Into<String>) -> anyhow::Error {
    BadInput(text.into()).into()
}

/// Exit code that an error stands for.
pub fn exit_code_of(error: &anyhow::Error) -> u8 {
    if error.chain().any(|e| e.is::<BadInput>()) { exit_code::BAD_INPUT } else { exit_code::FAILURE }
}

/// What a panic said; "" when it was no text.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default()
}

/// " (did you mean `x`?)" when one of `candidates` is close to `word`, else "".
pub fn did_you_mean<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    candidates
        .into_iter()
        .map(|c| (strsim::damerau_levenshtein(word, c), c))
        .filter(|(distance, c)| *distance <= 1 + c.len().max(word.len()) / 4)
        .min()
        .map_or(String::new(), |(_, c)| format!(" (did you mean `{c}`?)"))
}

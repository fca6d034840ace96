//! What is wrong with a recipe and where: all problems of one file are told at once.

use std::fmt::Write;

/// Where a value was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Origin {
    /// Byte offset in the recipe file.
    File(usize),
    /// Index into the `--set` arguments.
    Set(usize),
    /// Nowhere: a default or a preset's value, or something that is missing altogether.
    #[default]
    Absent,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    pub origin: Origin,
    /// A sentence that names the key.
    pub text: String,
}

impl Problem {
    pub fn new(origin: Origin, text: impl Into<String>) -> Self {
        Self { origin, text: text.into() }
    }
}

/// The text that problems point into.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// The recipe's path as the user gave it.
    pub file: String,
    pub text: String,
    /// The `--set` arguments as given.
    pub sets: Vec<String>,
}

impl Source {
    /// 1-based line and column (in characters) of a byte offset.
    pub fn line_column(&self, offset: usize) -> (usize, usize) {
        let mut offset = offset.min(self.text.len());
        while !self.text.is_char_boundary(offset) {
            offset -= 1;
        }
        let before = &self.text[..offset];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
    }

    /// `recipe.toml:12:1: <problem>` and, below, the line itself.
    fn render(&self, problem: &Problem) -> String {
        match problem.origin {
            Origin::File(offset) => {
                let (line, column) = self.line_column(offset);
                let content = self.text.split('\n').nth(line - 1).unwrap_or("").trim();
                let mut shown: String = content.chars().take(120).collect();
                if shown.len() < content.len() {
                    shown.push_str(" ...");
                }
                format!("{}:{line}:{column}: {}\n    line {line} | {shown}", self.file, problem.text)
            }
            Origin::Set(index) => format!("--set {}: {}", self.sets.get(index).map_or("", String::as_str), problem.text),
            Origin::Absent => format!("{}: {}", self.file, problem.text),
        }
    }

    /// All problems as one message, in the order of the file. Equal ones are told once.
    pub fn report(&self, mut problems: Vec<Problem>) -> String {
        problems.sort();
        problems.dedup();
        let mut out = String::new();
        if problems.len() > 1 {
            let _ = write!(out, "the recipe {} has {} problems; nothing was started", self.file, problems.len());
        }
        for p in &problems {
            let separator = if out.is_empty() { "" } else { "\n" };
            let _ = write!(out, "{separator}{}", self.render(p));
        }
        out
    }
}

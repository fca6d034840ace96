//! How closely to follow lm-eval where it is at fault.

use std::collections::BTreeMap;
use std::sync::Mutex;

/// Whose rules hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compat {
    /// lm-eval 0.4.13's, faults included, but never its crashes.
    #[default]
    LmEval,
    /// The faults of `Fault` are put right, and each that applied is named in the results.
    Strict,
}

/// Faults of lm-eval 0.4.13 that change scores without a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A first document whose text is all digits turns the task into one of several contexts: the question disappears.
    DigitsAsIndex,
    /// A target that looks like a Python list is evaluated as one.
    TargetAsLiteral,
    /// The pool of few-shot examples holds the document that is asked.
    FewshotLeak,
    /// Shots of a `loglikelihood` task have a delimiter that the scored continuation lacks, or has twice.
    ShotDelimiter,
    /// The ids of the context alone are no prefix of those of context and continuation: other text is scored.
    BoundaryMismatch,
    /// The rolling windows of a tokenizer that adds a BOS begin with two, and the BOS is scored.
    DoubledBos,
}

impl Fault {
    /// Name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Fault::DigitsAsIndex => "digits_as_index",
            Fault::TargetAsLiteral => "target_as_literal",
            Fault::FewshotLeak => "fewshot_leak",
            Fault::ShotDelimiter => "shot_delimiter",
            Fault::BoundaryMismatch => "boundary_mismatch",
            Fault::DoubledBos => "doubled_bos",
        }
    }
}

/// How often each fault applied: was reproduced under `LmEval`, put right under `Strict`.
#[derive(Debug, Default)]
pub struct Faults(Mutex<BTreeMap<Fault, u64>>);

impl Faults {
    pub fn note(&self, fault: Fault) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner()).entry(fault).or_default() += 1;
    }

    pub fn counts(&self) -> BTreeMap<Fault, u64> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

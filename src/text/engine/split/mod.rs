//! Cutting text into pieces as the regular expressions of byte-level tokenizers do, without a regular-expression engine.
//!
//! Each rule says it twice: [`Rule::next`] goes character by character and covers everything; [`Rule::ends`] finds all
//! boundaries within 64 bytes at once by operations on bits, and leaves out those it is not certain of.

mod cl100k;
mod deepseek;
mod gpt2;
mod kinds;
mod o200k;
mod scalar;
mod white;

use super::batch::Batch;
use super::padded::Padded;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Level, Portable, Wide};
use super::unicode::Classes;
use cl100k::Cl100k;
use deepseek::DeepSeek;
use gpt2::Gpt2;
use o200k::O200k;

/// How one family of tokenizers cuts text.
trait Rule: Copy {
    /// End of the piece that starts at `at`, before the end of the text.
    fn next(self, text: Padded<'_>, at: usize) -> usize;

    /// Bit i: a piece starts at `at + i`. A piece starts at `at`. Bit 0 is never set, and boundaries that need more than this
    /// block to be known are not either, nor are those behind them.
    fn ends<W: Wide>(self, classes: &Classes, text: Padded<'_>, at: usize) -> u64;
}

/// The rules that are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Splitter {
    Gpt2,
    /// cl100k and Llama 3.
    Cl100k,
    Qwen,
    O200k,
    DeepSeek,
}

pub const CL100K_PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub const QWEN_PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub const O200K_PATTERN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The three of DeepSeek, in their order. The last holds newlines as such.
pub const DEEPSEEK_PATTERNS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
];
/// Of the byte-level pre-tokenizer's own expression, for files that write it out.
pub const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

impl Splitter {
    /// The rule that these regular expressions, one applied after another, are.
    pub fn of_patterns(patterns: &[&str]) -> Option<Self> {
        match patterns {
            [p] if *p == GPT2_PATTERN => Some(Self::Gpt2),
            [p] if *p == CL100K_PATTERN => Some(Self::Cl100k),
            [p] if *p == QWEN_PATTERN => Some(Self::Qwen),
            [p] if *p == O200K_PATTERN => Some(Self::O200k),
            p if *p == DEEPSEEK_PATTERNS => Some(Self::DeepSeek),
            _ => None,
        }
    }

    /// Cuts pieces from `at` on into `batch` until the text ends or the batch is nearly full. Returns how far it came.
    pub fn fill(self, level: Level, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
        match self {
            Self::Gpt2 => fill(Gpt2, level, text, at, batch),
            Self::Cl100k => fill(Cl100k::<3>, level, text, at, batch),
            Self::Qwen => fill(Cl100k::<1>, level, text, at, batch),
            Self::O200k => fill(O200k, level, text, at, batch),
            Self::DeepSeek => fill(DeepSeek, level, text, at, batch),
        }
    }
}

fn fill<R: Rule>(rule: R, level: Level, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
    match level {
        Level::Portable => fill_wide::<R, Portable>(rule, text, at, batch),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Level::detect` found what the function is compiled for.
        Level::Avx2 => unsafe { fill_avx2(rule, text, at, batch) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { fill_avx512(rule, text, at, batch) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn fill_avx2<R: Rule>(rule: R, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
    fill_wide::<R, Avx2>(rule, text, at, batch)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,bmi1,bmi2,lzcnt,popcnt")]
fn fill_avx512<R: Rule>(rule: R, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
    fill_wide::<R, Avx512>(rule, text, at, batch)
}

#[inline(always)]
fn fill_wide<R: Rule, W: Wide>(rule: R, text: Padded<'_>, mut at: usize, batch: &mut Batch) -> usize {
    let classes = Classes::get();
    while at < text.len() && batch.room() >= 64 {
        let ends = rule.ends::<W>(classes, text, at);
        if ends != 0 {
            at = batch.push_ends(at, ends);
        } else {
            let end = rule.next(text, at);
            batch.push(at, end - at);
            at = end;
        }
    }
    at
}

//! Learning a byte-level BPE vocabulary.

mod changes;
mod count;
mod merges;

use anyhow::{Context, Result, anyhow};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

use crate::error::bad_input;

/// Special token with id 0.
pub const END_OF_TEXT: &str = "<|endoftext|>";

type Trained = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Special tokens of a new vocabulary in the order of their ids: [`END_OF_TEXT`], then `more`, each once.
pub fn special_tokens(more: &[String]) -> Vec<String> {
    let mut all = vec![END_OF_TEXT.to_string()];
    for token in more {
        if !all.contains(token) {
            all.push(token.clone());
        }
    }
    all
}

/// Refuses, before the corpus is read, a vocabulary too small for its special tokens and the 256 bytes, or too large.
pub fn check_size(size: usize, special: &[String]) -> Result<()> {
    let least = 256 + special.len();
    if size < least {
        return Err(bad_input(format!(
            "--train-vocab {size} is too small: 256 bytes and {} special tokens take {least} entries",
            special.len()
        )));
    }
    if size > 1 << 24 {
        return Err(bad_input(format!("--train-vocab {size} is too large: at most {} entries", 1 << 24)));
    }
    if special.iter().any(String::is_empty) {
        return Err(bad_input("--special is empty: give the token's text"));
    }
    Ok(())
}

/// Learns a byte-level BPE of exactly `size` entries from `documents` and returns the text of its `tokenizer.json`.
///
/// Ids: special tokens, the 256 bytes, then merges by falling frequency (of equals, the pair of smaller ids first): the merges of
/// Hugging Face's `BpeTrainer`. Text is cut by GPT-2's expression, nothing is normalised, no space is put in front. The result
/// depends on the documents alone, not on their order or on threads. Words are counted in parallel on the current rayon
/// pool; memory follows the number of different words, not the size of the corpus.
///
/// # Errors
/// A size that cannot be, the first error among the documents, a corpus with too few pairs for `size`, or with more than 2^32
/// different words.
pub fn train(size: usize, special: &[String], documents: impl Iterator<Item = Result<String>> + Send) -> Result<String> {
    check_size(size, special)?;
    let learned = merges::learn(size, special, count::count(documents)?)?;
    if learned.tokens.len() < size {
        let most = learned.tokens.len();
        return Err(bad_input(format!(
            "the corpus is too small for a vocabulary of {size}: it gives {most} entries, then no two pieces stand next to \
             each other in any word; use --train-vocab {most}, or more text"
        )));
    }
    let mut text = tokenizer_json(special, learned).context("writing the tokenizer as JSON")?;
    text.push('\n');
    Ok(text)
}

fn tokenizer_json(special: &[String], learned: merges::Learned) -> Result<String> {
    let failed = |e: tokenizers::Error| anyhow!("{e}");
    let side = |id: u32| learned.tokens[id as usize].clone();
    let merges = learned.merges.iter().map(|(left, right)| (side(*left), side(*right))).collect();
    let ids: Vocab = learned.tokens.iter().cloned().zip(0..).collect();
    let model = BPE::builder().vocab_and_merges(ids, merges).build();
    let mut tokenizer = Trained::new(model.map_err(failed)?);
    let byte_level = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(byte_level));
    tokenizer.with_decoder(Some(byte_level));
    // Offsets cover the spaces too, as in GPT-2's own file.
    tokenizer.with_post_processor(Some(ByteLevel::new(false, false, true)));
    tokenizer.add_special_tokens(special.iter().map(|token| AddedToken::from(token.as_str(), true))).map_err(failed)?;
    tokenizer.to_string(true).map_err(failed)
}

#[cfg(test)]
mod tests;

//! From text to token ids: where context ends and continuation begins, windows, truncation.
//!
//! The rules are those of lm-eval's `TemplateLM` and `HFLM`: context and continuation are encoded together and split at the length
//! of the context encoded alone, which is not always where the text splits.

use std::sync::Arc;

use anyhow::Result;

use super::compat::{Compat, Fault, Faults};
use super::python::text::{len, rstrip};
use crate::error::bad_input;

/// A tokenizer as evaluation needs it.
pub trait Encode {
    /// Ids of `text`. With `special`, the tokenizer adds what it adds by itself (a BOS, say); special tokens spelled out in `text` are
    /// recognised either way.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>>;
    /// A place from `from` on where `text` can be cut, whatever stands in it elsewhere: its ids are those of the first part and, encoded
    /// without `special`, those of the second. None where there is none, or nobody can tell.
    fn cut_after(&self, _text: &str, _from: usize) -> Option<usize> {
        None
    }
    /// Beginning-of-text token: id and text.
    fn bos(&self) -> Option<(u32, &str)>;
    /// End-of-text token: id and text.
    fn eos(&self) -> Option<(u32, &str)>;
}

/// Context and continuation of a log-likelihood request in token ids.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pair {
    /// Shared by the choices of a document.
    pub context: Arc<[u32]>,
    pub continuation: Vec<u32>,
    /// A token spans the boundary so that nothing of the continuation was left: it was encoded alone.
    pub boundary_fallback: bool,
    /// The ids of the context are no prefix of those of the whole.
    pub boundary_mismatch: bool,
}

impl Pair {
    /// Without the first `cut` ids of the context.
    pub fn without(&self, cut: usize) -> Self {
        let context = if cut == 0 { self.context.clone() } else { self.context[cut..].into() };
        Self { context, continuation: self.continuation.clone(), ..*self }
    }
}

/// The last text that was encoded: what the next one has in common with it, as contexts have, is not encoded again.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Memo {
    text: String,
    ids: Arc<[u32]>,
    /// Places where the text was cut, and the number of ids before them.
    cuts: Vec<(usize, usize)>,
}

/// Bytes between two cuts at least; more than the text of a special token has, by which the beginning of a text is judged.
const PART: usize = 256;

/// Context handed to generation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prompt {
    /// All of the context.
    pub ids: Vec<u32>,
    /// Tokens to cut off on the left.
    pub truncated: usize,
}

impl Prompt {
    /// What the model is given.
    pub fn input(&self) -> &[u32] {
        &self.ids[self.truncated..]
    }
}

/// Encodes requests under one set of rules.
pub struct Encoder<'a, T: Encode + ?Sized> {
    pub tokenizer: &'a T,
    pub compat: Compat,
    /// Overrides whether special tokens are added (`add_bos_token` of lm-eval).
    pub add_special: Option<bool>,
    /// Longest input of the model, tokens.
    pub max_length: usize,
    pub faults: &'a Faults,
}

impl<T: Encode + ?Sized> Encoder<'_, T> {
    /// The token that stands before a text without context: BOS, else EOS.
    pub fn prefix_token(&self) -> Result<u32> {
        self.tokenizer.bos().or_else(|| self.tokenizer.eos()).map(|(id, _)| id).ok_or_else(|| {
            bad_input(
                "the tokenizer defines neither a beginning-of-text nor an end-of-text token, which a text without context needs",
            )
        })
    }

    /// `tok_encode`: a text that begins with BOS or EOS spelled out gets no second one.
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let spelled = |token: Option<(u32, &str)>| token.is_some_and(|(_, t)| !t.is_empty() && text.starts_with(t));
        let special = !spelled(self.tokenizer.bos()) && !spelled(self.tokenizer.eos()) && self.add_special.unwrap_or(true);
        self.tokenizer.encode(text, special)
    }

    /// As `encode`, of a text that may begin as the one before.
    fn encode_after(&self, text: &str, memo: &mut Memo) -> Result<Arc<[u32]>> {
        if memo.text == text && !memo.ids.is_empty() {
            return Ok(memo.ids.clone());
        }
        let common = memo.text.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
        // The space behind a cut is a part of what is common.
        while memo.cuts.last().is_some_and(|(at, _)| *at >= common) {
            memo.cuts.pop();
        }
        let (mut at, known) = memo.cuts.last().copied().unwrap_or_default();
        let mut ids = memo.ids[..known].to_vec();
        memo.text.clear();
        while at < text.len() || at == 0 {
            let cut = self.tokenizer.cut_after(text, at + PART);
            let part = &text[at..cut.unwrap_or(text.len())];
            ids.extend(if at == 0 { self.encode(part)? } else { self.tokenizer.encode(part, false)? });
            let Some(cut) = cut else { break };
            memo.cuts.push((cut, ids.len()));
            at = cut;
        }
        memo.text.push_str(text);
        memo.ids = ids.into();
        Ok(memo.ids.clone())
    }

    /// As `encode`, of the text of `memo` with `more` behind it: how many of the first ids are those of `memo`, and the others.
    fn encode_longer(&self, memo: &Memo, more: &str) -> Result<(usize, Vec<u32>)> {
        let (at, ids) = memo.cuts.last().copied().unwrap_or_default();
        let rest = format!("{}{more}", &memo.text[at..]);
        Ok((ids, if at == 0 { self.encode(&rest)? } else { self.tokenizer.encode(&rest, false)? }))
    }

    /// Ids of a log-likelihood request (rules 1 to 4).
    pub fn pair(&self, context: &str, continuation: &str) -> Result<Pair> {
        self.pair_after(context, continuation, &mut Memo::default())
    }

    /// As `pair`. The choices of a document have one context, and documents their examples in common.
    pub fn pair_after(&self, context: &str, continuation: &str, memo: &mut Memo) -> Result<Pair> {
        if context.is_empty() {
            return self.pair_without_context(continuation);
        }
        let kept = rstrip(context);
        let moved = format!("{}{continuation}", &context[kept.len()..]);
        let alone = self.encode_after(kept, memo)?;
        let (known, mut whole) = self.encode_longer(memo, &moved)?;
        let rest = &alone[known..];
        let mut pair = Pair { boundary_mismatch: !whole.starts_with(rest), ..Pair::default() };
        pair.continuation = whole.split_off(rest.len().min(whole.len()));
        pair.context = alone;
        if pair.context.is_empty() {
            // White space alone, and the tokenizer adds nothing: lm-eval stops here with an assertion.
            pair.context = [self.prefix_token()?].into();
        }
        if pair.continuation.is_empty() {
            pair.boundary_fallback = true;
        } else if pair.boundary_mismatch {
            self.faults.note(Fault::BoundaryMismatch);
        }
        if pair.boundary_fallback || (pair.boundary_mismatch && self.compat == Compat::Strict) {
            pair.continuation = self.tokenizer.encode(&moved, false)?;
        }
        if pair.continuation.is_empty() {
            return Err(bad_input(format!("the continuation {continuation:?} has no tokens, so it has no log-likelihood")));
        }
        Ok(pair)
    }

    /// Rule 3: the prefix token is the context, unless the continuation begins with it.
    fn pair_without_context(&self, continuation: &str) -> Result<Pair> {
        let prefix = self.prefix_token()?;
        let mut ids = self.tokenizer.encode(continuation, false)?;
        if ids.first() == Some(&prefix) {
            ids.remove(0);
        }
        if ids.is_empty() {
            return Err(bad_input(
                "a log-likelihood of an empty continuation after an empty context was asked: it has no tokens",
            ));
        }
        Ok(Pair { context: [prefix].into(), continuation: ids, ..Pair::default() })
    }

    /// Rule 5: the last `max_length + 1` ids, and how many were cut off on the left.
    ///
    /// Errors: the continuation alone does not fit.
    pub fn truncate(&self, pair: &Pair) -> Result<(Pair, usize)> {
        let cut = self.cut(pair)?;
        Ok((pair.without(cut), cut))
    }

    /// How many ids `truncate` cuts off.
    ///
    /// Errors: as there.
    pub fn cut(&self, pair: &Pair) -> Result<usize> {
        if pair.continuation.len() > self.max_length {
            return Err(bad_input(format!(
                "a continuation of {} tokens does not fit the model's {} tokens",
                pair.continuation.len(),
                self.max_length
            )));
        }
        Ok((pair.context.len() + pair.continuation.len()).saturating_sub(self.max_length + 1))
    }

    /// Rolling windows of `text`: (context, tokens predicted), every token once.
    ///
    /// Under `LmEval` a tokenizer that adds a BOS gives windows that begin with two, and scores the second; `Strict` has one.
    pub fn rolling(&self, text: &str) -> Result<Vec<Pair>> {
        let prefix = self.prefix_token()?;
        let mut ids = self.encode(text)?;
        let added = ids.first() == Some(&prefix) && self.tokenizer.encode(text, false)?.first() != Some(&prefix);
        if added {
            self.faults.note(Fault::DoubledBos);
            if self.compat == Compat::Strict {
                ids.remove(0);
            }
        }
        Ok(windows(&ids, prefix, self.max_length))
    }

    /// Ids of a prompt, cut on the left so that `max_gen_toks` tokens have room.
    ///
    /// Errors: no room for even one token of context.
    pub fn prompt(&self, context: &str, max_gen_toks: usize, memo: &mut Memo) -> Result<Prompt> {
        let room = self.max_length.checked_sub(max_gen_toks).filter(|room| *room > 0).ok_or_else(|| {
            bad_input(format!("generating {max_gen_toks} tokens leaves no context in the model's {} tokens", self.max_length))
        })?;
        let mut ids = self.encode_after(context, memo)?.to_vec();
        if ids.is_empty() {
            ids.push(self.prefix_token()?);
        }
        let truncated = ids.len().saturating_sub(room);
        Ok(Prompt { ids, truncated })
    }

    /// Number of characters that rule 2 moves into the continuation.
    pub fn moved(context: &str) -> usize {
        len(context) - len(rstrip(context))
    }
}

/// Disjoint windows of at most `max_length` inputs (lm-eval's `get_rolling_token_windows` with one token of context, made disjoint):
/// the first is predicted from `prefix`, the last is filled up with context on its left.
pub fn windows(ids: &[u32], prefix: u32, max_length: usize) -> Vec<Pair> {
    assert!(max_length > 0, "windows of no tokens");
    let mut out = Vec::new();
    let mut predicted = ids.len().min(max_length);
    if predicted > 0 {
        out.push(Pair { context: [prefix].into(), continuation: ids[..predicted].to_vec(), ..Pair::default() });
    }
    while predicted < ids.len() {
        let end = (predicted + max_length).min(ids.len());
        let context = ids[end - max_length - 1..predicted].into();
        out.push(Pair { context, continuation: ids[predicted..end].to_vec(), ..Pair::default() });
        predicted = end;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_score_every_token_once_and_fill_the_last() {
        let ids: Vec<u32> = (10..44).collect();
        let w = windows(&ids, 2, 16);
        let shape: Vec<_> = w.iter().map(|p| (p.context.len(), p.continuation.len())).collect();
        assert_eq!(shape, [(1, 16), (1, 16), (15, 2)]);
        assert_eq!(w.iter().flat_map(|p| p.continuation.clone()).collect::<Vec<_>>(), ids);
        assert_eq!((w[0].context[0], w[1].context[0], w[2].context[0]), (2, 25, 27));
        assert!(windows(&[], 2, 16).is_empty());
    }
}

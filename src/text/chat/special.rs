//! Special tokens of a template, told from text of a record that merely spells them.

use aho_corasick::{AhoCorasick, MatchKind};
use anyhow::Result;
use serde_json::Value;

use super::BREAK;
use crate::error::bad_input;

/// A special token as `tokenizer.json` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    pub text: String,
    pub id: u32,
    /// Takes the white space before it, or after it, along.
    pub lstrip: bool,
    pub rstrip: bool,
}

impl SpecialToken {
    /// Those of a parsed `tokenizer.json`, in its order.
    pub fn all(tokenizer: &Value) -> Vec<Self> {
        let added = tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
        let flag = |token: &Value, name: &str| token.get(name).and_then(Value::as_bool) == Some(true);
        let special = added.filter(|token| flag(token, "special"));
        special
            .filter_map(|token| {
                let text = token.get("content")?.as_str().filter(|text| !text.is_empty())?.to_string();
                let id = u32::try_from(token.get("id")?.as_u64()?).ok()?;
                Some(Self { text, id, lstrip: flag(token, "lstrip"), rstrip: flag(token, "rstrip") })
            })
            .collect()
    }
}

/// A stretch of rendered text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// A special token of the template.
    Token { id: u32, start: usize, end: usize },
    /// Text, whatever it spells.
    Text { start: usize, end: usize },
}

#[derive(Debug)]
pub struct SpecialTokens {
    tokens: Vec<SpecialToken>,
    search: AhoCorasick,
}

impl SpecialTokens {
    /// # Errors
    /// When there are too many of them to be searched for.
    pub fn new(tokens: Vec<SpecialToken>) -> Result<Self> {
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|t| &t.text))
            .map_err(|e| bad_input(format!("the tokenizer's special tokens cannot be searched for: {e}")))?;
        Ok(Self { tokens, search })
    }

    /// Puts [`BREAK`] behind the first character of everything in `text` that spells a special token, or that could begin one at
    /// its end; but not into the texts of `spared`.
    pub fn break_up(&self, text: &mut String, spared: &[String]) {
        let mut out = String::new();
        let mut done = 0;
        let mut at = 0;
        while let Some(found) = self.search.find(&text[at..]) {
            let (start, end) = (at + found.start(), at + found.end());
            let first = text[start..].chars().next().map_or(1, char::len_utf8);
            if spared.iter().any(|s| *s == text[start..end]) {
                at = end;
                continue;
            }
            out.push_str(&text[done..start + first]);
            out.push(BREAK);
            // Another one may begin inside.
            (done, at) = (start + first, start + first);
        }
        let longest = self.tokens.iter().map(|t| t.text.len()).max().unwrap_or(0);
        let begins = |start: &usize| self.tokens.iter().any(|t| t.text.starts_with(&text[*start..]));
        let tail = text.len().saturating_sub(longest).max(done)..text.len();
        for start in tail.filter(|at| text.is_char_boundary(*at)).filter(begins) {
            let first = text[start..].chars().next().map_or(1, char::len_utf8);
            out.push_str(&text[done..start + first]);
            out.push(BREAK);
            done = start + first;
        }
        if done > 0 {
            out.push_str(&text[done..]);
            *text = out;
        }
    }

    /// Whether `text` holds what spells a special token.
    pub fn spells(&self, text: &str) -> bool {
        self.search.is_match(text)
    }

    /// Whether `text` ends in a special token.
    pub fn ends(&self, text: &str) -> bool {
        self.tokens.iter().any(|t| text.ends_with(&t.text))
    }

    /// Cuts rendered text at its special tokens. White space that they take along belongs to no piece.
    pub fn cut(&self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut done = 0;
        for found in self.search.find_iter(text) {
            let token = &self.tokens[found.pattern()];
            let before = &text[done..found.start().max(done)];
            let end = if token.lstrip { done + before.trim_end().len() } else { found.start() };
            if end > done {
                pieces.push(Piece::Text { start: done, end });
            }
            pieces.push(Piece::Token { id: token.id, start: found.start(), end: found.end() });
            let after = &text[found.end()..];
            let taken = if token.rstrip { after.len() - after.trim_start().len() } else { 0 };
            done = found.end() + taken;
        }
        if done < text.len() {
            pieces.push(Piece::Text { start: done, end: text.len() });
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(texts: &[(&str, bool, bool)]) -> SpecialTokens {
        let one = |(i, (text, lstrip, rstrip)): (usize, &(&str, bool, bool))| SpecialToken {
            text: text.to_string(),
            id: i as u32,
            lstrip: *lstrip,
            rstrip: *rstrip,
        };
        SpecialTokens::new(texts.iter().enumerate().map(one).collect()).unwrap()
    }

    /// Whatever a text spells, and whatever a template puts behind it, the text makes no special token.
    #[test]
    fn a_broken_text_makes_no_token() {
        let special =
            tokens(&[("<|end|>", false, false), ("<s>", false, false), ("<s><s>x", false, false), ("é>", false, false)]);
        let texts = ["<|end|>", "a<s><s>xé>", "<<s>", "<|end|", "<", "<s><s", "é", "plain", ""];
        for a in texts {
            for b in ["", "|end|>", "end|>", "s>", "s><s>x", "x", ">", "<s>"] {
                let mut broken = a.to_string();
                special.break_up(&mut broken, &[]);
                assert_eq!(broken.replace(BREAK, ""), a);
                let own = broken.len();
                let made = special.cut(&format!("{broken}{b}"));
                let in_text = made.iter().any(|p| matches!(p, Piece::Token { start, .. } if *start < own));
                assert!(!in_text, "{a:?} then {b:?}: {made:?}");
            }
        }
        let mut spared = "<s>a<|end|>".to_string();
        special.break_up(&mut spared, &["<s>".to_string()]);
        assert_eq!(spared, format!("<s>a<{BREAK}|end|>"));
    }

    #[test]
    fn white_space_goes_with_the_tokens_that_take_it() {
        let special = tokens(&[("<a>", false, false), ("<l>", true, false), ("<r>", false, true)]);
        let text = "x <a> y <l>\n<r> \n z";
        let shown: Vec<String> = special
            .cut(text)
            .iter()
            .map(|p| match p {
                Piece::Token { id, .. } => format!("#{id}"),
                Piece::Text { start, end } => text[*start..*end].to_string(),
            })
            .collect();
        assert_eq!(shown, ["x ", "#0", " y", "#1", "\n", "#2", "z"]);
    }
}

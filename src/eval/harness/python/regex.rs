//! Python's `re` over `fancy_regex`: patterns are translated where the two dialects differ, and matches are found as `re` finds them.

use anyhow::Result;
use fancy_regex::Regex;

use crate::error::bad_input;

/// A compiled Python pattern.
#[derive(Debug, Clone)]
pub struct Pattern {
    regex: Regex,
}

/// One item of `findall`: the whole match or the one group, or all groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    One(String),
    Groups(Vec<String>),
}

impl Pattern {
    /// Errors: a pattern that `re` or `fancy_regex` cannot read, with the pattern in the text.
    pub fn new(pattern: &str) -> Result<Self> {
        let regex = Regex::new(&translate(pattern))
            .map_err(|e| bad_input(format!("the regular expression {pattern:?} cannot be read: {e}")))?;
        Ok(Self { regex })
    }

    /// `pattern.findall(text)`. A pattern that backtracks without end finds nothing more.
    pub fn findall(&self, text: &str) -> Vec<Found> {
        let mut found = Vec::new();
        self.each(text, |captures| {
            let group = |i: usize| captures.get(i).map_or(String::new(), |m| m.as_str().to_string());
            found.push(match captures.len() {
                1 => Found::One(group(0)),
                2 => Found::One(group(1)),
                n => Found::Groups((1..n).map(group).collect()),
            });
        });
        found
    }

    /// `pattern.sub(replacement, text)`; `\1` and `\g<1>` in `replacement` stand for groups.
    pub fn sub(&self, replacement: &str, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut copied = 0;
        self.each(text, |captures| {
            let Some(whole) = captures.get(0) else { return };
            out.push_str(&text[copied..whole.start()]);
            expand(replacement, captures, &mut out);
            copied = whole.end();
        });
        out.push_str(&text[copied..]);
        out
    }

    /// Number of parts of `pattern.split(text)`.
    pub fn split_count(&self, text: &str) -> usize {
        let mut count = 1;
        self.each(text, |_| count += 1);
        count
    }

    /// All matches as `re.finditer` finds them: an empty match may follow a match directly, but not another empty one.
    fn each(&self, text: &str, mut with: impl FnMut(&fancy_regex::Captures)) {
        let mut at = 0;
        let mut empty_at = None;
        while at <= text.len() {
            let Ok(Some(captures)) = self.regex.captures_from_pos(text, at) else { return };
            let Some(whole) = captures.get(0) else { return };
            if whole.start() == whole.end() && empty_at == Some(whole.end()) {
                let Some(c) = text[at..].chars().next() else { return };
                at += c.len_utf8();
                continue;
            }
            with(&captures);
            at = whole.end();
            empty_at = (whole.start() == whole.end()).then_some(at);
        }
    }
}

/// Expands a replacement template of `re.sub`.
fn expand(template: &str, captures: &fancy_regex::Captures, out: &mut String) {
    let mut rest = template;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let group = |name: &str| match name.parse::<usize>() {
            Ok(i) => captures.get(i).map_or("", |m| m.as_str()),
            Err(_) => captures.name(name).map_or("", |m| m.as_str()),
        };
        if let Some((name, after)) = rest.strip_prefix("g<").and_then(|r| r.split_once('>')) {
            out.push_str(group(name));
            rest = after;
            continue;
        }
        let digits = rest.bytes().take(2).take_while(u8::is_ascii_digit).count();
        if digits > 0 {
            out.push_str(group(&rest[..digits]));
            rest = &rest[digits..];
            continue;
        }
        let Some(c) = rest.chars().next() else { break };
        match c {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            '\\' => out.push('\\'),
            c => out.extend(['\\', c]),
        }
        rest = &rest[c.len_utf8()..];
    }
    out.push_str(rest);
}

/// `re.escape(text)`
pub fn escape(text: &str) -> String {
    text.chars().flat_map(|c| if "()[]{}?*+-|^$\\.&~# \t\n\r\u{b}\u{c}".contains(c) { vec!['\\', c] } else { vec![c] }).collect()
}

/// A Python pattern in the dialect of `fancy_regex`.
///
/// `$` also matches before a last newline, `\Z` is the end, `\s` has U+001C to U+001F, `\w` has no marks; `{` that starts no
/// repetition is itself; inside a class `[`, `&` and `~` are themselves.
fn translate(pattern: &str) -> String {
    let chars: Vec<char> = pattern.chars().collect();
    let multiline = pattern.starts_with("(?") && pattern[2..].chars().take_while(char::is_ascii_alphabetic).any(|c| c == 'm');
    let mut out = String::new();
    let mut i = 0;
    // Index just after the `[` or `[^` of the class we are in.
    let mut class_start = None;
    while i < chars.len() {
        let c = chars[i];
        match (c, class_start) {
            ('\\', _) if i + 1 < chars.len() => {
                i += 1;
                escaped(chars[i], class_start.is_some(), &mut out);
            }
            (']', Some(start)) if i > start => {
                class_start = None;
                out.push(']');
            }
            ('[' | ']' | '&' | '~', Some(_)) => out.extend(['\\', c]),
            ('[', None) => {
                out.push('[');
                if chars.get(i + 1) == Some(&'^') {
                    out.push('^');
                    i += 1;
                }
                class_start = Some(i + 1);
            }
            ('$', None) if !multiline => out.push_str("(?=\\n?\\z)"),
            ('{', None) if !is_repetition(&chars[i..]) => out.push_str("\\{"),
            _ => out.push(c),
        }
        i += 1;
    }
    out
}

fn escaped(c: char, in_class: bool, out: &mut String) {
    match (c, in_class) {
        ('Z', false) => out.push_str("\\z"),
        ('s', true) => out.push_str("\\s\\x1c-\\x1f"),
        ('s', false) => out.push_str("[\\s\\x1c-\\x1f]"),
        ('S', false) => out.push_str("[^\\s\\x1c-\\x1f]"),
        ('w', true) => out.push_str("\\p{L}\\p{N}_"),
        ('w', false) => out.push_str("[\\p{L}\\p{N}_]"),
        ('W', false) => out.push_str("[^\\p{L}\\p{N}_]"),
        // Rust gives meanings to these.
        ('<' | '>', _) => out.push(c),
        (c, _) if !c.is_ascii() || c == '"' || c == '\'' || c == '/' || c == ',' => out.push(c),
        (c, _) => out.extend(['\\', c]),
    }
}

/// Whether `{...` is `{m}`, `{m,}`, `{,n}` or `{m,n}`.
fn is_repetition(chars: &[char]) -> bool {
    let Some(end) = chars.iter().position(|c| *c == '}') else { return false };
    let inside: String = chars[1..end].iter().collect();
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    match inside.split_once(',') {
        Some((m, n)) => digits(m) && digits(n) && !(m.is_empty() && n.is_empty()),
        None => !inside.is_empty() && digits(&inside),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pattern: &str, text: &str) -> Vec<String> {
        let found = Pattern::new(pattern).unwrap().findall(text);
        found.into_iter().map(|f| if let Found::One(s) = f { s } else { format!("{f:?}") }).collect()
    }

    // Right-hand sides are CPython's.
    #[test]
    fn finds_what_re_finds() {
        assert_eq!(all("a*", "baac"), ["", "aa", "", ""]);
        assert_eq!(all(r"\.$", "a.\n"), ["."]);
        assert_eq!(all(r"\.\Z", "a.\n"), Vec::<String>::new());
        assert_eq!(all(r"[^\s]+", "a\u{1c}b"), ["a", "b"]);
        assert_eq!(all("[[&~]", "[&~x"), ["[", "&", "~"]);
        assert_eq!(all(r"{\s*([^}]*?)\s*}", "{ a }"), ["a"]);
        assert_eq!(all("(?<=the answer is )(.*)(?=.)", "the answer is True"), ["Tru"]);
        assert_eq!(all(r"\w+", "e\u{301}a"), ["e", "a"]);
        assert_eq!(all("a{,2}b", "aaab"), ["aab"]);
        assert_eq!(Pattern::new("(a)|(b)").unwrap().findall("ab")[1], Found::Groups(vec!["".into(), "b".into()]));
    }

    #[test]
    fn replaces_what_re_replaces() {
        assert_eq!(Pattern::new(r"\(\s*([^\)]*?)\s*\)").unwrap().sub(r"(\1)", "( a ) ( b)"), "(a) (b)");
        assert_eq!(Pattern::new("x*").unwrap().sub("-", "abxd"), "-a-b--d-");
        assert_eq!(Pattern::new("(?s).*#### ").unwrap().sub("", "a\nb\n#### 5"), "5");
        assert_eq!(Pattern::new(r"\s+").unwrap().split_count(" a b\n"), 4);
        assert_eq!(escape("a.b c"), r"a\.b\ c");
    }
}

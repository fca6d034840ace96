//! `ast.literal_eval` for what templates yield: strings, numbers, lists, tuples, dicts, `None`, `True`, `False`.

use serde_json::{Map, Number, Value};

/// The value of a Python literal; `None` where CPython raises. Tuples become arrays. Keys of dicts must be strings.
pub fn eval(text: &str) -> Option<Value> {
    // literal_eval strips spaces and tabs in front, and takes any white space behind.
    let mut parser = Parser { rest: text.trim_start_matches([' ', '\t']), depth: 0 };
    let value = parser.value()?;
    parser.space();
    parser.rest.is_empty().then_some(value)
}

struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r', '\u{c}']);
    }

    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self) -> Option<Value> {
        const DEEPEST: usize = 64;
        if self.depth > DEEPEST {
            return None;
        }
        self.depth += 1;
        let value = self.value_inside();
        self.depth -= 1;
        value
    }

    fn value_inside(&mut self) -> Option<Value> {
        self.space();
        match self.rest.chars().next()? {
            '[' => Some(Value::Array(self.items('[', ']')?.0)),
            '(' => {
                let (mut items, comma) = self.items('(', ')')?;
                // One item in brackets without a comma is no tuple.
                Some(if items.len() == 1 && !comma { items.remove(0) } else { Value::Array(items) })
            }
            '{' => self.dict(),
            '\'' | '"' => {
                let mut text = self.string()?;
                // Adjacent literals join.
                loop {
                    let before = self.rest;
                    self.space();
                    if !self.rest.starts_with(['\'', '"']) {
                        self.rest = before;
                        return Some(Value::String(text));
                    }
                    text += &self.string()?;
                }
            }
            _ => self.word(),
        }
    }

    /// The items and whether a comma stood behind the last.
    fn items(&mut self, open: char, close: char) -> Option<(Vec<Value>, bool)> {
        self.rest = self.rest.strip_prefix(open)?;
        let mut items = Vec::new();
        let mut comma = false;
        loop {
            self.space();
            if let Some(rest) = self.rest.strip_prefix(close) {
                self.rest = rest;
                return Some((items, comma));
            }
            if !items.is_empty() && !comma {
                return None;
            }
            items.push(self.value()?);
            self.space();
            comma = self.eat(",");
        }
    }

    fn dict(&mut self) -> Option<Value> {
        self.rest = self.rest.strip_prefix('{')?;
        let mut map = Map::new();
        loop {
            self.space();
            if self.eat("}") {
                return Some(Value::Object(map));
            }
            let Value::String(key) = self.value()? else { return None };
            self.space();
            if !self.eat(":") {
                return None;
            }
            map.insert(key, self.value()?);
            self.space();
            if !self.eat(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
    }

    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_.+-".contains(c))).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "None" => Some(Value::Null),
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            _ => number(word),
        }
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.rest.chars().next()?;
        if self.rest.starts_with(&quote.to_string().repeat(3)) && !self.rest[3..].is_empty() {
            return self.quoted(&quote.to_string().repeat(3), true);
        }
        self.quoted(&quote.to_string(), false)
    }

    fn quoted(&mut self, quote: &str, lines: bool) -> Option<String> {
        self.rest = &self.rest[quote.len()..];
        let mut out = String::new();
        loop {
            if self.eat(quote) {
                return Some(out);
            }
            let c = self.rest.chars().next()?;
            self.rest = &self.rest[c.len_utf8()..];
            match c {
                '\n' if !lines => return None,
                '\\' => self.escape(&mut out)?,
                c => out.push(c),
            }
        }
    }

    fn escape(&mut self, out: &mut String) -> Option<()> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        let digits = match c {
            'n' => return push(out, '\n'),
            't' => return push(out, '\t'),
            'r' => return push(out, '\r'),
            'a' => return push(out, '\u{7}'),
            'b' => return push(out, '\u{8}'),
            'f' => return push(out, '\u{c}'),
            'v' => return push(out, '\u{b}'),
            '\n' => return Some(()),
            '\\' | '\'' | '"' => return push(out, c),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            '0'..='7' => {
                let more = self.rest.chars().take(2).take_while(|c| c.is_digit(8)).count();
                let code = u32::from_str_radix(&format!("{c}{}", &self.rest[..more]), 8).ok()?;
                self.rest = &self.rest[more..];
                return push(out, char::from_u32(code)?);
            }
            // CPython keeps the backslash of an escape it does not know.
            other => {
                out.push('\\');
                return push(out, other);
            }
        };
        let code = u32::from_str_radix(self.rest.get(..digits)?, 16).ok()?;
        self.rest = &self.rest[digits..];
        push(out, char::from_u32(code)?)
    }
}

fn push(out: &mut String, c: char) -> Option<()> {
    out.push(c);
    Some(())
}

/// A Python number: no leading zeros before other digits, underscores only between digits.
fn number(word: &str) -> Option<Value> {
    let unsigned = word.trim_start_matches(['+', '-']);
    let digits = unsigned.bytes().all(|b| b.is_ascii_digit());
    if !unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        || (digits && unsigned.len() > 1 && unsigned.starts_with('0'))
    {
        return None;
    }
    if digits {
        return word.strip_prefix('+').unwrap_or(word).parse::<i64>().ok().map(Value::from);
    }
    word.parse::<f64>().ok().and_then(Number::from_f64).map(Value::Number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::harness::python::repr;
    use serde_json::json;

    #[test]
    fn reads_back_what_repr_prints() {
        let v = json!(["it's", "a \"b\" \\n", "\n\t\u{a0}日\u{200b}", 1, -2.5, true, null, {"k": ["x"]}]);
        assert_eq!(eval(&repr::value(&v)), Some(v));
    }

    #[test]
    fn reads_literals_as_cpython_does() {
        assert_eq!(eval(r#"["a" 'b', r]"#), None);
        assert_eq!(eval(r#"["a" 'b',]"#), Some(json!(["ab"])));
        assert_eq!(eval("(1)"), Some(json!(1)));
        assert_eq!(eval("(1,)"), Some(json!([1])));
        assert_eq!(eval(" 007"), None);
        assert_eq!(eval("7 "), Some(json!(7)));
        assert_eq!(eval(r"'\x41\u00e9\101\q'"), Some(json!("Aé\x41\\q")));
        assert_eq!(eval("[1 2]"), None);
        assert_eq!(eval("__import__('os')"), None);
    }
}

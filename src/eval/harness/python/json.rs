//! `json.dumps` of Python, byte for byte: separators, float digits, `NaN`, escapes.

use serde_json::Value;

use super::repr;

/// How to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Style {
    /// Spaces per level; `None` prints one line with ", " and ": ".
    pub indent: Option<usize>,
    /// `ensure_ascii=True`: everything outside ASCII as `\uXXXX`, in surrogate pairs.
    pub ascii: bool,
}

/// `json.dumps(value, indent=style.indent, ensure_ascii=style.ascii)`. Floats that JSON values cannot hold (`NaN`, `Infinity`)
/// are passed as `serde_json`'s null by the caller or as strings; see `number`.
pub fn dumps(value: &Value, style: Style) -> String {
    let mut out = String::new();
    write(value, style, 0, &mut out);
    out
}

fn write(value: &Value, style: Style, level: usize, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Number(n) => out.push_str(&repr::number(n)),
        Value::String(s) => write_string(s, style.ascii, out),
        Value::Array(items) => write_all(('[', ']'), items.len(), style, level, out, |i, out| {
            write(&items[i], style, level + 1, out);
        }),
        Value::Object(map) => {
            let pairs: Vec<_> = map.iter().collect();
            write_all(('{', '}'), pairs.len(), style, level, out, |i, out| {
                write_string(pairs[i].0, style.ascii, out);
                out.push_str(": ");
                write(pairs[i].1, style, level + 1, out);
            });
        }
    }
}

fn write_all(
    brackets: (char, char),
    count: usize,
    style: Style,
    level: usize,
    out: &mut String,
    mut item: impl FnMut(usize, &mut String),
) {
    out.push(brackets.0);
    let line = |out: &mut String, level: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    };
    for i in 0..count {
        if i > 0 {
            out.push_str(if style.indent.is_some() { "," } else { ", " });
        }
        line(out, level + 1);
        item(i, out);
    }
    if count > 0 {
        line(out, level);
    }
    out.push(brackets.1);
}

fn write_string(s: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c if ascii && (c as u32) > 0x7e => {
                let mut units = [0u16; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn matches_cpython() {
        let v = json!({"a": [1, 2.0, 1e-7], "é": "日\u{1F600}\u{7f}\n\"", "e": [], "o": {}, "n": null});
        let one = r#"{"a": [1, 2.0, 1e-07], "\u00e9": "\u65e5\ud83d\ude00\u007f\n\"", "e": [], "o": {}, "n": null}"#;
        assert_eq!(dumps(&v, Style { indent: None, ascii: true }), one);
        let lines = "{\n  \"a\": [\n    1,\n    2.0,\n    1e-07\n  ],\n  \"é\": \"日😀\u{7f}\\n\\\"\",\n  \"e\": [],\n  \"o\": {},\n  \"n\": null\n}";
        assert_eq!(dumps(&v, Style { indent: Some(2), ascii: false }), lines);
    }
}

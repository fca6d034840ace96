//! `repr` and `str` of Python's values, for JSON values.

use serde_json::Value;

/// `repr(x)` of a float: the shortest digits that read back, an exponent outside 1e-4 <= |x| < 1e16.
pub fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.into();
    }
    let (digits, exponent) = shortest(x);
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        let digits = digits.strip_suffix(".0").unwrap_or(&digits);
        return format!("{digits}e{sign}{:0>2}", exponent.unsigned_abs());
    }
    let places = digits.trim_start_matches('-').len().saturating_sub(2) as i32 - exponent;
    // As many places as the digits need: exact, since it asks for no more and no fewer.
    let text = format!("{x:.*}", places.max(1) as usize);
    let trimmed = text.trim_end_matches('0');
    if trimmed.ends_with('.') { format!("{trimmed}0") } else { trimmed.to_string() }
}

/// The shortest digits that read back, "d.ddd", and the decimal exponent. Of two that are equally near, CPython takes the even one and
/// Rust the upper: so the digits are asked for by their number.
fn shortest(x: f64) -> (String, i32) {
    let parts = |text: String| {
        let (digits, exponent) = text.split_once('e').map(|(d, e)| (d.to_string(), e.parse().unwrap_or(0))).unwrap_or((text, 0));
        (digits, exponent)
    };
    let (digits, exponent) = parts(format!("{x:e}"));
    let places = digits.split_once('.').map_or(0, |(_, after)| after.len());
    let even = format!("{x:.places$e}");
    if even.parse() == Ok(x) { parts(even) } else { (digits, exponent) }
}

/// `repr(s)`: single quotes unless only single quotes occur inside.
pub fn string(s: &str) -> String {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(s.len() + 2);
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c if (c as u32) < 0x100 => out.push_str(&format!("\\x{:02x}", c as u32)),
            c if (c as u32) < 0x10000 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push_str(&format!("\\U{:08x}", c as u32)),
        }
    }
    out.push(quote);
    out
}

/// `str.isprintable` of one character: no control, no separator but the space, no format character, no private use.
fn is_printable(c: char) -> bool {
    let code = c as u32;
    let format = matches!(code, 0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x180e | 0x200b..=0x200f | 0x202a..=0x202e
        | 0x2060..=0x2064 | 0x2066..=0x206f | 0xfeff | 0xfff9..=0xfffb | 0xe0001 | 0xe0020..=0xe007f);
    let private = matches!(code, 0xe000..=0xf8ff | 0xf0000..=0x10ffff);
    c == ' ' || !(c.is_control() || c.is_whitespace() || format || private)
}

/// `repr(value)`
pub fn value(v: &Value) -> String {
    match v {
        Value::Null => "None".into(),
        Value::Bool(b) => if *b { "True" } else { "False" }.into(),
        Value::Number(n) => number(n),
        Value::String(s) => string(s),
        Value::Array(items) => format!("[{}]", items.iter().map(value).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let pairs: Vec<_> = map.iter().map(|(k, v)| format!("{}: {}", string(k), value(v))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
    }
}

/// `str(value)`: a string as it is, all else as `repr`.
pub fn str_of(v: &Value) -> String {
    v.as_str().map_or_else(|| value(v), str::to_string)
}

/// An integer without a point, a float as `repr`.
pub fn number(n: &serde_json::Number) -> String {
    if n.is_f64() { float(n.as_f64().unwrap_or(f64::NAN)) } else { n.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn floats_as_cpython_prints_them() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (9999999999999998.0, "9999999999999998.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (163765967928.01337, "163765967928.01337"),
            (0.09999999999999999, "0.09999999999999999"),
            // Halfway between ...562 and ...563.
            (-181.85049438476562, "-181.85049438476562"),
            (-688.5786743164062, "-688.5786743164062"),
            (-103.43656921386719, "-103.43656921386719"),
            (9007199254740993.0, "9007199254740992.0"),
            (-1234.5, "-1234.5"),
            (120.0, "120.0"),
            (2.5e-5, "2.5e-05"),
            (1e22, "1e+22"),
        ];
        for (x, text) in cases {
            assert_eq!(float(x), text);
        }
    }

    #[test]
    fn values_as_cpython_prints_them() {
        assert_eq!(
            value(&json!(["it's", "a \"b\"", "both ' and \"", null, true, 2, 2.0])),
            r#"["it's", 'a "b"', 'both \' and "', None, True, 2, 2.0]"#
        );
        assert_eq!(string("a\u{1b}\u{a0}\n日\u{200b}"), "'a\\x1b\\xa0\\n日\\u200b'");
        assert_eq!(value(&json!({"k": [1]})), "{'k': [1]}");
    }
}

//! Jinja templates of task definitions, with Python's values: `minijinja` plus Python's methods and printing.

use anyhow::{Result, anyhow};
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value as Jinja};
use serde_json::Value;

use super::super::python::regex::Pattern;
use super::super::python::{repr, text};

/// Compiles templates once and renders them for many documents.
pub struct Templates {
    env: Environment<'static>,
}

impl Default for Templates {
    fn default() -> Self {
        let mut env = Environment::new();
        // A template is its own name, so that it is compiled once.
        env.set_loader(|source| Ok(Some(source.to_string())));
        env.set_path_join_callback(|name, _| name.into());
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_keep_trailing_newline(true);
        env.set_undefined_behavior(UndefinedBehavior::Strict);
        env.set_formatter(|out, state, value| {
            if value.is_undefined() {
                return minijinja::escape_formatter(out, state, value);
            }
            write!(out, "{}", repr::str_of(&to_json(value)?)).map_err(Error::from)
        });
        env.set_unknown_method_callback(method);
        env.add_filter("regex_replace", regex_replace);
        Self { env }
    }
}

impl Templates {
    /// Text of `source` for `doc`, an object whose fields are the variables.
    ///
    /// Errors: syntax, unknown variables, methods or filters; the text names the template.
    pub fn render(&self, source: &str, doc: &Value) -> Result<String> {
        let failed = |e: Error| anyhow!("the template {source:?}: {}", describe(&e));
        let template = self.env.get_template(source).map_err(failed)?;
        template.render(Jinja::from_serialize(doc)).map_err(failed)
    }

    /// Only whether `source` can be compiled.
    pub fn check(&self, source: &str) -> Result<()> {
        self.env.get_template(source).map(|_| ()).map_err(|e| anyhow!("the template {source:?}: {}", describe(&e)))
    }
}

fn describe(error: &Error) -> String {
    let line = error.line().map_or(String::new(), |l| format!(" (line {l})"));
    format!("{}{line}", error.detail().map_or_else(|| error.kind().to_string(), |d| format!("{}: {d}", error.kind())))
}

/// A template's value as JSON, which Python prints.
fn to_json(value: &Jinja) -> Result<Value, Error> {
    serde_json::to_value(value).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

fn regex_replace(text: String, pattern: String, replacement: String) -> Result<String, Error> {
    let pattern = Pattern::new(&pattern).map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
    Ok(pattern.sub(&replacement, &text))
}

/// Methods of `str` and `list` that templates call: those where `minijinja-contrib` is not Python's come first.
fn method(state: &State, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    if let Some(s) = value.as_str()
        && let Some(result) = string_method(s, name, args)?
    {
        return Ok(result);
    }
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) && name == "index" {
        let wanted = one(args, "index")?;
        let place = value.try_iter()?.position(|item| &item == wanted);
        return place
            .map(Jinja::from)
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("{wanted} is not in the list")));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

fn one<'a>(args: &'a [Jinja], name: &str) -> Result<&'a Jinja, Error> {
    args.first().ok_or_else(|| Error::new(ErrorKind::MissingArgument, format!("{name}() needs an argument")))
}

fn string_method(s: &str, name: &str, args: &[Jinja]) -> Result<Option<Jinja>, Error> {
    let set = args.first().and_then(|a| a.as_str());
    let in_set = |c: char| set.is_some_and(|set| set.contains(c));
    let found = |place: Option<usize>| place.map(|at| text::len(&s[..at]));
    Ok(Some(match (name, args.len()) {
        ("strip", 0) => text::strip(s).into(),
        ("lstrip", 0) => text::lstrip(s).into(),
        ("rstrip", 0) => text::rstrip(s).into(),
        ("strip", 1) if set.is_some() => s.trim_matches(in_set).into(),
        ("lstrip", 1) if set.is_some() => s.trim_start_matches(in_set).into(),
        ("rstrip", 1) if set.is_some() => s.trim_end_matches(in_set).into(),
        ("capitalize", 0) => text::capitalize(s).into(),
        ("isdigit", 0) => text::is_digit(s).into(),
        ("split", 0) => Jinja::from_iter(text::split_whitespace(s)),
        ("split", 1) if set.is_some_and(|set| !set.is_empty()) => Jinja::from_iter(s.split(set.unwrap_or_default())),
        ("index", 1) => {
            let part = one(args, name)?.as_str().unwrap_or_default();
            let place = found(s.find(part))
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("{part:?} is not in the string")))?;
            place.into()
        }
        ("find", 1) => found(s.find(one(args, name)?.as_str().unwrap_or_default())).map_or(-1, |at| at as i64).into(),
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    // Right-hand sides are Jinja2's with keep_trailing_newline and StrictUndefined.
    #[test]
    fn renders_as_jinja2_does() {
        let doc = json!({
            "text": "  one two  three ", "choices": {"text": ["it's", "b"], "label": ["A", "B"]}, "key": "B", "n": 3, "f": 1.0,
            "none": null, "yes": true, "s": "hELLO"
        });
        let cases = [
            ("{{text.split(' ')[:-1]|join(' ')}}", "  one two  three"),
            ("{{' '+text.split(' ')[-2]}}|", " three|"),
            ("{{choices.label.index(key)}}", "1"),
            ("{{choices.text}}", "[\"it's\", 'b']"),
            ("{{[s, key]}}\n", "['hELLO', 'B']\n"),
            ("{{n}} {{f}} {{none}} {{yes}}", "3 1.0 None True"),
            ("{{s.capitalize()}} {{text.strip()}} {{s[1:3]}} {{s[-1]}} {{s|length}}", "Hello one two  three EL O 5"),
            ("{% if key == 'B' %}x{% endif %}\n", "x\n"),
            ("{{choices['text'][0] ~ '!'}}", "it's!"),
            ("{{text.split()|length}}{{ s.lower().upper() }}", "3HELLO"),
            ("{{s|regex_replace('L+', '-')}}", "hE-O"),
            ("{{ s if s is defined else 'no' }}{{ 'no' if absent is not defined else 1 }}", "hELLOno"),
            ("{% set p = 'a' %}{{p + '\\n' + key}}", "a\nB"),
        ];
        let templates = Templates::default();
        for (source, want) in cases {
            assert_eq!(templates.render(source, &doc).unwrap(), want, "{source}");
        }
        let e = templates.render("{{absent}}", &doc).unwrap_err().to_string();
        assert!(e.contains("absent") || e.contains("undefined"), "{e}");
        assert!(templates.render("{{choices.label.index('Z')}}", &doc).is_err());
        assert!(templates.check("{{ a").is_err());
    }
}

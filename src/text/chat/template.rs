//! Chat templates, rendered as Hugging Face's `apply_chat_template` does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use chrono::NaiveDate;
use fancy_regex::Regex;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value as Jinja};
use serde::Serialize as _;
use serde_json::Value;

use super::conversation::Conversation;
use super::{END_GENERATION, GENERATION};
use crate::error::bad_input;
use crate::text::sha256_hex;

/// Names under which the environment knows the template, and the two marks that stand for `{% generation %}` blocks.
const CHAT: &str = "chat";
const MARKS: [(&str, char); 2] = [("generation", GENERATION), ("endgeneration", END_GENERATION)];

/// A compiled template with the tokenizer's special tokens as variables.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    special: BTreeMap<String, Jinja>,
    /// Whether the template itself says what the model generates.
    marks_generation: bool,
    sha256: String,
    path: PathBuf,
}

impl ChatTemplate {
    /// The template in `given`, else that beside `tokenizer`: `chat_template.jinja`, `tokenizer_config.json`, `chat_template.json`.
    /// `date` is what `strftime_now` tells; without it templates find that function undefined, so that the same input gives
    /// the same tokens on every day.
    ///
    /// # Errors
    /// When there is no template, or it is none.
    pub fn find(tokenizer: &Path, given: Option<&Path>, date: Option<NaiveDate>) -> Result<Self> {
        let beside = |name: &str| tokenizer.with_file_name(name);
        let config = read_json(&beside("tokenizer_config.json"))?;
        let (path, source) = match given {
            Some(path) => (path.to_path_buf(), source_in(path)?),
            None => {
                let candidates = ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"].map(beside);
                let mut found = None;
                for path in candidates.iter().filter(|p| p.is_file()) {
                    found = source_in(path)?.map(|source| (path.clone(), Some(source)));
                    if found.is_some() {
                        break;
                    }
                }
                let text = "there is no chat template beside the tokenizer (chat_template.jinja, or `chat_template` in \
                            tokenizer_config.json): name one with --chat-template FILE";
                found.ok_or_else(|| bad_input(format!("{}: {text}", tokenizer.display())))?
            }
        };
        let text = "holds no `chat_template`: a text, or a list of named ones with one named `default`";
        let source = source.ok_or_else(|| bad_input(format!("{} {text}", path.display())))?;
        Self::new(&source, &path, config.as_ref().unwrap_or(&Value::Null), date)
    }

    /// `config`: the contents of `tokenizer_config.json`, for the special tokens' texts.
    pub fn new(source: &str, path: &Path, config: &Value, date: Option<NaiveDate>) -> Result<Self> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_formatter(|out, state, value| match value.kind() {
            // Python's names.
            ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }).map_err(Error::from),
            ValueKind::None => out.write_str("None").map_err(Error::from),
            _ => minijinja::escape_formatter(out, state, value),
        });
        env.set_unknown_method_callback(method);
        env.add_filter("tojson", to_json);
        env.add_function("raise_exception", |message: String| -> Result<Jinja, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("the template refuses the conversation: {message}")))
        });
        if let Some(date) = date {
            env.add_function("strftime_now", move |format: String| strftime(date, &format));
        }
        // A block tag that prints a mark: white space around it is cut as around any block tag.
        let tag = Regex::new(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}").map_err(|e| bad_input(e.to_string()))?;
        let marked = tag.replace_all(source, "{%$1 include \"$2\" $3%}").into_owned();
        let marks_generation = marked != source;
        for (name, mark) in MARKS {
            env.add_template_owned(name, mark.to_string()).map_err(|e| bad_input(e.to_string()))?;
        }
        env.add_template_owned(CHAT, marked)
            .map_err(|e| bad_input(format!("the chat template {}: {}", path.display(), describe(&e))))?;
        let fields = config.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
        let text = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(Jinja::from);
        let special = fields.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect();
        let sha256 = sha256_hex(source.as_bytes());
        Ok(Self { env, special, marks_generation, sha256, path: path.to_path_buf() })
    }

    /// Whether it has `{% generation %}` blocks.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Of the template's text, hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Text of the first `count` messages. `prompt`: with what comes before the assistant's next turn.
    ///
    /// # Errors
    /// What the template, or its language, does not accept, as a sentence.
    pub fn render(&self, conversation: &Conversation, count: usize, prompt: bool) -> Result<String, String> {
        let mut variables = self.special.clone();
        variables.extend(conversation.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        variables.insert("messages".into(), Jinja::from(conversation.rendered[..count].to_vec()));
        variables.insert("add_generation_prompt".into(), Jinja::from(prompt));
        let template = self.env.get_template(CHAT).map_err(|e| describe(&e))?;
        template.render(Jinja::from_serialize(&variables)).map_err(|e| {
            let text = describe(&e);
            let hint = if text.contains("strftime_now") { "; say which day it is with --chat-date YYYY-MM-DD" } else { "" };
            format!("{text}{hint}")
        })
    }
}

/// `YYYY-MM-DD`.
pub fn parse_date(text: &str) -> Result<NaiveDate, String> {
    NaiveDate::parse_from_str(text, "%Y-%m-%d").map_err(|e| format!("expected a day such as 2025-11-24: {e}"))
}

/// What the file at `path` holds, if it is JSON; None if there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = read(path)?;
    serde_json::from_str(&text).map(Some).map_err(|e| bad_input(format!("{} is not JSON: {e}", path.display())))
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| bad_input(format!("the chat template {} cannot be read: {e}", path.display())))
}

/// The template in a file: the text itself, or what a JSON file has under `chat_template`.
fn source_in(path: &Path) -> Result<Option<String>> {
    if path.extension().is_none_or(|e| e != "json") {
        return read(path).map(Some);
    }
    let json = read_json(path)?.unwrap_or_default();
    Ok(match &json["chat_template"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|t| t["name"] == "default");
            default.and_then(|t| t["template"].as_str()).map(str::to_string)
        }
        _ => None,
    })
}

fn describe(error: &Error) -> String {
    let line = error.line().map_or(String::new(), |l| format!(" (line {l} of the template)"));
    let text = match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_string(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    format!("{text}{line}")
}

fn strftime(date: NaiveDate, format: &str) -> Result<String, Error> {
    use std::fmt::Write;
    let mut out = String::new();
    let midnight = date.and_hms_opt(0, 0, 0).unwrap_or_default();
    write!(out, "{}", midnight.format(format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know the format `{format}`")))?;
    Ok(out)
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=..., sort_keys=...)`.
fn to_json(value: &Jinja, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let indent = indent.or(options.get("indent")?);
    let (sort, _): (Option<bool>, Option<bool>) = (options.get("sort_keys")?, options.get("ensure_ascii")?);
    options.assert_all_used()?;
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut json = serde_json::to_value(value).map_err(failed)?;
    if sort == Some(true) {
        json.sort_all_objects();
    }
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let spaces = " ".repeat(n);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonFormatter)),
    }
    .map_err(failed)?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// A space after commas and colons, as Python prints them.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

/// Methods of Python's values. The one that `minijinja-contrib` has otherwise comes first.
fn method(state: &State, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    // Python's `split()` without a separator drops empty parts; with one it keeps them, and the result is a list.
    if let (Some(text), "split", []) = (value.as_str(), name, args) {
        return Ok(text.split_whitespace().map(Jinja::from).collect());
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

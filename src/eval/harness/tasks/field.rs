//! The value of a field of a task for one document, by lm-eval's rules of `doc_to_text`, `doc_to_target` and `doc_to_choice`.

use anyhow::{Context, Result};
use serde_json::Value;

use super::builtin::Function;
use super::template::Templates;
use crate::error::bad_input;
use crate::eval::harness::compat::{Compat, Fault, Faults};
use crate::eval::harness::python::{literal, repr, text};

/// `doc_to_text`, `doc_to_target` or `doc_to_choice` of a definition.
#[derive(Debug, Clone, PartialEq)]
pub enum Field {
    /// A column's name, or a template.
    Template(String),
    /// A fixed value: an index, or a list of choices.
    Fixed(Value),
    /// A built-in function.
    Function(Function),
}

/// What is needed to evaluate fields.
pub struct Scope<'a> {
    pub templates: &'a Templates,
    /// Columns of the evaluated split.
    pub features: &'a [String],
    pub has_choices: bool,
    pub compat: Compat,
    pub faults: &'a Faults,
}

impl Scope<'_> {
    /// A string, or an index where the text depends on the choice.
    pub fn text(&self, field: &Field, doc: &Value) -> Result<Value> {
        match field {
            Field::Fixed(v) => Ok(v.clone()),
            Field::Function(f) => f.text(doc),
            Field::Template(name) if self.is_column(name) => Ok(doc[name.as_str()].clone()),
            Field::Template(source) => {
                let rendered = self.templates.render(source, doc)?;
                if self.has_choices && text::is_digit(&rendered) {
                    self.faults.note(Fault::DigitsAsIndex);
                    if self.compat == Compat::LmEval {
                        return Ok(literal::eval(&rendered).unwrap_or(Value::String(rendered)));
                    }
                }
                Ok(Value::String(rendered))
            }
        }
        .context("doc_to_text")
    }

    /// A string, an index of the choices, or a list of either.
    pub fn target(&self, field: &Field, doc: &Value) -> Result<Value> {
        match field {
            Field::Fixed(v) => Ok(v.clone()),
            Field::Function(f) => f.target(doc),
            Field::Template(name) if self.is_column(name) => Ok(doc[name.as_str()].clone()),
            Field::Template(source) => {
                let rendered = self.templates.render(source, doc)?;
                if self.has_choices && text::is_digit(&rendered) {
                    return Ok(literal::eval(&rendered).unwrap_or(Value::String(rendered)));
                }
                if rendered.len() >= 2
                    && rendered.starts_with('[')
                    && rendered.ends_with(']')
                    && let Some(list) = literal::eval(&rendered)
                {
                    self.faults.note(Fault::TargetAsLiteral);
                    if self.compat == Compat::LmEval {
                        return Ok(list);
                    }
                }
                Ok(Value::String(rendered))
            }
        }
        .context("doc_to_target")
    }

    /// The bare choices.
    pub fn choices(&self, field: &Field, doc: &Value) -> Result<Vec<String>> {
        let value = match field {
            Field::Fixed(Value::Object(map)) => Value::Array(map.values().cloned().collect()),
            Field::Fixed(v) => v.clone(),
            Field::Function(f) => f.choices(doc)?,
            Field::Template(name) if self.is_column(name) => doc[name.as_str()].clone(),
            Field::Template(source) => {
                let rendered = self.templates.render(source, doc).context("doc_to_choice")?;
                literal::eval(&rendered).ok_or_else(|| {
                    bad_input(format!("doc_to_choice: {source:?} gives {rendered:?}, which is no list of choices"))
                })?
            }
        };
        let Value::Array(items) = value else {
            return Err(bad_input(format!("doc_to_choice gives {}, which is no list of choices", repr::value(&value))));
        };
        Ok(items.iter().map(repr::str_of).collect())
    }

    /// A string field that may be a column or a template (description, gen_prefix).
    pub fn string(&self, source: &str, doc: &Value) -> Result<String> {
        if self.is_column(source) {
            return Ok(repr::str_of(&doc[source]));
        }
        self.templates.render(source, doc)
    }

    fn is_column(&self, name: &str) -> bool {
        self.features.iter().any(|f| f == name)
    }
}

//! Which documents are wanted: by length, and by conditions on fields of their records.
//!
//! A condition is `FIELD OPERATOR VALUE`, such as `score>=0.5` or `meta.language == "en"`:
//!
//! * FIELD is a field of the record, or with dots one of an object in it; of Parquet a column.
//! * OPERATOR is `>=`, `<=`, `>`, `<`, `==` (also `=`) or `!=`.
//! * VALUE is a number, `true`, `false`, or text, with or without double quotes; text can only be equal or not.
//!
//! A record meets it if the field is there, of the same kind as the value, and compares so. Numbers compare as f64.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

/// What a field holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Value {
    /// Not there, null, or of a kind that no condition speaks of.
    #[default]
    Absent,
    Number(f64),
    Bool(bool),
    Text(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    AtLeast,
    AtMost,
    Above,
    Below,
    Equal,
    Unequal,
}

/// Longer ones first, so that `>=` is not read as `>`.
const OPERATORS: [(&str, Operator); 7] = [
    (">=", Operator::AtLeast),
    ("<=", Operator::AtMost),
    ("==", Operator::Equal),
    ("!=", Operator::Unequal),
    (">", Operator::Above),
    ("<", Operator::Below),
    ("=", Operator::Equal),
];

/// A condition on a field.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    field: String,
    operator: Operator,
    value: Value,
}

impl FromStr for Condition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let say = |why: &str| {
            format!(
                "`{text}` {why}; expected FIELD OPERATOR VALUE such as score>=0.5 or language==en, with one of >= <= > < == !="
            )
        };
        let at = text.find(['>', '<', '=', '!']).ok_or_else(|| say("has no operator"))?;
        let (field, rest) = (text[..at].trim(), &text[at..]);
        let (sign, operator) =
            OPERATORS.into_iter().find(|(sign, _)| rest.starts_with(sign)).ok_or_else(|| say("has no operator"))?;
        let value = rest[sign.len()..].trim();
        if field.is_empty() {
            return Err(say("names no field"));
        }
        if value.is_empty() {
            return Err(say("has no value"));
        }
        if value.starts_with(['=', '>', '<', '!']) {
            return Err(say("has an operator that does not exist"));
        }
        let value = match value {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            quoted if quoted.starts_with('"') => {
                let inner = quoted.strip_prefix('"').and_then(|q| q.strip_suffix('"')).filter(|q| !q.contains('"'));
                Value::Text(inner.ok_or_else(|| say("has quotes that do not match"))?.to_string())
            }
            bare => match bare.parse::<f64>() {
                Ok(number) if number.is_finite() => Value::Number(number),
                _ => Value::Text(bare.to_string()),
            },
        };
        if !matches!(value, Value::Number(_)) && !matches!(operator, Operator::Equal | Operator::Unequal) {
            return Err(say("compares something that is no number by size"));
        }
        Ok(Self { field: field.to_string(), operator, value })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = OPERATORS.iter().find(|(_, o)| *o == self.operator).map_or("", |(sign, _)| sign);
        match &self.value {
            Value::Number(n) => write!(f, "{}{sign}{n}", self.field),
            Value::Bool(b) => write!(f, "{}{sign}{b}", self.field),
            Value::Text(t) => write!(f, "{}{sign}\"{t}\"", self.field),
            Value::Absent => f.write_str(&self.field),
        }
    }
}

impl Condition {
    pub fn field(&self) -> &str {
        &self.field
    }

    /// The field's value in `root`, which is the value of the record's field `key`; None if this condition looks elsewhere.
    pub fn look(&self, key: &str, root: &serde_json::Value) -> Option<Value> {
        let found = match self.field.strip_prefix(key)? {
            "" => Some(root),
            rest => rest.strip_prefix('.')?.split('.').try_fold(root, |value, name| value.get(name)),
        };
        Some(match found {
            Some(serde_json::Value::Number(n)) => n.as_f64().map_or(Value::Absent, Value::Number),
            Some(serde_json::Value::Bool(b)) => Value::Bool(*b),
            Some(serde_json::Value::String(s)) => Value::Text(s.clone()),
            _ => Value::Absent,
        })
    }

    /// Some of this condition's field may lie in the record's field `key`.
    pub fn concerns(&self, key: &[u8]) -> bool {
        let field = self.field.as_bytes();
        field.starts_with(key) && (field.len() == key.len() || field[key.len()] == b'.')
    }

    /// Whether a record meets it.
    pub fn is_met_by(&self, record: &serde_json::Map<String, serde_json::Value>) -> bool {
        let concerned = record.iter().filter(|(key, _)| self.concerns(key.as_bytes()));
        let found = concerned.filter_map(|(key, value)| self.look(key, value)).next_back();
        self.is_met(&found.unwrap_or_default())
    }

    pub fn is_met(&self, found: &Value) -> bool {
        let order = match (found, &self.value) {
            (Value::Number(a), Value::Number(b)) => a.partial_cmp(b),
            (Value::Bool(a), Value::Bool(b)) => Some(a.cmp(b)),
            (Value::Text(a), Value::Text(b)) => Some(a.cmp(b)),
            _ => None,
        };
        let Some(order) = order else { return false };
        match self.operator {
            Operator::AtLeast => order != Ordering::Less,
            Operator::AtMost => order != Ordering::Greater,
            Operator::Above => order == Ordering::Greater,
            Operator::Below => order == Ordering::Less,
            Operator::Equal => order == Ordering::Equal,
            Operator::Unequal => order != Ordering::Equal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn met(condition: &str, record: &str) -> bool {
        let condition: Condition = condition.parse().unwrap();
        let record: serde_json::Value = serde_json::from_str(record).unwrap();
        condition.is_met_by(record.as_object().unwrap())
    }

    #[test]
    fn conditions_compare_like_with_like() {
        for (condition, record, expected) in [
            ("s>=0.5", r#"{"s":0.5}"#, true),
            ("s>=0.5", r#"{"s":0.4999}"#, false),
            ("s > -1e3", r#"{"s":-999}"#, true),
            ("s<3", r#"{"s":3}"#, false),
            ("s<=3", r#"{"s":3}"#, true),
            ("s=3", r#"{"s":3.0}"#, true),
            ("s!=3", r#"{"s":4}"#, true),
            ("s!=3", r#"{"t":4}"#, false),
            ("s!=3", r#"{"s":"4"}"#, false),
            ("s!=3", r#"{"s":null}"#, false),
            ("l==en", r#"{"l":"en"}"#, true),
            ("l == \"en\"", r#"{"l":"en"}"#, true),
            ("l!=en", r#"{"l":"de"}"#, true),
            ("l==\"3\"", r#"{"l":"3"}"#, true),
            ("l==3", r#"{"l":"3"}"#, false),
            ("ok==true", r#"{"ok":true}"#, true),
            ("ok!=true", r#"{"ok":false}"#, true),
            ("m.a.b>1", r#"{"m":{"a":{"b":2}}}"#, true),
            ("m.a.b>1", r#"{"m":{"a":2}}"#, false),
            ("m.a>1", r#"{"m.a":2}"#, true),
            ("m.a>1", r#"{"m":[1,2]}"#, false),
            ("ma>1", r#"{"m":{"a":2}}"#, false),
        ] {
            assert_eq!(met(condition, record), expected, "{condition} {record}");
        }
    }

    #[test]
    fn what_is_no_condition_gets_a_sentence() {
        for (text, why) in [
            ("score", "has no operator"),
            (">=3", "names no field"),
            ("score>=", "has no value"),
            ("score=>3", "an operator that does not exist"),
            ("score===3", "an operator that does not exist"),
            ("score!3", "has no operator"),
            ("l>en", "is no number by size"),
            ("l==\"en", "quotes that do not match"),
            ("x>nan", "is no number by size"),
        ] {
            let error = text.parse::<Condition>().unwrap_err();
            assert!(error.contains(why) && error.contains("such as score>=0.5"), "{text}: {error}");
        }
    }

    #[test]
    fn a_condition_is_written_as_it_is_read() {
        for text in ["a>=0.5", "a.b==\"x y\"", "a!=true", "a<-3"] {
            let condition: Condition = text.parse().unwrap();
            assert_eq!(condition.to_string(), text);
            assert_eq!(condition.to_string().parse::<Condition>().unwrap(), condition);
        }
    }
}

//! What a recipe may say: one table of keys, from which checking, defaults, suggestions, `--set`, the resolved file, the
//! rules of resuming and `docs/RECIPE.md` all come.

pub use super::keys::KEYS;
use super::raw::{Data, Node};
use super::units;

/// One key. In `path`, `*` stands for the index of an array's entry.
#[derive(Debug)]
pub struct Key {
    pub path: &'static str,
    pub kind: Kind,
    pub default: Default,
    pub resume: Resume,
    pub doc: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Default {
    /// The key must be given.
    Required,
    /// This TOML value.
    Value(&'static str),
    /// The key may be absent, and this is what its absence means.
    Absent(&'static str),
}

/// What `--resume` does when the key's value is not the one the run was started with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Resume {
    /// May change.
    Free,
    /// May change; the text says what comes of it.
    Notice(&'static str),
    /// May not change; the text says why.
    Fixed(&'static str),
    /// May move as long as the file names stay: the same data at another place.
    MayMove,
}

/// What a key's value looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Text,
    /// A path, relative to the recipe's folder.
    Path,
    /// One path or an array of paths.
    Paths,
    Bool,
    Integer {
        min: u64,
        max: u64,
    },
    /// An integer, or "none" (to take a preset's value away).
    IntegerOrNone {
        min: u64,
        max: u64,
    },
    /// An integer, or "auto".
    IntegerOrAuto {
        min: u64,
        max: u64,
    },
    /// A number of tokens: an integer, or text with a unit.
    Tokens {
        min: u64,
    },
    /// A length of sequences in tokens: an integer, or text with a binary unit.
    Length,
    Number(Range),
    /// Two numbers in 0..1.
    Betas,
    Choice(&'static [&'static str]),
    /// One of the choices, or an array of them.
    ChoiceOrArray(&'static [&'static str]),
    Duration,
    /// A table of numbers, one per data source.
    Weights,
    /// An array of whole numbers and of pairs of a first and a last one.
    Batches,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Range {
    /// x > 0
    Positive,
    /// x >= 0
    NotNegative,
    /// 0 <= x < 1
    BelowOne,
    /// 0 <= x <= 1
    Share,
}

/// A value that has the type its key asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Text(String),
    Texts(Vec<String>),
    Bool(bool),
    Integer(u64),
    None,
    Number(f64),
    Pair([f64; 2]),
    /// Whole seconds.
    Duration(std::time::Duration),
    Weights(Vec<(String, f64)>),
    /// First and last ones.
    Spans(Vec<[u64; 2]>),
}

impl Range {
    fn describe(self) -> &'static str {
        match self {
            Self::Positive => "a number above 0",
            Self::NotNegative => "a number of at least 0",
            Self::BelowOne => "a number from 0 to below 1",
            Self::Share => "a number from 0 to 1",
        }
    }

    /// NaN and infinities are in no range.
    fn contains(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Self::Positive => x > 0.0,
                Self::NotNegative => x >= 0.0,
                Self::BelowOne => (0.0..1.0).contains(&x),
                Self::Share => (0.0..=1.0).contains(&x),
            }
    }

    fn read(self, node: &Node) -> Option<f64> {
        let x = match node.data {
            Data::Integer(n) => n as f64,
            Data::Float(x) => x,
            _ => return None,
        };
        self.contains(x).then_some(x)
    }
}

fn choices(of: &[&str]) -> String {
    of.iter().map(|c| format!("\"{c}\"")).collect::<Vec<_>>().join(" or ")
}

impl Kind {
    /// What is expected, in words.
    pub fn describe(self) -> String {
        let integer = |min: u64, max: u64| match (min, max) {
            (min, max) if max >= i64::MAX as u64 => format!("an integer of at least {min}"),
            (min, max) => format!("an integer from {min} to {max}"),
        };
        match self {
            Self::Text => "text".into(),
            Self::Path => "a path (text)".into(),
            Self::Paths => "a path or an array of paths".into(),
            Self::Bool => "true or false".into(),
            Self::Integer { min, max } => integer(min, max),
            Self::IntegerOrNone { min, max } => format!("{} or \"none\"", integer(min, max)),
            Self::IntegerOrAuto { min, max } => format!("{} or \"auto\"", integer(min, max)),
            Self::Tokens { min } => {
                format!("a number of tokens of at least {min} (an integer, or text with a unit such as \"8T\")")
            }
            Self::Length => "a number of tokens of at least 1 (an integer, or text such as \"32Ki\")".into(),
            Self::Number(range) => range.describe().into(),
            Self::Betas => "an array of two numbers from 0 to below 1".into(),
            Self::Choice(of) => choices(of),
            Self::ChoiceOrArray(of) => format!("{}, or an array of these", choices(of)),
            Self::Duration => "a duration in quotes, such as \"90s\", \"30m\", \"1h30m\"".into(),
            Self::Weights => "a table of numbers of at least 0, one per data source".into(),
            Self::Batches => "an array of integers of at least 0 and of pairs [first, last] of them".into(),
        }
    }

    /// The value, or "expected ..., got ...".
    pub fn read(self, node: &Node) -> Result<Value, String> {
        self.read_value(node).map_err(|hint| {
            let hint = if hint.is_empty() { hint } else { format!("; {hint}") };
            format!("expected {}, got {}{hint}", self.describe(), node.describe())
        })
    }

    /// The error is a hint to the user, perhaps empty.
    fn read_value(self, node: &Node) -> Result<Value, String> {
        let none = || Err(String::new());
        match (self, &node.data) {
            (Self::Text, Data::Text(s)) if !s.trim().is_empty() => Ok(Value::Text(s.clone())),
            (Self::Path, Data::Text(s)) => path_text(s).map(Value::Text),
            (Self::Paths, Data::Text(s)) => path_text(s).map(|s| Value::Texts(vec![s])),
            (Self::Paths, Data::Array(nodes)) if !nodes.is_empty() => nodes
                .iter()
                .map(|n| match &n.data {
                    Data::Text(s) => path_text(s),
                    _ => Err(format!("one of its entries is {}", n.describe())),
                })
                .collect::<Result<_, _>>()
                .map(Value::Texts),
            (Self::Bool, Data::Bool(b)) => Ok(Value::Bool(*b)),
            (Self::Bool, Data::Text(s)) if s == "true" || s == "false" => Err("remove the quotes".into()),
            (Self::IntegerOrNone { .. }, Data::Text(s)) if s == "none" => Ok(Value::None),
            (Self::IntegerOrAuto { .. }, Data::Text(s)) if s == "auto" => Ok(Value::Text(s.clone())),
            (Self::Integer { min, max } | Self::IntegerOrNone { min, max } | Self::IntegerOrAuto { min, max }, _) => {
                integer(node, min, max)
            }
            (Self::Tokens { min }, Data::Text(s)) => match units::parse_tokens(s)? {
                n if n >= min => Ok(Value::Integer(n)),
                _ => none(),
            },
            (Self::Tokens { min }, _) => integer(node, min, i64::MAX as u64),
            // "32K" is 32,768 to some and 32,000 to others, so lengths take only the unit that cannot be misread.
            (Self::Length, Data::Text(s)) => match units::parse_tokens(s)? {
                _ if s.trim_end().ends_with(['K', 'M', 'B', 'T']) => Err(format!(
                    "for a length `{}` could mean thousands of 1,000 or of 1,024 tokens: write the number, or \"{}i\"",
                    s.trim(),
                    s.trim().replace('B', "G")
                )),
                n @ 1..=0x7fff_ffff => Ok(Value::Integer(n)),
                _ => none(),
            },
            (Self::Length, _) => integer(node, 1, i32::MAX as u64),
            (Self::Number(range), _) => match (range.read(node), &node.data) {
                (Some(x), _) => Ok(Value::Number(x)),
                (None, Data::Text(s)) if s.trim().parse::<f64>().is_ok() => Err("remove the quotes".into()),
                _ => none(),
            },
            (Self::Betas, Data::Array(nodes)) => match nodes.as_slice() {
                [a, b] => match (Range::BelowOne.read(a), Range::BelowOne.read(b)) {
                    (Some(a), Some(b)) => Ok(Value::Pair([a, b])),
                    (None, _) => Err(format!("its first entry is {}", a.describe())),
                    (_, None) => Err(format!("its second entry is {}", b.describe())),
                },
                _ => Err(format!("it has {} entries", nodes.len())),
            },
            (Self::Choice(of), Data::Text(s)) => choice(of, s).map(Value::Text),
            (Self::ChoiceOrArray(of), Data::Text(s)) => choice(of, s).map(Value::Text),
            (Self::ChoiceOrArray(of), Data::Array(nodes)) if !nodes.is_empty() => nodes
                .iter()
                .map(|n| match &n.data {
                    Data::Text(s) => choice(of, s),
                    _ => Err(format!("one of its entries is {}", n.describe())),
                })
                .collect::<Result<_, _>>()
                .map(Value::Texts),
            (Self::Batches, Data::Array(nodes)) => nodes.iter().map(span).collect::<Result<_, _>>().map(Value::Spans),
            (Self::Duration, Data::Text(s)) => units::parse_duration(s).map(Value::Duration),
            (Self::Duration, Data::Integer(n)) => Err(format!("a number without a unit: write \"{n}s\" for seconds")),
            (Self::Weights, Data::Table(members)) => members
                .iter()
                .map(|m| match Range::NotNegative.read(&m.node) {
                    Some(x) => Ok((m.key.clone(), x)),
                    None => Err(format!("`{}` is {}", m.key, m.node.describe())),
                })
                .collect::<Result<_, _>>()
                .map(Value::Weights),
            _ => none(),
        }
    }
}

fn integer(node: &Node, min: u64, max: u64) -> Result<Value, String> {
    match &node.data {
        Data::Integer(n) => match u64::try_from(*n) {
            Ok(n) if (min..=max).contains(&n) => Ok(Value::Integer(n)),
            _ => Err(String::new()),
        },
        Data::Float(x) if x.fract() == 0.0 && *x >= 0.0 && *x < 9e18 => Err(format!("write {}", *x as u64)),
        Data::Text(s) if s.trim().parse::<i64>().is_ok() => Err("remove the quotes".into()),
        _ => Err(String::new()),
    }
}

/// A number, or the first and the last one.
fn span(node: &Node) -> Result<[u64; 2], String> {
    let number = |node: &Node| match &node.data {
        Data::Integer(n) => u64::try_from(*n).ok(),
        _ => None,
    };
    let pair = match &node.data {
        Data::Array(nodes) => match nodes.as_slice() {
            [first, last] => number(first).zip(number(last)),
            _ => None,
        },
        _ => number(node).map(|n| (n, n)),
    };
    match pair {
        Some((first, last)) if first <= last => Ok([first, last]),
        Some((first, last)) => Err(format!("the pair [{first}, {last}] ends before it begins")),
        None => Err(format!("one of its entries is {}", node.describe())),
    }
}

fn path_text(s: &str) -> Result<String, String> {
    if s.is_empty() {
        return Err("a path cannot be empty".into());
    }
    if s.contains('\0') {
        return Err("a path cannot hold a NUL character".into());
    }
    if s == "~" || s.starts_with("~/") {
        return Err("`~` is not expanded: write the folder out".into());
    }
    Ok(s.to_string())
}

fn choice(of: &[&str], s: &str) -> Result<String, String> {
    if of.contains(&s) {
        return Ok(s.to_string());
    }
    Err(crate::error::did_you_mean(s, of.iter().copied()).trim_matches([' ', '(', ')']).to_string())
}

/// A path of segments as the schema writes it: indices become `*`.
pub fn pattern(segments: &[&str]) -> String {
    let mut out = String::new();
    for s in segments {
        if !out.is_empty() {
            out.push('.');
        }
        out.push_str(if is_index(s) { "*" } else { s });
    }
    out
}

/// Whether a path's segment counts an array's entries.
pub fn is_index(segment: &str) -> bool {
    !segment.is_empty() && segment.bytes().all(|b| b.is_ascii_digit())
}

pub fn find(pattern: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.path == pattern)
}

/// Names of the keys and tables right below a table.
pub fn children(table: &str) -> Vec<&'static str> {
    let mut out: Vec<&str> = Vec::new();
    for key in KEYS {
        let rest = if table.is_empty() { Some(key.path) } else { key.path.strip_prefix(table).and_then(|r| r.strip_prefix('.')) };
        if let Some(name) = rest.and_then(|r| r.split('.').next())
            && !out.contains(&name)
        {
            out.push(name);
        }
    }
    out
}

/// Keys of which a table holds at most one; each `--set` of one takes the other's place.
pub const EXCLUSIVE: [(&str, &str); 4] = [
    ("train.steps", "train.tokens"),
    ("schedule.warmup_steps", "schedule.warmup_tokens"),
    ("stages.*.steps", "stages.*.tokens"),
    ("stages.*.warmup_steps", "stages.*.warmup_tokens"),
];

/// Last name of the key that excludes this one.
pub fn exclusive_partner(pattern: &str) -> Option<&'static str> {
    EXCLUSIVE.iter().find_map(|(a, b)| {
        let other = match pattern {
            p if p == *a => b,
            p if p == *b => a,
            _ => return None,
        };
        other.rsplit('.').next()
    })
}

//! Reading single keys of a `config.json`: types are checked, and every complaint names the key. Complaints are gathered, so
//! that one run tells all of them.

use serde_json::{Map, Value};

/// Largest value of any size in a config. It only keeps products of sizes far from overflow; no real model comes near.
const MAX_SIZE: u64 = 1 << 31;

/// The keys of one JSON object, and what is wrong with them.
pub(super) struct Keys<'a> {
    map: &'a Map<String, Value>,
    pub problems: Vec<String>,
}

/// How a value is shown in a complaint: JSON, cut short.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}

impl<'a> Keys<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, problems: Vec::new() }
    }

    /// The value of `key`. A null counts as absent. Names of Zyphra's internal files, `smoe_...` for `zaya_...` and
    /// `rotary_base` for `rope_theta`, are found as well.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let direct = self.map.get(key);
        let found = direct.or_else(|| match key.strip_prefix("zaya_") {
            Some(rest) => self.map.get(&format!("smoe_{rest}")),
            None if key == "rope_theta" => self.map.get("rotary_base"),
            None => None,
        });
        found.filter(|v| !v.is_null())
    }

    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// True when `key` is there and explicitly null, which is not the same as absent for token ids.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    pub fn problem(&mut self, text: impl Into<String>) {
        self.problems.push(text.into());
    }

    /// A whole number from 0 to 2^31, as any size or count; None when absent (or wrong, which is then a problem).
    pub fn size(&mut self, key: &str) -> Option<usize> {
        let value = self.get(key)?;
        let size = size_of(value);
        if size.is_none() {
            self.problem(format!("`{key}` must be a whole number from 0 to {MAX_SIZE}, got {}", shown(value)));
        }
        size
    }

    /// A size that the model cannot be built without. 1 stands in for a missing one, so that reading goes on.
    pub fn required(&mut self, key: &str) -> usize {
        if !self.has(key) {
            self.problem(format!("`{key}` is missing"));
        }
        self.size(key).unwrap_or(1)
    }

    pub fn number(&mut self, key: &str) -> Option<f64> {
        let value = self.get(key)?;
        let number = value.as_f64();
        if number.is_none() {
            self.problem(format!("`{key}` must be a number, got {}", shown(value)));
        }
        number
    }

    /// Complains unless `key` is absent or equal to `wanted`. `why` says what a different value would mean.
    pub fn only(&mut self, key: &str, wanted: &Value, why: &str) {
        if let Some(value) = self.get(key) {
            // 0 and 0.0, 2 and 2.0 are the same number.
            let same = value == wanted || value.as_f64().is_some_and(|v| wanted.as_f64() == Some(v));
            if !same {
                self.problem(format!("`{key}` is {}, but only {wanted} is supported: {why}", shown(value)));
            }
        }
    }

    /// A token id: absent gives `default`, null gives None, a list (several end-of-text tokens) gives its first.
    pub fn token(&mut self, key: &str, default: Option<u32>) -> Option<u32> {
        if self.is_null(key) {
            return None;
        }
        let Some(value) = self.get(key) else { return default };
        let first = value.as_array().and_then(|ids| ids.first()).unwrap_or(value);
        let id = first.as_u64().and_then(|id| u32::try_from(id).ok());
        if id.is_none() {
            self.problem(format!("`{key}` must be a token id, got {}", shown(value)));
        }
        id
    }

    /// The one value that a per-layer list `key` gives to the layers `start, start + 2, ...` below `layers`. Such lists hold 0
    /// for the layers that they do not concern, and may be longer than the model. A plain number serves every layer.
    pub fn per_layer(&mut self, key: &str, start: usize, layers: usize) -> Option<usize> {
        let Some(list) = self.get(key)?.as_array() else { return self.size(key) };
        if list.len() < layers {
            self.problem(format!("`{key}` has {} entries for {layers} layers", list.len()));
            return None;
        }
        let mut values = Vec::new();
        for layer in (start..layers).step_by(2) {
            let Some(value) = size_of(&list[layer]) else {
                self.problem(format!("`{key}[{layer}]` must be a whole number, got {}", shown(&list[layer])));
                return None;
            };
            values.push(value);
        }
        let first = *values.first()?;
        if let Some(other) = values.iter().position(|v| *v != first) {
            self.problem(format!(
                "`{key}[{}]` is {} and `{key}[{start}]` is {first}: layers of different widths are not supported",
                start + 2 * other,
                values[other]
            ));
        }
        Some(first)
    }
}

pub(super) fn size_of(value: &Value) -> Option<usize> {
    value.as_u64().filter(|v| *v <= MAX_SIZE).map(|v| v as usize)
}

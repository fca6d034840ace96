//! Stop strings of generation, as lm-eval's Hugging Face model treats them.

use serde_json::{Map, Value};

/// Tokens generated when the task says nothing (`HFLM.max_gen_toks`).
pub const DEFAULT_MAX_GEN_TOKS: usize = 256;

/// The stop strings of `generation_kwargs`, and behind them the text of the end-of-text token.
pub fn stops(options: &Map<String, Value>, eos_text: Option<&str>) -> Vec<String> {
    let mut stops: Vec<String> = match options.get("until") {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(all)) => all.iter().filter_map(|s| s.as_str().map(str::to_string)).collect(),
        _ => Vec::new(),
    };
    if let Some(eos) = eos_text.filter(|eos| !stops.iter().any(|s| s == eos)) {
        stops.push(eos.to_string());
    }
    stops
}

/// Most tokens to generate: `max_gen_toks` or one of its synonyms.
pub fn max_gen_toks(options: &Map<String, Value>) -> usize {
    ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"]
        .iter()
        .find_map(|key| options.get(*key)?.as_u64())
        .map_or(DEFAULT_MAX_GEN_TOKS, |n| n as usize)
}

/// The text before the first occurrence of each stop, one after the other.
pub fn cut<'a>(text: &'a str, stops: &[String]) -> &'a str {
    stops.iter().filter(|s| !s.is_empty()).fold(text, |text, stop| text.split(stop.as_str()).next().unwrap_or(text))
}

/// The stop string that ends `text` first; `None` when none occurs.
pub fn hit<'a>(text: &str, stops: &'a [String]) -> Option<&'a str> {
    stops
        .iter()
        .filter(|s| !s.is_empty())
        .filter_map(|s| Some((text.find(s.as_str())?, s.as_str())))
        .min_by_key(|(at, _)| *at)
        .map(|(_, s)| s)
}

/// Whether a generation of which `text` is decoded so far can end: a stop occurs, wherever token boundaries lie.
pub fn is_done(text: &str, stops: &[String]) -> bool {
    hit(text, stops).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn list(stops: &[&str]) -> Vec<String> {
        stops.iter().map(|s| s.to_string()).collect()
    }

    #[test]
    fn cuts_at_each_stop_in_turn() {
        assert_eq!(cut("a\n\nb Q c", &list(&["Q", "\n\n"])), "a");
        assert_eq!(cut("12.5", &list(&["."])), "12");
        assert_eq!(cut("abc", &list(&["", "<eos>"])), "abc");
        assert_eq!(hit("x\nclass\ndef", &list(&["\ndef", "\nclass"])), Some("\nclass"));
        assert!(!is_done("12", &list(&["."])));
    }

    #[test]
    fn eos_text_comes_last_and_once() {
        let options = json!({"until": ["Q:", "<eos>"], "max_gen_toks": 5});
        let Value::Object(options) = options else { unreachable!() };
        assert_eq!(stops(&options, Some("<eos>")), ["Q:", "<eos>"]);
        assert_eq!(stops(&Map::new(), Some("<eos>")), ["<eos>"]);
        assert_eq!((max_gen_toks(&options), max_gen_toks(&Map::new())), (5, 256));
    }
}

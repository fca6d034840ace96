//! Reading a `tokenizer.json`, and refusing what the engine does not know.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasherDefault;

use serde_json::{Map, Value};

use super::added::Matcher;
use super::bridge::Bridges;
use super::bytemap::TextHasher;
use super::merge::MOST_MERGES;
use super::model::{Alphabet, MOST_IDS, Model};
use super::nfc;
use super::pairs::{NEVER, Pairs};
use super::runs::Runs;
use super::sentence::{SPACE_MARK, Sentence};
use super::simd::Level;
use super::split::Splitter;
use super::{Cutter, Engine};

/// Why the engine does not take a file: a part of a sentence.
pub type Refusal = String;

fn refuse<T>(why: impl Into<String>) -> Result<T, Refusal> {
    Err(why.into())
}

/// Null and absent are the same.
fn field<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object.get(name).filter(|value| !value.is_null())
}

fn flag(object: &Value, name: &str, default: bool) -> bool {
    field(object, name).and_then(Value::as_bool).unwrap_or(default)
}

fn kind(object: &Value) -> &str {
    field(object, "type").and_then(Value::as_str).unwrap_or("")
}

/// The steps of a normalizer or pre-tokenizer: those of a sequence, one, or none.
fn steps<'a>(of: Option<&'a Value>, list: &str) -> Vec<&'a Value> {
    match of {
        None => Vec::new(),
        Some(sequence) if kind(sequence) == "Sequence" => {
            let inner = field(sequence, list).and_then(Value::as_array).into_iter().flatten();
            inner.flat_map(|step| steps(Some(step), list)).collect()
        }
        Some(one) => vec![one],
    }
}

/// How text is prepared, without the tables that the model fills.
struct Preparation {
    nfc: bool,
    /// None: a vocabulary whose pre-tokenizer does nothing that `borders` do not tell.
    splitter: Option<Splitter>,
    borders: Vec<Border>,
}

/// Between which two characters a step of a pre-tokenizer cuts, whatever stands around them.
#[derive(Clone, Copy)]
enum Border {
    Before(char),
    Behind(char),
    Around(char),
    AroundNumbers,
    WhereNumbersBegin,
}

impl Border {
    /// None for steps that are not known, or look further.
    fn of(step: &Value) -> Option<Self> {
        if kind(step) == "Digits" {
            return Some(if flag(step, "individual_digits", false) { Self::AroundNumbers } else { Self::WhereNumbersBegin });
        }
        let text = step.pointer("/pattern/String").and_then(Value::as_str);
        let newline = || step.pointer("/pattern/Regex").and_then(Value::as_str).filter(|r| *r == r"\n").map(|_| "\n");
        let mut letters = text.or_else(newline)?.chars();
        let (Some(c), None) = (letters.next(), letters.next()) else { return None };
        match (kind(step), field(step, "behavior").and_then(Value::as_str), flag(step, "invert", false)) {
            ("Split", Some("MergedWithNext"), false) => Some(Self::Before(c)),
            ("Split", Some("MergedWithPrevious"), false) => Some(Self::Behind(c)),
            ("Split", Some("Isolated"), false) => Some(Self::Around(c)),
            _ => None,
        }
    }

    fn is_between(self, left: char, right: char) -> bool {
        match self {
            Self::Before(c) => right == c,
            Self::Behind(c) => left == c,
            Self::Around(c) => left == c || right == c,
            Self::AroundNumbers => left.is_numeric() || right.is_numeric(),
            Self::WhereNumbersBegin => left.is_numeric() != right.is_numeric(),
        }
    }
}

fn preparation(json: &Value) -> Result<Preparation, Refusal> {
    let (mut nfc, mut marks_spaces) = (false, false);
    for step in steps(field(json, "normalizer"), "normalizers") {
        let replaces = || step.pointer("/pattern/String").and_then(Value::as_str) == Some(" ");
        match kind(step) {
            "NFC" if !nfc => nfc = true,
            "Replace" if replaces() && step["content"] == SPACE_MARK.to_string() && !marks_spaces => marks_spaces = true,
            other => return refuse(format!("its normalizer has a step `{other}` that is not known")),
        }
    }
    let steps = steps(field(json, "pre_tokenizer"), "pretokenizers");
    if marks_spaces {
        let borders = steps.iter().map(|step| Border::of(step)).collect::<Option<Vec<_>>>();
        return match borders.filter(|_| !nfc) {
            // Behind a normalizer that leaves no space, cutting at spaces does nothing.
            Some(borders) => Ok(Preparation { nfc, splitter: None, borders }),
            None => refuse("its pre-tokenizer is not one known to go with spaces written as `▁`"),
        };
    }
    let Some((last, splits)) = steps.split_last() else { return refuse("it has no pre-tokenizer") };
    if kind(last) != "ByteLevel" || flag(last, "add_prefix_space", true) {
        return refuse("its pre-tokenizer is not byte-level without a prefixed space");
    }
    let own_expression = flag(last, "use_regex", true);
    let mut patterns = Vec::new();
    let mut drops_gaps = false;
    for split in splits {
        let pattern = split.pointer("/pattern/Regex").and_then(Value::as_str);
        let behavior = (field(split, "behavior").and_then(Value::as_str), flag(split, "invert", false));
        match (kind(split), pattern, behavior) {
            ("Split", Some(pattern), (Some("Isolated"), false)) => patterns.push(pattern),
            ("Split", Some(pattern), (Some("Removed"), true)) => {
                drops_gaps = true;
                patterns.push(pattern);
            }
            (other, ..) => return refuse(format!("its pre-tokenizer has a step `{other}` that is not known")),
        }
    }
    let splitter = match (own_expression, patterns.is_empty()) {
        (true, true) => Some(Splitter::Gpt2),
        (false, false) => Splitter::of_patterns(&patterns),
        _ => None,
    };
    match splitter {
        // The others match everything, so that there are no gaps to drop.
        Some(Splitter::DeepSeek) if drops_gaps => refuse("it drops what its regular expressions do not match"),
        Some(splitter) => Ok(Preparation { nfc, splitter: Some(splitter), borders: Vec::new() }),
        None => refuse("the regular expression of its pre-tokenizer is not known"),
    }
}

/// The two alphabets of added tokens: those found in raw and in normalized text.
type Added<'a> = Vec<super::runs::Added<'a>>;

fn added<'a>(
    json: &'a Value,
    preparation: &Preparation,
    id_of: impl Fn(&str) -> Option<u32>,
) -> Result<(Added<'a>, Added<'a>), Refusal> {
    let (mut raw, mut normalized) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    for token in field(json, "added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let Some(content) = field(token, "content").and_then(Value::as_str) else { return refuse("an added token has no text") };
        if content.is_empty() {
            continue;
        }
        if !seen.insert(content) {
            return refuse(format!("the added token `{content}` is there twice"));
        }
        let special = flag(token, "special", false);
        if !special && ["single_word", "lstrip", "rstrip"].iter().any(|option| flag(token, option, false)) {
            return refuse(format!("the added token `{content}` takes spaces or only whole words"));
        }
        let id = match (special, id_of(content)) {
            (true, _) => None,
            (false, Some(id)) if id < MOST_IDS => Some(id),
            (false, _) => return refuse(format!("the added token `{content}` has no id")),
        };
        if !flag(token, "normalized", !special) {
            raw.push((content.into(), id));
        } else if preparation.splitter.is_some() {
            normalized.push(if preparation.nfc { (nfc::normalized(content).into(), id) } else { (content.into(), id) });
        } else if !special {
            return refuse(format!("the added token `{content}` is looked for in text whose spaces are marked"));
        }
    }
    Ok((raw, normalized))
}

/// The byte of each character that a byte-level vocabulary writes bytes with: printable Latin-1 as it is, the rest from U+0100 on.
pub fn byte_alphabet() -> HashMap<char, u8> {
    let mut moved = 0x100;
    let mut alphabet = HashMap::new();
    for byte in 0..=255u8 {
        let c = if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            byte as char
        } else {
            moved += 1;
            char::from_u32(moved - 1).expect("Latin Extended-A has no gaps")
        };
        alphabet.insert(c, byte);
    }
    alphabet
}

/// The two sides of an entry of the merge list. `None` for the version line that old lists start with.
fn sides(merge: &Value) -> Result<Option<(&str, &str)>, Refusal> {
    match merge {
        Value::String(line) if line.starts_with("#version") => Ok(None),
        Value::String(line) => match line.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => Ok(Some((left, right))),
            _ => refuse(format!("the merge `{line}` is not two tokens")),
        },
        Value::Array(two) => match &two[..] {
            [Value::String(left), Value::String(right)] => Ok(Some((left, right))),
            _ => refuse("a merge is not two tokens"),
        },
        _ => refuse("a merge is not two tokens"),
    }
}

/// Entries by their texts.
type Vocabulary<'a> = HashMap<&'a str, u32, BuildHasherDefault<TextHasher>>;

/// The model as the file says it.
struct Parts<'a> {
    vocabulary: Vocabulary<'a>,
    /// (left, right, result)
    merges: Vec<(u32, u32, u32)>,
    /// Texts of the results.
    results: Vec<&'a str>,
    ignore_merges: bool,
}

fn parts(json: &Value) -> Result<Parts<'_>, Refusal> {
    let model = field(json, "model").ok_or("it has no model")?;
    if !["BPE", ""].contains(&kind(model)) {
        return refuse(format!("its model is `{}`, not BPE", kind(model)));
    }
    for option in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if field(model, option).is_some_and(|value| value != "") {
            return refuse(format!("its model has a {option}"));
        }
    }
    if field(model, "dropout").is_some() {
        return refuse("its model has a dropout");
    }
    let (Some(entries), Some(list)) =
        (field(model, "vocab").and_then(Value::as_object), field(model, "merges").and_then(Value::as_array))
    else {
        return refuse("its model has no vocabulary with merges");
    };
    let vocabulary = vocabulary(entries)?;
    if list.len() >= MOST_MERGES {
        return refuse(format!("it has {} merges", list.len()));
    }
    let (mut merges, mut results) = (Vec::with_capacity(list.len()), Vec::with_capacity(list.len()));
    let mut both = String::new();
    for merge in list {
        let Some((left, right)) = sides(merge)? else { continue };
        both.clear();
        both.push_str(left);
        both.push_str(right);
        match (vocabulary.get(left), vocabulary.get(right), vocabulary.get_key_value(both.as_str())) {
            (Some(l), Some(r), Some((result, id))) => {
                merges.push((*l, *r, *id));
                results.push(*result);
            }
            _ => return refuse(format!("the merge `{left} {right}` is of tokens that are not in the vocabulary")),
        }
    }
    Ok(Parts { vocabulary, merges, results, ignore_merges: flag(model, "ignore_merges", false) })
}

fn vocabulary(entries: &Map<String, Value>) -> Result<Vocabulary<'_>, Refusal> {
    let mut vocabulary = Vocabulary::with_capacity_and_hasher(entries.len(), BuildHasherDefault::default());
    let mut ids = Vec::with_capacity(entries.len());
    for (text, id) in entries {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id < MOST_IDS);
        let Some(id) = id else { return refuse(format!("the entry `{text}` has no usable id")) };
        ids.push(id);
        vocabulary.insert(text.as_str(), id);
    }
    ids.sort_unstable();
    if let Some(twice) = ids.windows(2).find(|two| two[0] == two[1]) {
        return refuse(format!("two entries have the id {}", twice[0]));
    }
    Ok(vocabulary)
}

fn byte_level(level: Level, parts: &Parts<'_>) -> Result<Model, Refusal> {
    let alphabet = byte_alphabet();
    let decode = |text: &str| text.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Vec<u8>>>();
    let mut ids = [0; 256];
    for (c, byte) in &alphabet {
        match parts.vocabulary.get(c.encode_utf8(&mut [0; 4]) as &str) {
            Some(id) => ids[*byte as usize] = *id,
            None => return refuse(format!("its vocabulary has no entry for the byte 0x{byte:02x}")),
        }
    }
    let pairs = Pairs::new(&parts.merges);
    let merges = (0..1 << 16).map(|two| pairs.get(ids[two >> 8], ids[two & 255])).collect();
    let results: Vec<Vec<u8>> = parts.results.iter().filter_map(|text| decode(text)).collect();
    let bridges = Bridges::new(results.iter().map(Vec::as_slice));
    let entries = parts.vocabulary.iter().filter(|(text, _)| !text.is_empty());
    let words: Vec<_> = entries.filter_map(|(text, id)| Some((decode(text)?, *id))).collect();
    Ok(Model::new(level, Alphabet::Bytes { ids, merges, bridges }, pairs, &words, parts.ignore_merges))
}

fn sentence_level(level: Level, json: &Value, parts: &Parts<'_>, borders: &[Border]) -> Result<(Model, Sentence), Refusal> {
    // Where no merge goes across what the pre-tokenizer cuts, cutting changes nothing.
    let holds_border = |token: &&&str| {
        token.chars().zip(token.chars().skip(1)).any(|(a, b)| borders.iter().any(|border| border.is_between(a, b)))
    };
    if let Some(token) = parts.results.iter().find(holds_border) {
        return refuse(format!("its merges make `{token}`, which its pre-tokenizer cuts"));
    }
    if parts.ignore_merges {
        return refuse("it ignores merges without a pre-tokenizer");
    }
    if !flag(&json["model"], "byte_fallback", false) {
        return refuse("it has neither a byte-level pre-tokenizer nor bytes to fall back on");
    }
    let mut bytes = [0; 256];
    for (byte, id) in bytes.iter_mut().enumerate() {
        let name = format!("<0x{byte:02X}>");
        match parts.vocabulary.get(name.as_str()) {
            Some(known) => *id = *known,
            None => return refuse(format!("its vocabulary has no `{name}`")),
        }
    }
    if parts.merges.iter().any(|(left, right, _)| bytes.contains(left) || bytes.contains(right)) {
        return refuse("it merges bytes that it falls back on");
    }
    let one = |text: &str| text.chars().next().filter(|c| c.len_utf8() == text.len());
    let mut ids = Vec::new();
    for (c, id) in parts.vocabulary.iter().filter_map(|(text, id)| Some((one(text)?, *id))) {
        ids.resize(ids.len().max(c as usize + 1), NEVER);
        ids[c as usize] = id;
    }
    let sentence = Sentence::new(parts.results.iter().copied());
    // A piece is raw text: its spaces are spaces. Entries that no single piece can be do no harm here.
    let raw = |text: &str| text.replace(SPACE_MARK, " ").into_bytes();
    let entries = parts.vocabulary.iter().filter(|(text, _)| !text.is_empty() && !text.contains(' '));
    let words: Vec<_> = entries.map(|(text, id)| (raw(text), *id)).collect();
    let pairs = Pairs::new(&parts.merges);
    Ok((Model::new(level, Alphabet::Characters { ids, bytes }, pairs, &words, false), sentence))
}

impl Engine {
    /// Reads a `tokenizer.json`. `id_of` is what `tokenizers` says the id of an added token is; it is asked late, when all else is
    /// done. An error says, as a part of a sentence, what about the file the engine does not know.
    pub fn from_json(json: &Value, id_of: impl Fn(&str) -> Option<u32>) -> Result<Self, Refusal> {
        Self::at_level(json, id_of, Level::detect())
    }

    pub(super) fn at_level(json: &Value, id_of: impl Fn(&str) -> Option<u32>, level: Level) -> Result<Self, Refusal> {
        let preparation = preparation(json)?;
        let matcher = |tokens: &Added<'_>| {
            let tokens: Vec<_> = tokens.iter().map(|(text, id)| (text.as_ref(), *id)).collect();
            Matcher::new(&tokens)
        };
        let parts = parts(json)?;
        let (mut model, mut cutter) = match preparation.splitter {
            Some(splitter) => (byte_level(level, &parts)?, Cutter::Rule(splitter)),
            None => {
                let (model, sentence) = sentence_level(level, json, &parts, &preparation.borders)?;
                (model, Cutter::Sentence(sentence))
            }
        };
        let (mut raw, normalized) = added(json, &preparation, id_of)?;
        let cuts_at_spaces = raw
            .iter()
            .chain(&normalized)
            .all(|(text, _)| !text.contains([' ', SPACE_MARK]) || text.trim_matches([' ', SPACE_MARK]).is_empty());
        if let Cutter::Sentence(sentence) = &mut cutter {
            let runs = Runs::take_from(&mut raw);
            sentence.set_runs(&runs);
            model.set_runs(runs);
        }
        let (raw, normalized) = (matcher(&raw), matcher(&normalized));
        Ok(Self { level, raw, normalized, nfc: preparation.nfc, cutter, model, cuts_at_spaces })
    }
}

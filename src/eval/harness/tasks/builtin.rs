//! What lm-eval's tasks do in Python, as named functions that definitions refer to.

use anyhow::{Result, anyhow};
use serde_json::{Map, Value, json};

use crate::error::{bad_input, did_you_mean};
use crate::eval::harness::python::regex::Pattern;
use crate::eval::harness::python::text::{capitalize, strip};

/// A built-in function of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// `process_docs` of HellaSwag: query, choices and gold from ctx_a, ctx_b, activity_label, endings and label.
    HellaswagPreprocess,
    /// `doc_to_text` of WinoGrande: the index of the right option, since the contexts are the choices.
    WinograndeGold,
    /// `doc_to_choice` of WinoGrande: the sentence up to the gap, with each option in it.
    WinograndeContexts,
    /// `doc_to_target` of WinoGrande: what follows the gap.
    WinograndeRest,
    /// `doc_to_target` of WikiText: the page without tokenization marks.
    WikitextDetokenize,
    /// `process_results` of WikiText: words and bytes of the page as it was.
    WikitextCounts,
    /// `process_results` of TruthfulQA mc2: probability mass of the true answers.
    TruthfulqaMc2,
    /// `process_docs` of CORE's tasks: documents of other sources in the form of the bundle.
    CoreItem,
    /// Filter of HumanEval: the prompt in front of each completion.
    HumanevalPrograms,
}

const NAMES: [(&str, Function); 9] = [
    ("hellaswag_preprocess", Function::HellaswagPreprocess),
    ("winogrande_gold", Function::WinograndeGold),
    ("winogrande_contexts", Function::WinograndeContexts),
    ("winogrande_rest", Function::WinograndeRest),
    ("wikitext_detokenize", Function::WikitextDetokenize),
    ("wikitext_counts", Function::WikitextCounts),
    ("truthfulqa_mc2", Function::TruthfulqaMc2),
    ("core_item", Function::CoreItem),
    ("humaneval_programs", Function::HumanevalPrograms),
];

impl Function {
    /// Errors: no such function; the text lists them.
    pub fn named(name: &str) -> Result<Self> {
        NAMES.iter().find(|(n, _)| *n == name).map(|(_, f)| *f).ok_or_else(|| {
            let known: Vec<_> = NAMES.iter().map(|(n, _)| *n).collect();
            let close = did_you_mean(name, known.iter().copied());
            bad_input(format!("there is no built-in function `{name}`{close}; there are {}", known.join(", ")))
        })
    }

    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, f)| *f == self).map_or("", |(n, _)| n)
    }

    /// As `process_docs`.
    pub fn process(self, doc: &Value) -> Result<Value> {
        match self {
            Function::HellaswagPreprocess => hellaswag(doc),
            Function::CoreItem => core_item(doc),
            _ => Err(self.misplaced("process_docs")),
        }
    }

    /// As `doc_to_text`.
    pub fn text(self, doc: &Value) -> Result<Value> {
        match self {
            Function::WinograndeGold => match string(doc, "answer")? {
                "1" => Ok(json!(0)),
                "2" => Ok(json!(1)),
                other => Err(bad_input(format!("the answer of a WinoGrande document is \"1\" or \"2\", not {other:?}"))),
            },
            _ => Err(self.misplaced("doc_to_text")),
        }
    }

    /// As `doc_to_target`.
    pub fn target(self, doc: &Value) -> Result<Value> {
        match self {
            Function::WinograndeRest => Ok(strip(gap(doc)?.1).into()),
            Function::WikitextDetokenize => Ok(detokenize(string(doc, "page")?)?.into()),
            _ => Err(self.misplaced("doc_to_target")),
        }
    }

    /// As `doc_to_choice`.
    pub fn choices(self, doc: &Value) -> Result<Value> {
        match self {
            Function::WinograndeContexts => {
                let before = gap(doc)?.0;
                Ok(json!([format!("{before}{}", string(doc, "option1")?), format!("{before}{}", string(doc, "option2")?)]))
            }
            _ => Err(self.misplaced("doc_to_choice")),
        }
    }

    fn misplaced(self, place: &str) -> anyhow::Error {
        bad_input(format!("the built-in function `{}` cannot stand as {place}", self.name()))
    }
}

/// A text field of a document.
pub fn string<'a>(doc: &'a Value, field: &str) -> Result<&'a str> {
    doc[field].as_str().ok_or_else(|| anyhow!("the document has no text `{field}`"))
}

/// A WinoGrande sentence before and after its first gap.
fn gap(doc: &Value) -> Result<(&str, &str)> {
    string(doc, "sentence")?.split_once('_').ok_or_else(|| anyhow!("the sentence has no gap `_`"))
}

fn hellaswag(doc: &Value) -> Result<Value> {
    // Documents that went through this already.
    if doc.get("query").is_some() && doc.get("choices").is_some() && doc.get("ctx_a").is_none() {
        return Ok(doc.clone());
    }
    let brackets = Pattern::new(r"\[.*?\]")?;
    let clean = |text: &str| {
        // The strip comes first: an ending that began with a bracket keeps a space in front.
        let text = strip(text).replace(" [title]", ". ");
        brackets.sub("", &text).replace("  ", " ")
    };
    let context = format!("{} {}", string(doc, "ctx_a")?, capitalize(string(doc, "ctx_b")?));
    let endings = doc["endings"].as_array().ok_or_else(|| anyhow!("the document has no list `endings`"))?;
    let endings: Vec<String> = endings.iter().map(|e| clean(e.as_str().unwrap_or_default())).collect();
    let label = doc["label"].as_i64().or_else(|| doc["label"].as_str()?.parse().ok());
    let mut out = doc.as_object().cloned().unwrap_or_else(Map::new);
    out.insert("query".into(), clean(&format!("{}: {context}", string(doc, "activity_label")?)).into());
    out.insert("choices".into(), json!(endings));
    out.insert("gold".into(), json!(label.ok_or_else(|| anyhow!("the document has no number `label`"))?));
    Ok(Value::Object(out))
}

/// What CORE asks of a document of ARC, PIQA, OpenBookQA, HellaSwag, WinoGrande or LAMBADA in its own form; others stay as they are.
fn core_item(doc: &Value) -> Result<Value> {
    // A number, or its text.
    let number = |v: &Value| v.as_u64().or_else(|| v.as_str()?.parse().ok());
    let by_label = |query: String| -> Result<Value> {
        let gold = doc["choices"]["label"].as_array().and_then(|labels| labels.iter().position(|l| *l == doc["answerKey"]));
        let gold = gold.ok_or_else(|| anyhow!("`answerKey` is {}, which is no label of its choices", doc["answerKey"]))?;
        Ok(json!({"query": query, "choices": doc["choices"]["text"], "gold": gold}))
    };
    let has = |key: &str| !doc[key].is_null();
    if has("gold") || has("context") {
        Ok(doc.clone())
    } else if has("question") && has("answerKey") {
        by_label(format!("Question: {}", string(doc, "question")?))
    } else if has("question_stem") {
        by_label(string(doc, "question_stem")?.into())
    } else if has("goal") {
        let query = format!("Question: {}", string(doc, "goal")?);
        Ok(json!({"query": query, "choices": [doc["sol1"], doc["sol2"]], "gold": number(&doc["label"])}))
    } else if has("endings") || has("query") {
        let found = hellaswag(doc)?;
        let label = if found["gold"].is_null() { &doc["label"] } else { &found["gold"] };
        Ok(json!({"query": found["query"], "choices": found["choices"], "gold": number(label)}))
    } else if has("sentence") {
        let contexts = Function::WinograndeContexts.choices(doc)?;
        let (rest, gold) = (Function::WinograndeRest.target(doc)?, Function::WinograndeGold.text(doc)?);
        Ok(json!({"context_options": contexts, "continuation": rest, "gold": gold}))
    } else {
        let (context, continuation) = string(doc, "text")?.rsplit_once(' ').ok_or_else(|| anyhow!("a text of one word"))?;
        Ok(json!({"context": context, "continuation": continuation}))
    }
}

/// A page of WikiText as it was written, by the rules of lm-eval's detokenizer.
pub fn detokenize(page: &str) -> Result<String> {
    let mut s = page.replace("s '", "s'");
    s = Pattern::new("/' [0-9]/")?.sub("/'[0-9]/", &s);
    let marks = [
        (" @-@ ", "-"),
        (" @,@ ", ","),
        (" @.@ ", "."),
        (" : ", ": "),
        (" ; ", "; "),
        (" . ", ". "),
        (" ! ", "! "),
        (" ? ", "? "),
        (" , ", ", "),
    ];
    for (from, to) in marks {
        s = s.replace(from, to);
    }
    let pairs = [
        (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"{\s*([^}]*?)\s*}", r"{\1}"),
        ("\"\\s*([^\"]*?)\\s*\"", "\"\\1\""),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
    ];
    for (pattern, to) in pairs {
        s = Pattern::new(pattern)?.sub(to, &s);
    }
    let rest = [
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" ° ", "°"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ];
    for (from, to) in rest {
        s = s.replace(from, to);
    }
    Ok(s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hellaswag_keeps_the_space_that_stood_before_a_bracket() {
        let doc = json!({"ctx_a": "[header] How [title] a", "ctx_b": "THEN b", "activity_label": "Home", "endings": ["[step] x  y", " z"], "label": "1"});
        let out = Function::HellaswagPreprocess.process(&doc).unwrap();
        assert_eq!(out["query"], "Home: How. a Then b");
        assert_eq!(out["choices"], json!([" x y", "z"]));
        assert_eq!(out["gold"], 1);
    }

    #[test]
    fn documents_of_core_come_from_many_sources() {
        let arc = json!({"question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"});
        let stem = json!({"question_stem": "So", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"});
        let choice = |query: &str, gold: usize| json!({"query": query, "choices": ["a", "b"], "gold": gold});
        let cases = [
            (arc, choice("Question: Why?", 1)),
            (stem, choice("So", 0)),
            (json!({"goal": "Go", "sol1": "a", "sol2": "b", "label": 1}), choice("Question: Go", 1)),
            (json!({"goal": "Go", "sol1": "a", "sol2": "b", "label": "1"}), choice("Question: Go", 1)),
            (json!({"query": "q", "choices": ["a", "b"], "label": "1"}), choice("q", 1)),
            (
                json!({"sentence": "A saw B so _ ran.", "option1": "A", "option2": "B", "answer": "2"}),
                json!({"context_options": ["A saw B so A", "A saw B so B"], "continuation": "ran.", "gold": 1}),
            ),
            (json!({"text": "the last word"}), json!({"context": "the last", "continuation": "word"})),
        ];
        for (doc, want) in cases {
            let got = Function::CoreItem.process(&doc).unwrap();
            assert_eq!(got, want);
            assert_eq!(Function::CoreItem.process(&got).unwrap(), want);
        }
    }

    #[test]
    fn winogrande_splits_at_the_gap() {
        let doc = json!({"sentence": "A saw B so _ ran. ", "option1": "A", "option2": "B", "answer": "2"});
        assert_eq!(Function::WinograndeContexts.choices(&doc).unwrap(), json!(["A saw B so A", "A saw B so B"]));
        assert_eq!(Function::WinograndeRest.target(&doc).unwrap(), "ran.");
        assert_eq!(Function::WinograndeGold.text(&doc).unwrap(), 1);
        assert!(Function::named("winogrande_goal").unwrap_err().to_string().contains("winogrande_gold"));
    }
}

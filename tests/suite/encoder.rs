//! Which ids text becomes: special tokens, added tokens, the end of a document.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zaya::text::{Encoder, Eod, vocab};

/// A byte-level BPE with some merges, `<|endoftext|>` = 0, and these added tokens (content, special).
pub fn tokenizer(dir: &Path, added: &[(&str, bool)]) -> PathBuf {
    let text = "the cat and the dog and the <think> of the end of text, the the and and endoftext <|end|>, quick brown foxes jump over lazy dogs";
    let json = vocab::train(290, &vocab::special_tokens(&[]), std::iter::once(Ok(text.to_string()))).unwrap();
    let mut json: Value = serde_json::from_str(&json).unwrap();
    for (i, (content, special)) in added.iter().enumerate() {
        json["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": 290 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special
        }));
    }
    write_tokenizer(dir, &json)
}

fn write_tokenizer(dir: &Path, json: &Value) -> PathBuf {
    let path = dir.join("tok.json");
    fs::write(&path, json.to_string()).unwrap();
    path
}

#[test]
fn text_that_spells_a_special_token_stays_text() {
    let dir = tempfile::tempdir().unwrap();
    let tok = tokenizer(dir.path(), &[("<|end|>", true), ("<think>", false), ("\n\n", false)]);
    let encoder = Encoder::load(&tok, &Eod::Token("<|end|>".into())).unwrap();
    assert_eq!(encoder.eod(), Some(("<|end|>", 290)));
    for text in ["<|endoftext|>", "a<|endoftext|>b<|end|>", "<|end|><|end|>", " <|endoftext|> "] {
        let ids = encoder.encode(text).unwrap();
        assert!(ids.iter().all(|id| *id != 0 && *id != 290), "{text}: {ids:?}");
        assert_eq!(encoder.decode(&ids, false).unwrap(), text);
    }
    // Added tokens that are not special match, whole.
    let ids = encoder.encode("the<think>the\n\nthe").unwrap();
    let the = encoder.encode("the").unwrap();
    assert_eq!(ids, [&the[..], &[291], &the, &[292], &the].concat());
}

/// A BPE over letters whose merges lead to the special token itself, as some converted vocabularies have them.
fn merging_bpe(ignore_merges: bool) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": {"type": "Fuse"},
        "added_tokens": [{"id": 7, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
                  "vocab": {"<": 0, "/": 1, "s": 2, ">": 3, "a": 4, "</": 5, "s>": 6, "</s>": 7, "</s>a": 8},
                  "merges": [["<", "/"], ["s", ">"], ["</", "s>"], ["</s>", "a"]]}
    })
}

#[test]
fn a_model_that_can_spell_a_special_token_is_kept_from_it() {
    let dir = tempfile::tempdir().unwrap();
    for ignore_merges in [false, true] {
        let tok = write_tokenizer(dir.path(), &merging_bpe(ignore_merges));
        let encoder = Encoder::load(&tok, &Eod::Find).unwrap();
        assert_eq!((encoder.eod(), encoder.vocab_size()), (Some(("</s>", 7)), 9));
        assert_eq!(encoder.encode("a</s>a").unwrap(), [4, 5, 6, 4]);
        assert_eq!(encoder.encode("</s>").unwrap(), [5, 6]);
        assert_eq!(encoder.decode(&[4, 5, 6, 4], false).unwrap(), "a</s>a");
        assert_eq!(encoder.decode(&[7], false).unwrap(), "</s>");
    }
    // Without the guard this model does make the token.
    let plain: tokenizers::Tokenizer = merging_bpe(false).to_string().parse().unwrap();
    let mut plain = plain;
    plain.set_encode_special_tokens(true);
    assert_eq!(plain.encode("</s>", false).unwrap().get_ids(), [7]);
}

#[test]
fn word_lists_and_unigrams_cannot_spell_it_either() {
    let dir = tempfile::tempdir().unwrap();
    let added = json!([
        {"id": 0, "content": "[UNK]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
        {"id": 1, "content": "[END]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}]);
    let words = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null, "added_tokens": added,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "[END]": 1, "cat": 2}, "unk_token": "[UNK]"}
    });
    let encoder = Encoder::load(&write_tokenizer(dir.path(), &words), &Eod::Token("[END]".into())).unwrap();
    assert_eq!(encoder.encode("cat [END] dog cat").unwrap(), [2, 0, 0, 2]);
    assert_eq!((encoder.unknown(), encoder.eod()), (Some(0), Some(("[END]", 1))));
    let error = Encoder::load(&write_tokenizer(dir.path(), &words), &Eod::Token("[UNK]".into())).unwrap_err().to_string();
    assert!(error.contains("unknown text"), "{error}");

    let unigram = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null, "added_tokens": added,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
                  "vocab": [["[UNK]", 0.0], ["[END]", -1.0], ["[", -3.0], ["END", -3.0], ["]", -3.0], ["cat", -2.0]]}
    });
    let encoder = Encoder::load(&write_tokenizer(dir.path(), &unigram), &Eod::Token("[END]".into())).unwrap();
    assert_eq!(encoder.encode("cat[END]").unwrap(), [5, 2, 3, 4]);
}

#[test]
fn what_the_tokenizer_file_adds_is_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = tokenizer(dir.path(), &[("<bos>", true)]);
    let expected = Encoder::load(&path, &Eod::Find).unwrap().encode("the cat and the dog").unwrap();
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                             "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    json["model"]["dropout"] = json!(0.9);
    json["post_processor"] = json!({
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [290], "tokens": ["<bos>"]}}});
    let encoder = Encoder::load(&write_tokenizer(dir.path(), &json), &Eod::Find).unwrap();
    for _ in 0..20 {
        assert_eq!(encoder.encode("the cat and the dog").unwrap(), expected);
    }
}

#[test]
fn the_end_of_document_is_chosen_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let load = |added: &[(&str, bool)], eod: Eod| {
        Encoder::load(&tokenizer(dir.path(), added), &eod)
            .map(|e| e.eod().map(|(t, id)| (t.to_string(), id)))
            .map_err(|e| e.to_string())
    };
    assert_eq!(load(&[], Eod::Find).unwrap(), Some(("<|endoftext|>".into(), 0)));
    assert_eq!(load(&[], Eod::Absent).unwrap(), None);
    // Gemma's vocabulary has HTML's </s> as an ordinary added token: not an end.
    assert_eq!(load(&[("</s>", false)], Eod::Find).unwrap(), Some(("<|endoftext|>".into(), 0)));
    let several = load(&[("</s>", true)], Eod::Find).unwrap_err();
    assert!(several.contains("`<|endoftext|>`, `</s>`") && several.contains("--eod"), "{several}");
    let missing = load(&[], Eod::Token("<|endoftxt|>".into())).unwrap_err();
    assert!(missing.contains("not in the vocabulary") && missing.contains("did you mean `<|endoftext|>`?"), "{missing}");
    let ordinary = load(&[], Eod::Token("the".into())).unwrap_err();
    assert!(ordinary.contains("which text can spell"), "{ordinary}");
    let letter = load(&[], Eod::Token("a".into())).unwrap_err();
    assert!(letter.contains("which text can spell"), "{letter}");
    // An added token that is not special becomes so by being named.
    assert_eq!(load(&[("<sep>", false)], Eod::Token("<sep>".into())).unwrap(), Some(("<sep>".into(), 290)));
    let encoder = Encoder::load(&tokenizer(dir.path(), &[("<sep>", false)]), &Eod::Token("<sep>".into())).unwrap();
    assert!(!encoder.encode("a<sep>b").unwrap().contains(&290));
}

//! Against `BpeTrainer` of `tokenizers`: the same file, byte for byte.

use tokenizers::models::bpe::BpeTrainer;

use super::super::engine::fuzz::{Random, document};
use super::count::Words;
use super::*;

/// What `tokenizers` learns from the same documents.
fn reference(size: usize, special: &[String], documents: &[String]) -> (usize, String) {
    let added = |token: &String| AddedToken::from(token.as_str(), true);
    let mut trainer = BpeTrainer::builder()
        .vocab_size(size)
        .show_progress(false)
        .special_tokens(special.iter().map(added).collect())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut tokenizer = Trained::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_post_processor(Some(ByteLevel::new(false, false, true)));
    tokenizer.train(&mut trainer, documents.iter()).unwrap();
    (tokenizer.get_vocab_size(true), tokenizer.to_string(true).unwrap() + "\n")
}

/// Compares at `size`, or at the most the corpus gives. Returns that.
fn compare(what: &str, size: usize, special: &[&str], documents: &[String]) -> usize {
    let special: Vec<String> = special.iter().map(|token| token.to_string()).collect();
    let (learned, expected) = reference(size, &special, documents);
    let found = train(learned, &special, documents.iter().cloned().map(Ok)).unwrap();
    if found != expected {
        let different = found.lines().zip(expected.lines()).find(|(a, b)| a != b);
        panic!("{what} at {size}: first differing lines {different:?}");
    }
    if learned < size {
        let error = train(size, &special, documents.iter().cloned().map(Ok)).unwrap_err().to_string();
        assert!(error.contains(&format!("use --train-vocab {learned},")), "{what}: {error}");
    }
    learned
}

fn fuzz(seed: u64, count: usize) -> Vec<String> {
    let mut random = Random(seed);
    (0..count).map(|_| document(&mut random, &[])).collect()
}

#[test]
fn text_of_many_scripts_is_learned_as_tokenizers_does() {
    let sources = [include_str!("mod.rs"), include_str!("count.rs"), include_str!("merges.rs")];
    let sources: Vec<String> = sources.iter().map(|text| text.to_string()).collect();
    assert_eq!(compare("sources", 1500, &[END_OF_TEXT], &sources), 1500);
    for seed in 1..4 {
        assert!(compare("fuzz", 1500, &[END_OF_TEXT, "<pad>"], &fuzz(seed, 1000)) == 1500);
    }
    // To the last pair, where all stand once and ties decide alone.
    let all = compare("everything", 100_000, &[END_OF_TEXT], &fuzz(5, 200));
    assert!((1000..100_000).contains(&all), "{all}");
}

#[test]
fn runs_whose_parts_become_the_same_token_are_learned_as_tokenizers_does() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let alphabet: &[&str] = if seed % 2 == 0 { &["a"] } else { &["a", "b"] };
        let mut word = |longest: usize| (0..1 + random.below(longest)).map(|i| alphabet[i * i % 7 % alphabet.len()]).collect();
        let words: Vec<String> = (0..60).map(|i| word(if i % 5 == 0 { 60 } else { 20 })).collect();
        let documents = vec![words.join(" ")];
        compare("runs", 100_000, &[END_OF_TEXT], &documents);
        compare("runs", 290, &[END_OF_TEXT], &documents);
    }
}

#[test]
fn ties_tiny_corpora_and_special_tokens_like_text_are_learned_as_tokenizers_does() {
    for text in ["", " ", "a", "ab", "ab ba", "aa", "aaaa", "abab abab", "ab cd ef gh ij", "zy yx xw", "é", "中文 中文", "\0\0"]
    {
        compare(text, 400, &[END_OF_TEXT], &[text.into()]);
    }
    compare("nothing", 400, &[END_OF_TEXT], &[]);
    let documents = fuzz(7, 300);
    // Tokens that text spells too: of one byte, of several, as the alphabet writes them.
    compare("special", 800, &["e", "the", "\u{120}", "\u{120}word", "é", "aa", "<|endoftext|>"], &documents);
    let many: Vec<String> = (0..1000).map(|i| format!("<unused{i}>")).collect();
    compare("many", 1800, &many.iter().map(String::as_str).collect::<Vec<_>>(), &documents);
}

#[test]
fn parts_of_a_long_text_and_threads_of_a_pool_count_the_same_words() {
    let long: String = fuzz(11, 40_000).join("\n");
    assert!(long.len() > 4 << 20);
    let total = |words: Vec<Words>| {
        let all = words.iter().flat_map(|map| map.iter().map(|(word, count)| (word.to_vec(), count)));
        all.collect::<std::collections::BTreeMap<_, _>>()
    };
    let mut expected = std::collections::BTreeMap::new();
    let mut pieces = super::super::engine::Pieces::new();
    pieces.cut(&long, |text, pieces| {
        for piece in pieces {
            let word = text.bytes()[piece.start as usize..][..piece.len as usize].to_vec();
            *expected.entry(word).or_insert(0u64) += 1;
        }
    });
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let counted = pool.install(|| count::count(std::iter::once(Ok(long.clone())))).unwrap();
        assert!(total(counted) == expected);
    }
}

#[test]
fn counts_may_be_larger_than_32_bits() {
    let mut words = Words::default();
    // Together 2^32 + 2: more than "cd", though not modulo 2^32.
    for (word, count) in [("ab", (1u64 << 32) + 1), ("xab", 1), ("cd", 1000), ("ef", 5 << 30)] {
        assert!(words.add(word.as_bytes(), count));
    }
    let learned = merges::learn(259, &[], vec![words]).unwrap();
    assert_eq!(learned.tokens[256..], ["ef", "ab", "cd"]);
}

//! The CORE metric of DCLM as nanochat computes it (core_eval at commit 92d63d4), over the tasks whose data is at hand.
//!
//! Unlike lm-eval: a BOS in front, choices compared by their mean log-probability over the tokens in which the prompts differ, shots
//! drawn by `Random(1234 + index)`, and scores centred so that chance is 0.

use anyhow::Result;

use super::encode::{Encode, Pair};
use super::python::random::Random;
use super::python::text::rstrip;
use super::score::numeric::argmax;
use crate::error::bad_input;

/// How a task's prompts differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One query, several continuations: the tokens after the common prefix count.
    MultipleChoice,
    /// Several contexts, one continuation: the tokens of the common suffix count.
    Schema,
    /// One continuation, every token of which must be the argmax.
    LanguageModeling,
}

/// A task of CORE.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoreTask {
    pub label: &'static str,
    /// The task whose documents these are.
    pub documents: &'static str,
    pub kind: Kind,
    pub num_fewshot: usize,
    pub delimiter: &'static str,
    /// Score of chance, a share.
    pub baseline: f64,
}

/// Number of tasks of the whole metric.
pub const WHOLE: usize = 22;

/// The tasks whose data are at hand.
pub const TASKS: [CoreTask; 8] = [
    task("hellaswag_zeroshot", "hellaswag", Kind::MultipleChoice, 0, " ", 0.25),
    task("arc_easy", "arc_easy", Kind::MultipleChoice, 10, "\nAnswer: ", 0.25),
    task("arc_challenge", "arc_challenge", Kind::MultipleChoice, 10, "\nAnswer: ", 0.25),
    task("piqa", "piqa", Kind::MultipleChoice, 10, "\nAnswer: ", 0.5),
    task("openbook_qa", "openbookqa", Kind::MultipleChoice, 0, " ", 0.25),
    task("lambada_openai", "lambada_openai", Kind::LanguageModeling, 0, " ", 0.0),
    task("hellaswag", "hellaswag", Kind::MultipleChoice, 10, " ", 0.25),
    task("winogrande", "winogrande", Kind::Schema, 0, " ", 0.5),
];

const fn task(
    label: &'static str,
    documents: &'static str,
    kind: Kind,
    shots: usize,
    delimiter: &'static str,
    chance: f64,
) -> CoreTask {
    CoreTask { label, documents, kind, num_fewshot: shots, delimiter, baseline: chance }
}

/// A document in CORE's form. `contexts` holds one query, or one per option of a schema; `continuations` one per choice, or one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub contexts: Vec<String>,
    pub continuations: Vec<String>,
    pub gold: usize,
}

/// Indices of the shots of document `index` out of `count`: itself is not among them.
pub fn shots(index: usize, count: usize, k: usize) -> Result<Vec<usize>> {
    if k > count.saturating_sub(1) {
        return Err(bad_input(format!(
            "{k} few-shot examples are needed, there are {} other documents",
            count.saturating_sub(1)
        )));
    }
    let others: Vec<usize> = (0..count).filter(|i| *i != index).collect();
    Ok(Random::new(1234 + index as u64).sample(others.len(), k).into_iter().map(|i| others[i]).collect())
}

/// The order in which nanochat takes documents, of which a limit takes the first.
pub fn order(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    Random::new(1337).shuffle(&mut order);
    order
}

/// The prompts of an item: one per choice or context; for language modelling the one without and the one with the continuation.
pub fn prompts(task: &CoreTask, item: &Item, shots: &[&Item]) -> Vec<String> {
    let d = task.delimiter;
    let mut before = String::new();
    for shot in shots {
        let (context, continuation) = match task.kind {
            Kind::MultipleChoice => (&shot.contexts[0], &shot.continuations[shot.gold]),
            Kind::Schema => (&shot.contexts[shot.gold], &shot.continuations[0]),
            Kind::LanguageModeling => (&shot.contexts[0], &shot.continuations[0]),
        };
        let context = if task.kind == Kind::LanguageModeling { context.trim() } else { context };
        before += &format!("{context}{d}{continuation}\n\n");
    }
    match task.kind {
        Kind::MultipleChoice => item.continuations.iter().map(|c| format!("{before}{}{d}{c}", item.contexts[0])).collect(),
        Kind::Schema => item.contexts.iter().map(|c| format!("{before}{c}{d}{}", item.continuations[0])).collect(),
        Kind::LanguageModeling => {
            let context = format!("{before}{}{d}", item.contexts[0].trim());
            // White space at the end would be a token of its own.
            vec![rstrip(&context).to_string(), format!("{context}{}", item.continuations[0])]
        }
    }
}

/// The pairs to score: context is all before the tokens that count. Left-cut to `max_length` tokens.
pub fn pairs<T: Encode + ?Sized>(kind: Kind, prompts: &[String], tokenizer: &T, max_length: usize) -> Result<Vec<Pair>> {
    let bos = tokenizer.bos().or_else(|| tokenizer.eos()).map(|(id, _)| id);
    let encode = |p: &String| -> Result<Vec<u32>> {
        let ids = tokenizer.encode(p, false)?;
        Ok(bos.into_iter().chain(ids).collect())
    };
    let ids = prompts.iter().map(encode).collect::<Result<Vec<_>>>()?;
    let (whole, starts): (&[Vec<u32>], Vec<usize>) = match kind {
        Kind::MultipleChoice => (&ids, vec![common(&ids, false); ids.len()]),
        Kind::Schema => {
            let suffix = common(&ids, true);
            (&ids, ids.iter().map(|i| i.len() - suffix).collect())
        }
        Kind::LanguageModeling => {
            if !ids[1].starts_with(&ids[0]) {
                return Err(bad_input("the tokens of the prompt are no prefix of those with its continuation"));
            }
            (&ids[1..], vec![ids[0].len()])
        }
    };
    whole
        .iter()
        .zip(starts)
        .map(|(ids, start)| {
            let cut = ids.len().saturating_sub(max_length);
            if start <= cut || start >= ids.len() {
                return Err(bad_input("the tokens that count do not fit the model, or there are none"));
            }
            Ok(Pair { context: ids[cut..start].to_vec(), continuation: ids[start..].to_vec(), ..Pair::default() })
        })
        .collect()
}

/// Length of the longest common prefix, or suffix.
fn common(all: &[Vec<u32>], from_end: bool) -> usize {
    let shortest = all.iter().map(Vec::len).min().unwrap_or(0);
    let at = |ids: &[u32], i: usize| if from_end { ids[ids.len() - 1 - i] } else { ids[i] };
    (0..shortest).take_while(|i| all.iter().all(|ids| at(ids, *i) == at(&all[0], *i))).count()
}

/// Whether the item was answered rightly, given the answer to each pair: sum of log p, and whether all tokens are the argmax.
pub fn is_right(kind: Kind, item: &Item, pairs: &[Pair], answers: &[(f64, bool)]) -> bool {
    if kind == Kind::LanguageModeling {
        return answers.iter().all(|a| a.1);
    }
    let means: Vec<f64> = pairs.iter().zip(answers).map(|(p, a)| a.0 / p.continuation.len() as f64).collect();
    argmax(&means) == item.gold
}

/// (accuracy - chance) / (1 - chance)
pub fn centred(accuracy: f64, baseline: f64) -> f64 {
    (accuracy - baseline) / (1.0 - baseline)
}

/// Mean of the centred scores, and a sentence that says of how many of the 22 tasks.
pub fn core(scores: &[f64]) -> (f64, String) {
    let value = scores.iter().sum::<f64>() / scores.len() as f64;
    (value, format!("mean over {} of the {WHOLE} tasks of CORE: not comparable with the whole metric", scores.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_parts() {
        let ids = vec![vec![1, 2, 3, 9, 7], vec![1, 2, 4, 9, 7], vec![1, 2, 9, 7]];
        assert_eq!((common(&ids, false), common(&ids, true)), (2, 2));
    }

    // CPython: random.Random(1234 + 3).sample([i for i in range(20) if i != 3], 4)
    #[test]
    fn shots_of_a_document() {
        assert_eq!(shots(3, 20, 4).unwrap(), [5, 13, 10, 8]);
        assert!(shots(0, 4, 4).is_err());
        assert_eq!(order(6), [1, 0, 3, 2, 5, 4]);
    }

    #[test]
    fn prompts_are_nanochats() {
        let item = Item { contexts: vec!["Q ".into()], continuations: vec!["a".into(), "b".into()], gold: 1 };
        let t = CoreTask { delimiter: "\nAnswer: ", ..TASKS[1] };
        assert_eq!(prompts(&t, &item, &[&item]), ["Q \nAnswer: b\n\nQ \nAnswer: a", "Q \nAnswer: b\n\nQ \nAnswer: b"]);
        let lm = CoreTask { kind: Kind::LanguageModeling, delimiter: " ", ..TASKS[5] };
        assert_eq!(prompts(&lm, &item, &[]), ["Q", "Q a"]);
        assert_eq!(centred(0.625, 0.25), 0.5);
    }
}

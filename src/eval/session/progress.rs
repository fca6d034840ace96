//! Progress on a terminal: time left by tokens, and the score so far. Elsewhere nothing is shown.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar};

use super::TaskPlan;
use super::work::Watch;
use crate::eval::harness::request::Response;
use crate::eval::harness::run::Planned;
use crate::eval::harness::score::counts::Counts;
use crate::eval::harness::score::document::Scorer;
use crate::eval::harness::score::filters;
use crate::eval::harness::score::results::interval;
use crate::eval::harness::tasks::build::Built;
use crate::monitor::progress::bar;

/// The first metric over the documents whose answers are all there.
pub struct Running<'a> {
    built: &'a [Arc<Built>],
    documents: Vec<Document>,
    /// Which document each pair and each text belongs to; none where no score can be told before the end.
    of_pair: Vec<Option<usize>>,
    of_text: Vec<Option<usize>>,
    sum: f64,
    count: usize,
    /// Whether all values were 0 or 1.
    shares: bool,
}

/// A document and the answers it has.
struct Document {
    task: usize,
    asked: usize,
    first_pair: usize,
    pairs: Vec<Option<(f64, bool)>>,
    /// Tokens that count, by pair.
    tokens: Vec<usize>,
    first_text: usize,
    texts: Vec<Option<String>>,
    left: usize,
}

impl<'a> Running<'a> {
    pub fn new(built: &'a [Arc<Built>], plans: &[TaskPlan]) -> Self {
        let mut out =
            Self { built, documents: Vec::new(), of_pair: Vec::new(), of_text: Vec::new(), sum: 0.0, count: 0, shares: true };
        for (t, (task, plan)) in built.iter().zip(plans).enumerate() {
            let mut planned = plan.planned.iter();
            for (a, asked) in task.asked.iter().enumerate() {
                let own = planned.by_ref().take(asked.requests.len());
                let (mut tokens, mut texts, mut windows) = (Vec::new(), 0, 0);
                for one in own {
                    match one {
                        Planned::Pair { pair, .. } => tokens.push(pair.continuation.len()),
                        Planned::Windows(w) => windows += w.len(),
                        Planned::Generate(_) => texts += task.spec.repeats,
                    }
                }
                // Perplexity of windows and programs that must run have no score of one document to show.
                let tells = windows == 0 && !task.spec.unsafe_code;
                let at = tells.then_some(out.documents.len());
                let pairs = tokens.len();
                let document = Document {
                    task: t,
                    asked: a,
                    first_pair: out.of_pair.len(),
                    pairs: vec![None; pairs],
                    tokens,
                    first_text: out.of_text.len(),
                    texts: vec![None; texts],
                    left: pairs + texts,
                };
                out.of_pair.extend(std::iter::repeat_n(at, pairs + windows));
                out.of_text.extend(std::iter::repeat_n(at, texts));
                if tells {
                    out.documents.push(document);
                }
            }
        }
        out
    }

    fn pair(&mut self, index: usize, answer: (f64, bool)) {
        let Some(at) = self.of_pair[index] else { return };
        let d = &mut self.documents[at];
        d.left -= usize::from(d.pairs[index - d.first_pair].replace(answer).is_none());
        self.finish(at);
    }

    fn text(&mut self, index: usize, text: &str) {
        let Some(at) = self.of_text[index] else { return };
        let d = &mut self.documents[at];
        d.left -= usize::from(d.texts[index - d.first_text].replace(text.to_string()).is_none());
        self.finish(at);
    }

    /// Adds the document's score once all its answers are there. What cannot be scored now is told at the end, not here.
    fn finish(&mut self, at: usize) {
        let d = &self.documents[at];
        if d.left > 0 {
            return;
        }
        let task = &self.built[d.task];
        let mut responses: Vec<Response> = d
            .pairs
            .iter()
            .flatten()
            .zip(&d.tokens)
            .map(|((logprob, is_greedy), tokens)| Response::Loglikelihood {
                logprob: *logprob,
                is_greedy: *is_greedy,
                tokens: *tokens,
            })
            .collect();
        let texts: Vec<String> = d.texts.iter().flatten().cloned().collect();
        responses.extend(texts.chunks(task.spec.repeats).map(|c| Response::Generated(c.to_vec())));
        let asked = &task.asked[d.asked];
        let Some(filter) = task.spec.filters.first() else { return };
        let answers: anyhow::Result<Vec<_>> =
            responses.iter().map(|r| filters::apply(filter, r, &asked.doc).map(|(answer, _)| answer)).collect();
        let scores = answers.and_then(|a| Scorer { task, code: None }.score(asked, &a, &mut Counts::default()));
        // Of a last word `acc` says more than its log-probability.
        let value = scores.ok().and_then(|s| s.iter().find(|(name, _)| name != "perplexity").map(|(_, s)| s.value()));
        if let Some(value) = value {
            self.sum += value;
            self.count += 1;
            self.shares &= value == 0.0 || value == 1.0;
        }
    }

    /// Mean and half the width of its 95 % interval.
    fn score(&self) -> Option<(f64, Option<f64>)> {
        let mean = (self.count > 0).then(|| self.sum / self.count as f64)?;
        Some((mean, interval(mean, self.count, self.shares).map(|(low, high)| (high - low) / 2.0)))
    }
}

/// A bar on stderr where that is a terminal.
pub struct Progress<'a> {
    bar: Option<ProgressBar>,
    running: Running<'a>,
    begun: Option<Instant>,
    total: u64,
    done: u64,
    /// Tokens that this process did not compute.
    known: u64,
}

impl<'a> Progress<'a> {
    pub fn new(running: Running<'a>) -> Self {
        Self { bar: bar(0), running, begun: None, total: 0, done: 0, known: 0 }
    }

    /// When all was ready for the model; none before.
    pub fn begun(&self) -> Option<Instant> {
        self.begun
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn line(&self, elapsed: Duration) -> String {
        let own = self.done - self.known;
        let left = if own == 0 {
            "ETA unknown".to_string()
        } else {
            let seconds = elapsed.as_secs_f64() / own as f64 * (self.total - self.done) as f64;
            format!("ETA {:#}", HumanDuration(Duration::try_from_secs_f64(seconds).unwrap_or_default()))
        };
        let score = self.running.score().map_or(String::new(), |(mean, half)| {
            let half = half.map_or(String::new(), |h| format!(" ± {h:.4}"));
            format!("  score so far {mean:.4}{half} ({} documents)", self.running.count)
        });
        format!("{} of {} tokens  {left}{score}", self.done, self.total)
    }
}

impl Watch for Progress<'_> {
    fn begin(&mut self, tokens: u64) {
        self.total = tokens;
        self.begun = Some(Instant::now());
        if let Some(bar) = &self.bar {
            bar.set_length(tokens);
        }
    }

    fn scored(&mut self, index: usize, answer: (f64, bool)) {
        if self.bar.is_some() {
            self.running.pair(index, answer);
        }
    }

    fn text(&mut self, index: usize, text: &str) {
        if self.bar.is_some() {
            self.running.text(index, text);
        }
    }

    fn round(&mut self, tokens: u64, known: bool) {
        self.done += tokens;
        self.known += if known { tokens } else { 0 };
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
            bar.set_message(self.line(self.begun.map(|b| b.elapsed()).unwrap_or_default()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::harness::encode::Pair;
    use crate::eval::harness::tasks::build::{Options, build};
    use crate::eval::harness::tasks::documents::Library;
    use crate::eval::harness::tasks::registry::{Node, Registry};
    use crate::eval::harness::tasks::template::Templates;
    use serde_json::json;

    const TASK: &str = "task = \"t\"\noutput_type = \"multiple_choice\"\ntest_split = \"test\"\ndata_files = { test = \"t\" }\n\
        doc_to_text = \"{{q}}\"\ndoc_to_target = \"{{a}}\"\ndoc_to_choice = \"c\"\n";

    #[test]
    fn the_score_so_far_is_of_documents_with_all_answers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.toml");
        std::fs::write(&path, TASK).unwrap();
        let mut registry = Registry::default();
        registry.add_path(&path).unwrap();
        let Node::Task(spec) = registry.resolve("t").unwrap().remove(0) else { panic!("a group") };
        let docs = (0..3).map(|i| json!({"q": format!("q{i}"), "a": 1, "c": ["x", "y"]})).collect();
        let built = [build(&spec, &Library::of("t".into(), docs), &Templates::default(), &Options::default()).unwrap().into()];
        let planned = vec![Planned::Pair { pair: Pair::default(), cut: 0 }; 6];
        let plans = [TaskPlan { planned, counts: Counts::default() }];
        let mut progress = Progress::new(Running::new(&built, &plans));
        progress.begin(80);
        for (index, logprob) in [(5, -3.0), (1, -1.0), (4, -2.0), (2, -9.0)] {
            progress.running.pair(index, (logprob, false));
        }
        // Document 2 alone has both answers, and the wrong one is likelier.
        assert_eq!(progress.running.score().unwrap().0, 0.0);
        progress.running.pair(0, (-2.0, false));
        assert_eq!((progress.running.score().unwrap().0, progress.running.count), (0.5, 2));
        progress.round(20, true);
        assert!(progress.line(Duration::from_secs(9)).starts_with("20 of 80 tokens  ETA unknown  score so far 0.5000 ± "));
        progress.round(20, false);
        assert!(progress.line(Duration::from_secs(9)).contains("ETA 18s"), "{}", progress.line(Duration::from_secs(9)));
    }
}

//! Training batches as a pure function of (seed, step): the order is final before the first step.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, anyhow, ensure};

use super::best_fit::BestFit;
use super::dataset::Dataset;
use super::mixture::{Mixture, MixtureState};
use super::order::hash;
use super::source::{Sample, Source};
use crate::error::bad_input;
use crate::recipe::Packing;
use crate::tensor::backend::Batch;
use crate::text::chat::marks;

/// One entry of a recipe's list of data sources.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceSpec {
    /// Shown in errors and metrics; its order in the list, not its name, fixes the shuffle.
    pub name: String,
    /// Share of the samples, relative to the other weights.
    pub weight: f64,
    /// Shards: prefix, `.bin` or `.idx`, read in this order.
    pub paths: Vec<PathBuf>,
    /// Samples of this source that an earlier stage (same seed and sequence length) has used: they are passed over.
    pub first_sample: u64,
    /// How often the source may be gone through, earlier stages included; then its share goes to the others. None = without end.
    pub max_epochs: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderConfig {
    pub seed: u64,
    pub packing: Packing,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a global batch.
    pub batch_sequences: usize,
    /// Tell documents apart: rows carry where their document begins, and the last token of a document (its end-of-document
    /// token) gets no label, since the next token belongs to a document it knows nothing of.
    pub document_mask: bool,
    /// Leave the first token of every document out of the loss, as `document_mask` does too.
    pub eod_mask_loss: bool,
    /// Rows of the model's embedding; an id at or beyond it is refused, naming file and place.
    pub vocab_size: usize,
}

/// Which sample a sequence of a batch shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleId {
    /// Index into the list of sources.
    pub source: usize,
    /// Number of the sample within its source.
    pub number: u64,
}

/// The samples of one source, without end.
#[derive(Debug)]
enum Samples {
    Stream(Source),
    BestFit(BestFit),
}

impl Samples {
    fn dataset(&self) -> &Dataset {
        match self {
            Self::Stream(source) => source.dataset(),
            Self::BestFit(source) => source.dataset(),
        }
    }

    fn read(&self, number: u64, sample: &mut Sample) -> Result<()> {
        match self {
            Self::Stream(source) => source.read(number, sample),
            Self::BestFit(source) => source.read(number, sample),
        }
    }

    /// Whole samples in so many epochs.
    fn within(&self, epochs: f64, seq_len: usize) -> u64 {
        match self {
            Self::Stream(source) => (epochs * source.dataset().num_tokens() as f64 / seq_len as f64) as u64,
            Self::BestFit(source) => (epochs * source.num_windows() as f64) as u64,
        }
    }

    /// Epochs that so many samples come to.
    fn epochs(&self, samples: u64, seq_len: usize) -> f64 {
        match self {
            Self::Stream(source) => samples as f64 * seq_len as f64 / source.dataset().num_tokens() as f64,
            Self::BestFit(source) => samples as f64 / source.num_windows() as f64,
        }
    }
}

#[derive(Debug)]
struct NamedSource {
    name: String,
    first_sample: u64,
    samples: Samples,
}

/// Samples of one step, and the state before and after it.
#[derive(Debug)]
struct Plan {
    step: u64,
    before: MixtureState,
    after: MixtureState,
    samples: Vec<SampleId>,
}

/// Training data of one stage.
///
/// Global sample n is drawn from the source that [`Mixture`] names and is that source's next sample ([`Source`]); the
/// batch of step t is global samples `t * G .. (t + 1) * G`, G = `batch_sequences`. Micro-batches and ranks take slices of
/// it, so that how a batch is cut changes nothing. A step is found from the step before it or from a restored state in
/// constant time, and from anywhere else by replaying a few integers a sample.
#[derive(Debug)]
pub struct Loader {
    config: LoaderConfig,
    mixture: Mixture,
    sources: Vec<NamedSource>,
    plan: Mutex<Arc<Plan>>,
    /// The state from which any later one is found by replay: the beginning, or where weights were changed.
    origin: Mutex<MixtureState>,
}

impl Loader {
    /// Opens every shard. Refuses impossible weights, missing or damaged files, sources without tokens, and sources that
    /// different tokenizers wrote.
    pub fn open(config: LoaderConfig, specs: &[SourceSpec]) -> Result<Self> {
        if config.batch_sequences == 0 {
            return Err(bad_input("a global batch of 0 sequences trains nothing"));
        }
        let mut sources = Vec::with_capacity(specs.len());
        let mut limits = Vec::with_capacity(specs.len());
        for (i, spec) in specs.iter().enumerate() {
            let (seed, seq_len, vocab_size) = (hash(config.seed, &[i as u64]), config.seq_len, config.vocab_size);
            let open = || -> Result<Samples> {
                let dataset = Dataset::open(&spec.paths)?;
                // It looks for sequences of 0 tokens and sources without any.
                let stream = Source::new(dataset, seed, seq_len, vocab_size)?;
                Ok(match config.packing {
                    Packing::Stream => Samples::Stream(stream),
                    Packing::BestFit => Samples::BestFit(BestFit::new(stream.into_dataset(), seed, seq_len, vocab_size)?),
                })
            };
            let samples = open().with_context(|| format!("data source `{}`", spec.name))?;
            if let Samples::BestFit(packed) = &samples
                && packed.too_long() > 0
            {
                tell!(
                    "warning: data source `{}`: {} of {} documents are longer than a sequence of {seq_len} tokens and have no reasoning \
                     that could be left out: they are never shown",
                    spec.name,
                    packed.too_long(),
                    packed.dataset().num_documents()
                );
            }
            limits.push(spec.max_epochs.map(|epochs| samples.within(epochs, seq_len).saturating_sub(spec.first_sample)));
            sources.push(NamedSource { name: spec.name.clone(), first_sample: spec.first_sample, samples });
        }
        let mixture = Mixture::new(&specs.iter().map(|s| s.weight).collect::<Vec<_>>())?.with_limits(limits);
        let mut known = sources.iter().filter_map(|s| Some((&s.name, s.samples.dataset().tokenizer_sha256()?)));
        if let Some((first, sha)) = known.next()
            && let Some((other, _)) = known.find(|(_, s)| *s != sha)
        {
            return Err(bad_input(format!("data sources `{first}` and `{other}` were written with different tokenizers")));
        }
        let start = mixture.start();
        let plan = Plan { step: 0, before: start.clone(), after: start.clone(), samples: Vec::new() };
        Ok(Self { config, mixture, sources, plan: Mutex::new(Arc::new(plan)), origin: Mutex::new(start) })
    }

    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// Names of the sources, in order.
    pub fn source_names(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().map(|s| s.name.as_str())
    }

    /// The data of source `i`: counts, tokenizer, bytes.
    pub fn dataset(&self, i: usize) -> &Dataset {
        self.sources[i].samples.dataset()
    }

    /// Samples after which all sources have been gone through as often as they may; None = without end.
    pub fn ends_at(&self) -> Result<Option<u64>> {
        let plan = self.current()?;
        Ok(self.mixture.left(&plan.before).map(|left| plan.before.samples + left))
    }

    /// Epochs of each source that are begun or done after `step` steps, as a fraction.
    pub fn epochs_at(&self, step: u64) -> Result<Vec<f64>> {
        let state = self.state_at(step)?;
        let drawn = |(s, count): (&NamedSource, &u64)| s.samples.epochs(s.first_sample + count, self.config.seq_len);
        Ok(self.sources.iter().zip(&state.counts).map(drawn).collect())
    }

    /// Sequences `rows` of the global batch of `step`, as a micro-batch.
    ///
    /// `labels[p]` is the token after position p. With `document_mask`, `doc_start[p]` is the position in the sequence where
    /// p's document begins (0 when it began earlier), and the last token of a document has label -1; without it,
    /// `doc_start` is empty, and every row has a label unless `eod_mask_loss` takes those same labels away. Where a shard has a mask,
    /// tokens that are not to be learnt are nobody's label. Rows of packed windows that hold nothing are not `valid`.
    pub fn batch(&self, step: u64, rows: Range<usize>) -> Result<Batch> {
        let plan = self.plan(step)?;
        ensure!(
            rows.start <= rows.end && rows.end <= plan.samples.len(),
            "sequences {rows:?} of a batch of {}",
            plan.samples.len()
        );
        let seq = self.config.seq_len;
        let mut batch = Batch { batch: rows.len(), seq, ..Batch::default() };
        batch.ids.reserve(rows.len() * seq);
        batch.labels.reserve(rows.len() * seq);
        let borders = Borders { mask: self.config.document_mask, first_token_loss: !self.config.eod_mask_loss };
        let mut sample = Sample::default();
        for id in &plan.samples[rows] {
            let from = &self.sources[id.source];
            let read = from.samples.read(id.number, &mut sample);
            read.with_context(|| format!("reading sample {} of data source `{}` for step {step}", id.number, from.name))?;
            append(&mut batch, &sample, borders);
        }
        Ok(batch)
    }

    /// Which samples make up the global batch of `step`, in order.
    pub fn samples(&self, step: u64) -> Result<Vec<SampleId>> {
        Ok(self.plan(step)?.samples.clone())
    }

    /// Samples drawn from each source in the steps before `step`: what a checkpoint stores.
    pub fn state_at(&self, step: u64) -> Result<MixtureState> {
        let plan = self.current()?;
        let samples = self.samples_before(step)?;
        if let Some(state) = [&plan.before, &plan.after].into_iter().find(|state| state.samples == samples) {
            return Ok(state.clone());
        }
        let mut state = self.origin.lock().map_err(|_| poisoned())?.clone();
        ensure!(state.samples <= samples, "step {step} lies before the weights of the data sources were changed");
        self.mixture.advance(&mut state, samples).ok_or_else(|| bad_input(USED_UP))?;
        Ok(state)
    }

    /// Goes on from a stored state without replaying. The state is believed, after a check that it can be one of this
    /// loader's; [`Loader::fingerprint`] and an equal recipe make sure that it is. Weights may be others than the state was reached
    /// with: each source goes on with its next sample, and the shares are the new ones from here on. True if that is so.
    pub fn restore(&self, step: u64, state: &MixtureState) -> Result<bool> {
        let samples = self.samples_before(step)?;
        let sum: u64 = state.counts.iter().sum();
        if state.counts.len() != self.sources.len() || state.samples != samples || sum != samples || !state.is_sound() {
            return Err(bad_input(format!(
                "the data state of the checkpoint does not fit the recipe: it has {} sources and {} samples ({sum} by its counts), \
                 the recipe {} sources and {samples} samples before step {step}; were sources or the batch size changed?",
                state.counts.len(),
                state.samples,
                self.sources.len()
            )));
        }
        let mut state = state.clone();
        let changed = self.mixture.adopt(&mut state);
        *self.origin.lock().map_err(|_| poisoned())? = self.mixture.origin(&state);
        // Drawn when it is asked for: a run that has ended asks for nothing.
        let plan = Plan { step, before: state.clone(), after: state, samples: Vec::new() };
        *self.plan.lock().map_err(|_| poisoned())? = Arc::new(plan);
        Ok(changed)
    }

    /// Hash of everything but the seed that fixes what training reads: the shards of every source in order (sizes, indices and
    /// a sample of the tokens, not paths). The same data under other paths has the same fingerprint. Reads every index once.
    pub fn fingerprint(&self) -> String {
        let mut hash = blake3::Hasher::new();
        for source in &self.sources {
            hash.update(source.samples.dataset().fingerprint().as_bytes());
        }
        hash.finalize().to_hex().to_string()
    }

    fn samples_before(&self, step: u64) -> Result<u64> {
        let samples = step.checked_mul(self.config.batch_sequences as u64);
        samples.ok_or_else(|| anyhow!("step {step} lies beyond 2^64 samples"))
    }

    fn current(&self) -> Result<Arc<Plan>> {
        Ok(self.plan.lock().map_err(|_| poisoned())?.clone())
    }

    fn plan(&self, step: u64) -> Result<Arc<Plan>> {
        let current = self.current()?;
        if current.step == step && !current.samples.is_empty() {
            return Ok(current);
        }
        let plan = Arc::new(self.make_plan(step, self.state_at(step)?)?);
        *self.plan.lock().map_err(|_| poisoned())? = plan.clone();
        Ok(plan)
    }

    fn make_plan(&self, step: u64, before: MixtureState) -> Result<Plan> {
        let mut after = before.clone();
        let mut take = || {
            let (source, count) = self.mixture.take(&mut after)?;
            Some(SampleId { source, number: self.sources[source].first_sample + count })
        };
        let samples: Option<Vec<SampleId>> = (0..self.config.batch_sequences).map(|_| take()).collect();
        Ok(Plan { step, before, after, samples: samples.ok_or_else(|| bad_input(USED_UP))? })
    }
}

const USED_UP: &str =
    "every data source has been gone through as often as its `max_epochs` allows: raise it, add data, or end the run earlier";

fn poisoned() -> anyhow::Error {
    anyhow!("another thread failed while it read training data")
}

/// What a border between two documents in a sequence means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Borders {
    /// Rows carry where their document begins.
    pub mask: bool,
    /// Whether a document's first token has a loss. Never with `mask`: the row before it knows nothing of that document.
    pub first_token_loss: bool,
}

impl Borders {
    /// Whether borders mean anything at all.
    pub(super) fn matter(self) -> bool {
        self.mask || !self.first_token_loss
    }
}

/// Appends one sequence to `batch`: a sample of one id more than a row.
pub(super) fn append(batch: &mut Batch, sample: &Sample, borders: Borders) {
    let Sample { ids, starts, marks: known, padding } = sample;
    let seq = batch.seq;
    let first = batch.labels.len();
    batch.ids.extend(&ids[..seq]);
    batch.labels.extend(ids[1..=seq].iter().map(|id| i64::from(*id)));
    let labels = &mut batch.labels[first..];
    for (label, _) in labels.iter_mut().zip(known.iter().skip(1)).filter(|(_, mark)| **mark & marks::LEARN == 0) {
        *label = -1;
    }
    let real = ids.len() - padding;
    if *padding > 0 {
        // The last real token has no successor.
        labels[real.saturating_sub(1)..].fill(-1);
    }
    if real < seq || !batch.valid.is_empty() {
        batch.valid.resize(first, true);
        batch.valid.extend((0..seq).map(|row| row < real));
    }
    if !borders.matter() {
        return;
    }
    let mut from = 0;
    let padded = (real < seq).then_some(real as u32);
    for begin in starts.iter().copied().chain(padded).filter(|s| *s > 0) {
        // The token before a document's first belongs to another document.
        batch.labels[first + begin as usize - 1] = -1;
        if borders.mask {
            let to = (begin as usize).min(seq);
            batch.doc_start.resize(first + to, from);
            from = begin;
        }
    }
    if borders.mask {
        batch.doc_start.resize(first + seq, from);
    }
}

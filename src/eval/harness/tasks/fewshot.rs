//! Choice of few-shot examples, by lm-eval's samplers.

use anyhow::Result;
use serde_json::Value;

use crate::error::bad_input;
use crate::eval::harness::python::random::Random;

/// How examples are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sampler {
    /// At random, from one generator a task that carries on from document to document.
    #[default]
    Random,
    /// The first ones.
    FirstN,
}

/// The pool of a task, and the state of its generator.
pub struct Shots<'a> {
    pub task: &'a str,
    pub sampler: Sampler,
    pub pool: Vec<&'a Value>,
    pub random: Random,
}

impl<'a> Shots<'a> {
    /// `k` examples. `without` is the document that must not be among them: under lm-eval's rule k + 1 are drawn and it is dropped.
    ///
    /// Errors: the pool is too small.
    pub fn choose(&mut self, k: usize, without: Option<&Value>) -> Result<Vec<&'a Value>> {
        if k == 0 {
            return Ok(Vec::new());
        }
        let others = |pool: &[&'a Value]| pool.iter().copied().filter(|d| Some(*d) != without).collect::<Vec<_>>();
        if self.sampler == Sampler::FirstN {
            let pool = others(&self.pool);
            self.need(k, pool.len())?;
            return Ok(pool[..k].to_vec());
        }
        let Some(_) = without else {
            self.need(k, self.pool.len())?;
            return Ok(self.random.sample(self.pool.len(), k).into_iter().map(|i| self.pool[i]).collect());
        };
        self.need(k + 1, self.pool.len())?;
        let drawn: Vec<_> = self.random.sample(self.pool.len(), k + 1).into_iter().map(|i| self.pool[i]).collect();
        let mut chosen = others(&drawn);
        chosen.truncate(k);
        if chosen.len() < k {
            let pool = others(&self.pool);
            self.need(k, pool.len())?;
            chosen = self.random.sample(pool.len(), k).into_iter().map(|i| pool[i]).collect();
        }
        Ok(chosen)
    }

    /// `k` examples from the pool without those that `excluded` names, whatever the sampler's own rule.
    pub fn choose_clean(&mut self, k: usize, excluded: impl Fn(&Value) -> bool) -> Result<Vec<&'a Value>> {
        let pool: Vec<_> = self.pool.iter().copied().filter(|d| !excluded(d)).collect();
        self.need(k, pool.len())?;
        Ok(match self.sampler {
            Sampler::FirstN => pool[..k].to_vec(),
            Sampler::Random => self.random.sample(pool.len(), k).into_iter().map(|i| pool[i]).collect(),
        })
    }

    fn need(&self, k: usize, have: usize) -> Result<()> {
        if k <= have {
            return Ok(());
        }
        Err(bad_input(format!("{}: {k} few-shot examples are needed to choose from, the pool has {have}", self.task)))
    }
}

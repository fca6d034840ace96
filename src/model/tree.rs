//! Decoding of sequences that share beginnings: one pool of keys and values and one of CCA states for all of them.

use anyhow::Result;

use super::config::ModelConfig;
use crate::tensor::backend::{Backend, Halo};
use crate::tensor::tree::{Before, Tree};

/// The state that stands before every sequence: zeros. Nothing is ever kept there.
pub const START: usize = 0;

/// One batch of rows of sequences that share beginnings, and what the pools keep of it.
#[derive(Debug, Clone, Default)]
pub struct TreeStep {
    /// Token of each row.
    pub ids: Vec<u32>,
    /// Histories (`Before::Halo(2 s + 1)` and `Before::Halo(2 s)` are state `s`) and keys.
    pub tree: Tree,
    /// Row of the pool that gets each row's key and value.
    pub keys_to: Vec<u32>,
    pub keep: Vec<KeptState>,
}

/// What CCA must know of the last two tokens, to go on from there later.
#[derive(Debug, Clone, Copy)]
pub struct KeptState {
    pub state: usize,
    /// Row of the batch.
    pub last: usize,
    /// The one before.
    pub before: Before,
}

/// Pools of all layers.
pub struct TreeCache<B: Backend> {
    pub(super) layers: Vec<TreeLayerCache<B>>,
    rows: usize,
    states: usize,
}

/// Of one layer: `[rows, kv_dim]` each of keys and values, and the states as a halo.
pub struct TreeLayerCache<B: Backend> {
    pub(super) k: B::Buf,
    pub(super) v: B::Buf,
    pub(super) states: Halo<B::Buf>,
}

fn states<B: Backend>(b: &B, config: &ModelConfig, n: usize) -> Result<Halo<B::Buf>> {
    let (q, kv) = (config.q_dim(), config.kv_dim());
    Ok(Halo { q: b.zeros(2 * n, q)?, k: b.zeros(2 * n, kv)?, v_delayed: b.zeros(n, kv / 2)? })
}

impl<B: Backend> TreeCache<B> {
    /// Pools for `rows` tokens and `states` states, [`START`] among them.
    pub fn new(b: &B, config: &ModelConfig, rows: usize, states_wanted: usize) -> Result<Self> {
        let kv = config.kv_dim();
        let n = states_wanted.max(START + 1);
        let layer = |_| Ok(TreeLayerCache { k: b.zeros(rows, kv)?, v: b.zeros(rows, kv)?, states: states(b, config, n)? });
        Ok(Self { layers: (0..config.num_blocks()).map(layer).collect::<Result<_>>()?, rows, states: n })
    }

    /// Makes room for `n` states; what is kept stays.
    pub fn reserve_states(&mut self, b: &B, config: &ModelConfig, n: usize) -> Result<()> {
        if n <= self.states {
            return Ok(());
        }
        let old: Vec<u32> = (0..2 * self.states as u32).collect();
        for layer in &mut self.layers {
            let mut more = states(b, config, n)?;
            b.scatter_rows(&layer.states.q, &old, &mut more.q)?;
            b.scatter_rows(&layer.states.k, &old, &mut more.k)?;
            b.scatter_rows(&layer.states.v_delayed, &old[..self.states], &mut more.v_delayed)?;
            layer.states = more;
        }
        self.states = n;
        Ok(())
    }

    /// Tokens whose keys and values fit.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// States that fit.
    pub fn states(&self) -> usize {
        self.states
    }
}

/// Bytes (f32, all layers) of one token's keys and values, and of one state.
pub fn cache_bytes(config: &ModelConfig) -> (usize, usize) {
    let (q, kv, layers) = (config.q_dim(), config.kv_dim(), config.num_blocks());
    (layers * 2 * kv * size_of::<f32>(), layers * (2 * (q + kv) + kv / 2) * size_of::<f32>())
}

/// Where the rows of kept states come from and go to, for pools of two rows a state and of one.
pub(super) struct Moves {
    from_batch: Vec<u32>,
    batch_to: Vec<u32>,
    from_pool: Vec<u32>,
    pool_to: Vec<u32>,
    last: Vec<u32>,
    state: Vec<u32>,
}

impl Moves {
    pub(super) fn new(keep: &[KeptState]) -> Self {
        let last: Vec<u32> = keep.iter().map(|k| k.last as u32).collect();
        let state: Vec<u32> = keep.iter().map(|k| k.state as u32).collect();
        let mut moves = Self {
            from_batch: last.clone(),
            batch_to: state.iter().map(|s| 2 * s + 1).collect(),
            from_pool: Vec::new(),
            pool_to: Vec::new(),
            last,
            state,
        };
        for k in keep {
            let (from, to, place) = match k.before {
                Before::Row(t) => (&mut moves.from_batch, &mut moves.batch_to, t),
                Before::Halo(at) => (&mut moves.from_pool, &mut moves.pool_to, at),
            };
            from.push(place as u32);
            to.push(2 * k.state as u32);
        }
        moves
    }

    /// Keeps rows of `x` and of the pool in the pool.
    pub(super) fn two<B: Backend>(&self, b: &B, x: &B::Buf, pool: &mut B::Buf) -> Result<()> {
        // Before they are written over.
        let older = b.gather_rows(pool, &self.from_pool)?;
        b.scatter_rows(&b.gather_rows(x, &self.from_batch)?, &self.batch_to, pool)?;
        b.scatter_rows(&older, &self.pool_to, pool)
    }

    /// Keeps the last rows alone.
    pub(super) fn one<B: Backend>(&self, b: &B, x: &B::Buf, pool: &mut B::Buf) -> Result<()> {
        b.scatter_rows(&b.gather_rows(x, &self.last)?, &self.state, pool)
    }
}

//! ZeRO-1: who updates which parameter, and the buckets that gradients and updated weights travel in.
//!
//! Newton-Schulz needs whole matrices, so a Muon matrix has one owner. Owners are found by longest processing time: matrices by
//! falling cost, each to the least loaded rank of those that hold it. The load is carried from matrix to matrix over the whole model, not
//! begun anew in each bucket, so that one rank does not wait for another in every bucket. What AdamW updates is cut
//! into blocks of rows; each bucket deals its blocks out evenly.
//!
//! Blocks depend on the shape of the model alone: sums over them are the same numbers in every layout.

use std::ops::Range;

use super::group::even_pieces;
use super::mesh::Layout;
use crate::model::ParamTable;
use crate::model::params::{OptimKind, ParamId, ParamSpec};
use crate::tensor::work;

/// Numbers of a block of rows, at least (a row is never cut).
const BLOCK_NUMBERS: usize = 1 << 16;

/// Rows of one parameter that are updated together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    pub param: ParamId,
    pub rows: Range<usize>,
}

/// Blocks of rows of a parameter: one for a Muon matrix, none for what has no gradient.
pub fn blocks_of(spec: &ParamSpec) -> impl Iterator<Item = Range<usize>> {
    let [rows, cols] = spec.matrix_shape();
    let step = match spec.optim {
        OptimKind::Muon => rows,
        _ => (BLOCK_NUMBERS / cols).max(1),
    };
    let rows = if spec.optim == OptimKind::Balance { 0 } else { rows };
    (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
}

/// Ranks that a bucket's gradients are summed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// All: everything but experts.
    World,
    /// Those with the same experts.
    ExpertData,
}

/// Gradients (or weights) that travel together.
#[derive(Debug, Clone)]
pub struct Bucket {
    pub shared: Shared,
    /// In the order they lie in the buffer: those of the group's first member, of its second, ...
    pub units: Vec<Unit>,
    /// Numbers of each member in the buffer.
    pub pieces: Vec<Range<usize>>,
    /// Backward stages after which its gradients are complete: block `num_blocks - 1 - stage` was the last one, or, at
    /// `num_blocks`, all of the backward.
    pub stage: usize,
}

impl Bucket {
    /// Numbers in the buffer.
    pub fn len(&self) -> usize {
        self.pieces.last().map_or(0, |p| p.end)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What one rank holds and updates.
#[derive(Debug, Clone, Default)]
pub struct Ownership {
    /// By parameter: rows that this rank updates, rising and not touching.
    rows: Vec<Vec<Range<usize>>>,
    /// By parameter: whether its weights are here at all.
    held: Vec<bool>,
}

impl Ownership {
    /// Of a rank that does everything.
    pub fn whole(table: &ParamTable) -> Self {
        let rows = table.specs.iter().map(|s| match s.optim {
            OptimKind::Balance => Vec::new(),
            _ => std::iter::once(0..s.matrix_shape()[0]).collect(),
        });
        Self { rows: rows.collect(), held: vec![true; table.specs.len()] }
    }

    pub fn rows(&self, param: ParamId) -> &[Range<usize>] {
        &self.rows[param]
    }

    pub fn num_rows(&self, param: ParamId) -> usize {
        self.rows[param].iter().map(Range::len).sum()
    }

    pub fn holds(&self, param: ParamId) -> bool {
        self.held[param]
    }

    /// Whether rows `block` of a parameter are among those that this rank updates.
    pub fn owns(&self, param: ParamId, block: &Range<usize>) -> bool {
        self.rows[param].iter().any(|own| own.start <= block.start && block.end <= own.end)
    }
}

/// The division of all parameters among ranks.
pub struct Division {
    layout: Layout,
    num_experts: usize,
    /// By parameter: owner of each Muon matrix, a global rank.
    owner: Vec<Option<usize>>,
}

impl Division {
    pub fn new(table: &ParamTable, layout: Layout, num_experts: usize) -> Self {
        let mut division = Self { layout, num_experts, owner: vec![None; table.specs.len()] };
        let cost = |spec: &ParamSpec| {
            let [rows, cols] = spec.matrix_shape();
            work::newton_schulz_flops(rows, cols, 1)
        };
        let mut matrices: Vec<ParamId> = (0..table.specs.len()).filter(|id| table.specs[*id].optim == OptimKind::Muon).collect();
        matrices.sort_by(|a, b| {
            let (a, b) = (&table.specs[*a], &table.specs[*b]);
            cost(b).total_cmp(&cost(a)).then_with(|| a.name.cmp(&b.name))
        });
        let mut load = vec![0.0; layout.world];
        for id in matrices {
            let spec = &table.specs[id];
            let least = division.holders(spec).min_by(|a, b| f64::total_cmp(&load[*a], &load[*b]).then(a.cmp(b)));
            let owner = least.expect("every parameter is held by some rank");
            load[owner] += cost(spec);
            division.owner[id] = Some(owner);
        }
        division
    }

    /// Ranks that hold a parameter's weights.
    pub fn holders(&self, spec: &ParamSpec) -> impl Iterator<Item = usize> + use<> {
        let place = spec.expert.map(|e| self.place_of_expert(e));
        let ep = self.layout.ep;
        (0..self.layout.world).filter(move |rank| place.is_none_or(|place| rank % ep == place))
    }

    /// Ranks that share buckets of a kind with `rank`.
    fn members(&self, shared: Shared, rank: usize) -> Vec<usize> {
        match shared {
            Shared::World => (0..self.layout.world).collect(),
            Shared::ExpertData => self.layout.expert_data_group(rank),
        }
    }

    fn place_of_expert(&self, expert: usize) -> usize {
        let pieces = even_pieces(self.num_experts, self.layout.ep);
        pieces.iter().position(|p| p.contains(&expert)).expect("pieces cover all experts")
    }

    /// The buckets of `rank`, in the order in which their gradients become complete. About `bucket_bytes` each.
    pub fn buckets(&self, table: &ParamTable, rank: usize, bucket_bytes: usize) -> Vec<Bucket> {
        let last = table.blocks.len();
        let stage = |id: ParamId| match table.specs[id].block {
            // A sub-layer's norm gets its gradient in the backward of the sub-layer before.
            Some(block) if table.blocks[block].attention.norm != id => last - 1 - block,
            _ => last,
        };
        let mut order: Vec<ParamId> = (0..table.specs.len()).collect();
        order.sort_by_key(|id| (stage(*id), *id));
        let mut open: [(Vec<Unit>, usize); 2] = Default::default();
        let mut buckets = Vec::new();
        let mut close = |kind: usize, units: &mut Vec<Unit>| {
            if !units.is_empty() {
                let shared = [Shared::World, Shared::ExpertData][kind];
                let stage = units.iter().map(|u| stage(u.param)).max().unwrap_or(last);
                buckets.push(self.bucket(table, shared, &self.members(shared, rank), std::mem::take(units), stage));
            }
        };
        for id in order {
            let spec = &table.specs[id];
            if !self.holders(spec).any(|holder| holder == rank) {
                continue;
            }
            let kind = usize::from(spec.expert.is_some() && self.layout.ep > 1);
            for rows in blocks_of(spec) {
                let bytes = rows.len() * spec.matrix_shape()[1] * size_of::<f32>();
                let (units, filled) = &mut open[kind];
                if *filled > 0 && *filled + bytes > bucket_bytes {
                    close(kind, units);
                    *filled = 0;
                }
                units.push(Unit { param: id, rows });
                *filled += bytes;
            }
        }
        for (kind, (mut units, _)) in open.into_iter().enumerate() {
            close(kind, &mut units);
        }
        buckets.sort_by_key(|b| b.stage);
        buckets
    }

    fn bucket(&self, table: &ParamTable, shared: Shared, members: &[usize], units: Vec<Unit>, stage: usize) -> Bucket {
        let numbers = |u: &Unit| u.rows.len() * table.specs[u.param].matrix_shape()[1];
        let by_rows = |u: &Unit| self.owner[u.param].is_none();
        let total: usize = units.iter().filter(|u| by_rows(u)).map(numbers).sum();
        let mut dealt = 0;
        let mut placed: Vec<(usize, Unit)> = Vec::with_capacity(units.len());
        for unit in units {
            let member = match self.owner[unit.param] {
                Some(owner) => members.iter().position(|m| *m == owner).expect("an owner holds what it owns"),
                None => {
                    let member = dealt * members.len() / total.max(1);
                    dealt += numbers(&unit);
                    member
                }
            };
            placed.push((member, unit));
        }
        placed.sort_by_key(|(member, _)| *member);
        let mut at = 0;
        let pieces = (0..members.len()).map(|m| {
            let len: usize = placed.iter().filter(|(member, _)| *member == m).map(|(_, u)| numbers(u)).sum();
            at += len;
            at - len..at
        });
        let pieces = pieces.collect();
        Bucket { shared, units: placed.into_iter().map(|(_, unit)| unit).collect(), pieces, stage }
    }

    /// What `rank` holds and updates, when its buckets are these.
    pub fn ownership(&self, table: &ParamTable, rank: usize, buckets: &[Bucket]) -> Ownership {
        let mut rows: Vec<Vec<Range<usize>>> = vec![Vec::new(); table.specs.len()];
        for bucket in buckets {
            let own =
                self.members(bucket.shared, rank).iter().position(|m| *m == rank).map_or(0..0, |i| bucket.pieces[i].clone());
            let mut at = 0;
            for unit in &bucket.units {
                if own.contains(&at) {
                    rows[unit.param].push(unit.rows.clone());
                }
                at += unit.rows.len() * table.specs[unit.param].matrix_shape()[1];
            }
        }
        rows.iter_mut().for_each(join);
        let held = table.specs.iter().map(|s| self.holders(s).any(|holder| holder == rank)).collect();
        Ownership { rows, held }
    }
}

/// The buckets of `rank`, and what it holds and updates.
pub fn plan(
    table: &ParamTable,
    layout: Layout,
    num_experts: usize,
    rank: usize,
    bucket_bytes: usize,
) -> (Vec<Bucket>, Ownership) {
    let division = Division::new(table, layout, num_experts);
    let buckets = division.buckets(table, rank, bucket_bytes);
    let ownership = division.ownership(table, rank, &buckets);
    (buckets, ownership)
}

/// Ranges that touch become one.
fn join(ranges: &mut Vec<Range<usize>>) {
    ranges.sort_by_key(|r| r.start);
    let mut out: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges.drain(..) {
        match out.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => out.push(range),
        }
    }
    *ranges = out;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use crate::model::presets;

    fn config() -> ModelConfig {
        presets::by_name("zaya1-base").expect("a preset")
    }

    /// Every row of every parameter is updated by exactly one of those that hold it.
    #[test]
    fn each_row_has_one_owner_in_every_layout() {
        let mut cfg = config();
        (cfg.hidden_size, cfg.vocab_size, cfg.num_experts) = (96, 5000, 5);
        let table = ParamTable::new(&cfg);
        for (world, ep) in [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3)] {
            let layout = Layout { world, cp: 1, ep };
            for bucket_bytes in [1, 1 << 20, usize::MAX] {
                let own: Vec<Ownership> =
                    (0..world).map(|rank| plan(&table, layout, cfg.num_experts, rank, bucket_bytes).1).collect();
                for (id, spec) in table.specs.iter().enumerate() {
                    let rows = if spec.optim == OptimKind::Balance { 0 } else { spec.matrix_shape()[0] };
                    let mut count = vec![0; rows];
                    for own in &own {
                        assert!(own.num_rows(id) == 0 || own.holds(id), "{}", spec.name);
                        own.rows(id).iter().cloned().flatten().for_each(|row| count[row] += 1);
                    }
                    assert!(count.iter().all(|n| *n == 1), "{} in {layout:?}: {count:?}", spec.name);
                    if spec.optim == OptimKind::Muon {
                        assert!(own.iter().any(|o| o.num_rows(id) == rows), "{} is owned whole", spec.name);
                    }
                }
            }
        }
    }

    #[test]
    fn newton_schulz_is_spread_evenly_and_buckets_come_in_backward_order() {
        let cfg = config();
        let table = ParamTable::new(&cfg);
        let layout = Layout { world: 64, cp: 1, ep: 1 };
        let division = Division::new(&table, layout, cfg.num_experts);
        let mut load = vec![0.0; 64];
        for (id, owner) in division.owner.iter().enumerate() {
            let [rows, cols] = table.specs[id].matrix_shape();
            owner.iter().for_each(|owner| load[*owner] += work::newton_schulz_flops(rows, cols, 1));
        }
        let (max, mean) = (load.iter().copied().fold(0.0, f64::max), load.iter().sum::<f64>() / 64.0);
        assert!(max < 1.1 * mean, "{max} against {mean}");
        let buckets = division.buckets(&table, 5, 16 << 20);
        assert!(buckets.is_sorted_by_key(|b| b.stage));
        assert!(buckets.iter().all(|b| b.len() * 4 <= 16 << 20 || b.units.len() == 1));
        let numbers: usize = buckets.iter().map(Bucket::len).sum();
        let trained = table.specs.iter().filter(|s| s.optim != OptimKind::Balance).map(ParamSpec::numel).sum::<usize>();
        assert_eq!(numbers, trained);
    }
}

//! Muon (spec 3.3): `kernels/newton_schulz.zk.cpp`, many matrices a launch. Products of Newton-Schulz work on bf16 numbers.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};

use super::product::{KeptHalf, Places, TILE, WORK_ITEMS};
use super::{Buf, Hip, Kind, int};
use crate::tensor::backend::{MuonItem, MuonStep};

/// Numbers of an elementwise workgroup.
const CHUNK: usize = 16 * WORK_ITEMS as usize;
/// Working memory of the matrices that are updated together, in bytes, unless one alone needs more. Ten matrices of 4096 x 2048 keep an
/// MI300X at work and need 1 GiB.
const WORK_BYTES: usize = 1 << 30;

/// One matrix, or one block of rows that is orthogonalised apart. Addresses on the device.
#[derive(Clone, Copy)]
struct Job {
    weight: usize,
    grad: usize,
    momentum: usize,
    /// The bf16 copy of the weight.
    half: Option<usize>,
    rows: usize,
    cols: usize,
}

impl Job {
    fn len(&self) -> usize {
        self.rows * self.cols
    }

    fn short(&self) -> usize {
        self.rows.min(self.cols)
    }

    fn is_wide(&self) -> bool {
        self.rows < self.cols
    }

    /// Where its working memory begins that has `used` f32 numbers before it, and where it ends: X in f32 and twice in bf16, A in both,
    /// B in bf16.
    fn work(&self, used: usize) -> ([usize; 6], usize) {
        let mut end = used;
        let mut take = |numbers: usize, kind: Kind| {
            let begin = end;
            end += (numbers * kind.bytes()).next_multiple_of(64) / Kind::F32.bytes();
            begin
        };
        let (x, a) = (self.len(), self.short() * self.short());
        let kinds = [(x, Kind::F32), (x, Kind::Bf16), (x, Kind::Bf16), (a, Kind::F32), (a, Kind::Bf16), (a, Kind::Bf16)];
        (kinds.map(|(numbers, kind)| take(numbers, kind)), end)
    }
}

/// One update of many matrices.
pub fn update(hip: &Hip, items: &mut [MuonItem<'_, Buf>], step: MuonStep) -> Result<()> {
    let mut jobs = Vec::new();
    let mut halves = Vec::with_capacity(items.len());
    for item in items.iter_mut() {
        check(item)?;
        let mut half = KeptHalf::take(item.weight);
        let half_at = half.at_mut() as usize;
        let (rows, cols) = (item.weight.rows() / item.row_blocks, item.weight.cols());
        let (weight, grad, momentum) = (item.weight.at_mut() as usize, item.grad.at() as usize, item.momentum.at_mut() as usize);
        for begin in (0..item.row_blocks).map(|block| block * rows * cols).filter(|_| rows * cols > 0) {
            let [f32s, halves] = [Kind::F32, Kind::Bf16].map(|kind| begin * kind.bytes());
            let half = (half_at != 0).then_some(half_at + halves);
            jobs.push(Job { weight: weight + f32s, grad: grad + f32s, momentum: momentum + f32s, half, rows, cols });
        }
        halves.push(half);
    }
    let mut rest = &jobs[..];
    while !rest.is_empty() {
        let mut used = 0;
        let mut fits = |job: &Job| {
            used = job.work(used).1;
            used * Kind::F32.bytes() <= WORK_BYTES
        };
        let count = rest.iter().take_while(|job| fits(job)).count().max(1);
        let (now, later) = rest.split_at(count);
        update_together(hip, now, step)?;
        rest = later;
    }
    halves.into_iter().zip(items).try_for_each(|(half, item)| half.put_back(item.weight))
}

fn check(item: &MuonItem<'_, Buf>) -> Result<()> {
    let shape = |x: &Buf| (x.rows(), x.cols(), x.kind());
    let of_weight = shape(item.weight);
    ensure!(
        of_weight.2 == Kind::F32 && shape(item.grad) == of_weight && shape(item.momentum) == of_weight,
        "weight {of_weight:?}, gradient {:?} and momentum {:?} are to be f32 and of one shape",
        shape(item.grad),
        shape(item.momentum)
    );
    ensure!(
        item.row_blocks > 0 && of_weight.0.is_multiple_of(item.row_blocks),
        "{} rows in {} equal blocks",
        of_weight.0,
        item.row_blocks
    );
    Ok(())
}

/// Workgroups of a launch, and where each matrix's begin: i32 `[matrices + 1]`.
struct Grid {
    workgroups: usize,
    first: Arc<Buf>,
}

impl Grid {
    /// `parts` of each matrix.
    fn new(hip: &Hip, jobs: &[Job], parts: impl Fn(&Job) -> usize) -> Result<Self> {
        let mut first = vec![0];
        for job in jobs {
            first.push(first[first.len() - 1] + int(parts(job)));
        }
        Ok(Self { workgroups: first[jobs.len()] as usize, first: hip.inner.products.tables.get(hip, &first)? })
    }
}

/// Where numbers of each matrix begin from one address on.
fn places(jobs: &[Job], of: impl Fn(&Job) -> Option<usize>, kind: Kind) -> (*mut f32, BTreeMap<usize, i64>) {
    let (with, addresses): (Vec<_>, Vec<_>) = jobs.iter().enumerate().filter_map(|(i, job)| Some((i, of(job)?))).unzip();
    let Places { base, offsets } = Places::of(&addresses, kind);
    (base, with.into_iter().zip(offsets).collect())
}

fn update_together(hip: &Hip, jobs: &[Job], step: MuonStep) -> Result<()> {
    let (weights, weight) = places(jobs, |job| Some(job.weight), Kind::F32);
    let (gradients, gradient) = places(jobs, |job| Some(job.grad), Kind::F32);
    let (momenta, momentum) = places(jobs, |job| Some(job.momentum), Kind::F32);
    let (halves, half) = places(jobs, |job| job.half, Kind::Bf16);
    // As `struct Matrix` of the kernels: ten 64-bit numbers and two of 32 bits.
    let (mut table, mut used) = (Vec::with_capacity(11 * jobs.len()), 0);
    for (i, job) in jobs.iter().enumerate() {
        let (work, end) = job.work(used);
        used = end;
        table.extend([weight[&i], gradient[&i], momentum[&i], half.get(&i).copied().unwrap_or(-1)]);
        table.extend(work.map(|at| at as i64));
        table.push(job.rows as i64 | (job.cols as i64) << 32);
    }
    let table = hip.inner.products.tables.get(hip, &table)?;
    let mut work = hip.f32s(1, used)?;
    let work = work.at_mut();
    let count = int(jobs.len());

    let tiles = |n: usize| n.div_ceil(TILE);
    // Tiles on and above the diagonal.
    let pairs = |job: &Job| tiles(job.short()) * (tiles(job.short()) + 1) / 2;
    let all = |job: &Job| tiles(job.rows) * tiles(job.cols);
    let chunks = Grid::new(hip, jobs, |job| job.len().div_ceil(CHUNK))?;
    let gram_wide = Grid::new(hip, jobs, |job| if job.is_wide() { pairs(job) } else { 0 })?;
    let gram_tall = Grid::new(hip, jobs, |job| if job.is_wide() { 0 } else { pairs(job) })?;
    let square = Grid::new(hip, jobs, pairs)?;
    let apply_wide = Grid::new(hip, jobs, |job| if job.is_wide() { all(job) } else { 0 })?;
    let apply_tall = Grid::new(hip, jobs, |job| if job.is_wide() { 0 } else { all(job) })?;

    // Two f32 for each f64.
    let (mut squares, mut inverse) = (hip.f32s(chunks.workgroups, 2)?, hip.f32s(1, jobs.len())?);
    launch!(
        hip, "muon_mix", [chunks.workgroups], WORK_ITEMS;
        table.at(), chunks.first.at(), gradients, momenta, work, squares.at_mut(), count, step.momentum, step.grad_scale,
    )?;
    launch!(hip, "muon_norm", [jobs.len()], WORK_ITEMS; chunks.first.at(), squares.at(), inverse.at_mut())?;
    launch!(
        hip, "muon_scale_bf16", [chunks.workgroups], WORK_ITEMS;
        table.at(), chunks.first.at(), inverse.at(), work, count,
    )?;
    for i in 0..step.ns_steps {
        // The operand X that a step reads; it writes the other one.
        let from = i32::from(i % 2 == 1);
        let product =
            |name, grid: &Grid| launch!(hip, name, [grid.workgroups], WORK_ITEMS; table.at(), grid.first.at(), work, count, from);
        product("ns_gram_wide_bf16", &gram_wide)?;
        product("ns_gram_tall_bf16", &gram_tall)?;
        launch!(hip, "ns_square_bf16", [square.workgroups], WORK_ITEMS; table.at(), square.first.at(), work, count)?;
        product("ns_apply_wide_bf16", &apply_wide)?;
        product("ns_apply_tall_bf16", &apply_tall)?;
    }
    // The f32 X is at one place, however many steps there were.
    let place = 0i32;
    launch!(
        hip, "muon_update", [chunks.workgroups], WORK_ITEMS;
        table.at(), chunks.first.at(), work.cast_const(), weights, halves, count, place, step.lr, step.weight_decay,
    )
}

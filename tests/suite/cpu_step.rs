//! A whole step of the CPU backend: working memory as planned, nothing allocated on the way, recomputation without a changed bit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use zaya::model::config::ModelConfig;
use zaya::model::init::initial_values;
use zaya::model::presets::bench_15m;
use zaya::model::stack::Recompute;
use zaya::model::{Model, ParamTable};
use zaya::optim::balance::{BalanceConfig, Rule};
use zaya::optim::update::OptimizerConfig;
use zaya::parallel::Alone;
use zaya::tensor::Backend;
use zaya::tensor::backend::{Batch, Precision};
use zaya::tensor::cpu::{Cpu, Packing};
use zaya::train::backend::Step;
use zaya::train::engine::Native;
use zaya::train::state::TrainState;
use zaya::train::step::{StepConfig, Watch, step};

/// Counts what threads allocate that asked for it; otherwise the system's allocator.
struct Counting;

/// Allocations of this size and more are counted: buffers, not the thread pool's small change.
const LARGE_BYTES: usize = 16 << 10;
static LARGE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE_BYTES && COUNTED.try_with(Cell::get).unwrap_or(false) {
            LARGE.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A small model with every kind of layer in it, wide enough that its buffers are large.
fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 600,
        hidden_size: 64,
        num_query_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        num_experts: 4,
        expert_width: 48,
        router_width: 24,
        initializer_range: 0.1,
        attention: bench_15m().attention[..2].to_vec(),
        ..bench_15m()
    }
}

const SEQ: usize = 96;

fn batch(n: u32) -> Batch {
    let tokens = 4 * SEQ;
    let id = |i: usize| (i as u32 * 7919 + n * 104_729) % 600;
    Batch {
        batch: 4,
        seq: SEQ,
        ids: (0..tokens).map(id).collect(),
        labels: (0..tokens).map(|i| if i % SEQ == SEQ - 1 { -1 } else { id(i + 1) as i64 }).collect(),
        ..Batch::default()
    }
}

struct Trainer {
    engine: Native<Cpu>,
    state: TrainState<Cpu>,
    cfg: StepConfig,
}

impl Trainer {
    fn new(cpu: Cpu, recompute: Recompute) -> Self {
        let (config, cfg) =
            (config(), StepConfig { optimizer: OptimizerConfig::default(), router_freeze_tokens: 0, by_sequence: None });
        let balance =
            BalanceConfig { rule: Rule::AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8 }, warmup: 0, include_skip: false };
        let table = ParamTable::new(&config);
        let state = TrainState::new(&cpu, &config, &balance, |id| Ok(initial_values(&table.specs[id], &config, 3))).unwrap();
        Self { engine: Native { backend: cpu, model: Model::new(config).with_recompute(recompute) }, state, cfg }
    }

    fn step(&mut self, n: u32) {
        // Two micro-batches, to see gradients accumulate.
        let alone = Alone::new(&self.state.table);
        step(&self.engine, &mut self.state, &self.cfg, &alone, &[batch(n), batch(n + 100)], 1e-3, &Watch::NONE)
            .unwrap()
            .done()
            .unwrap();
    }

    fn weights(&self) -> Vec<Vec<u32>> {
        let cpu = &self.engine.backend;
        let bits = |id| cpu.download(&self.state.params[id]).unwrap().iter().map(|x| x.to_bits()).collect();
        (0..self.state.params.len()).map(bits).collect()
    }
}

fn in_pool<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

fn working_bytes(precision: Precision, recompute: Recompute, packing: Packing) -> usize {
    let step = Step { micro_batch: 4, seq_len: SEQ, precision, head_precision: precision, recompute, packing, sharing: None };
    step.working_bytes(&config(), &OptimizerConfig::default()).unwrap()
}

#[test]
fn a_step_takes_the_working_memory_that_was_planned() {
    for threads in [1, 2, 3] {
        for precision in [Precision::F32, Precision::Bf16] {
            for (recompute, packing) in [
                (Recompute::None, Packing::Kept),
                (Recompute::None, Packing::EachUse),
                (Recompute::Attention, Packing::Kept),
                (Recompute::All, Packing::EachUse),
            ] {
                in_pool(threads, || {
                    let planned = working_bytes(precision, recompute, packing);
                    let cpu = Cpu::with_head(precision, precision).with_packing(packing);
                    cpu.reserve(planned).unwrap();
                    let mut trainer = Trainer::new(cpu.clone(), recompute);
                    (0..2).for_each(|n| trainer.step(n));
                    let used = cpu.arena_use();
                    assert_eq!(used.regions, 1, "the plan of {planned} bytes was enough");
                    // Planned for a label on every token.
                    assert!(used.peak <= planned && used.peak as f64 >= 0.95 * planned as f64, "{used:?}, planned {planned}");
                });
            }
        }
    }
}

#[test]
fn recomputation_saves_memory_and_changes_no_bit() {
    for precision in [Precision::F32, Precision::Bf16] {
        let run = |recompute| {
            in_pool(2, || {
                let mut trainer = Trainer::new(Cpu::new(precision), recompute);
                (0..3).for_each(|n| trainer.step(n));
                (working_bytes(precision, recompute, Packing::Kept), trainer.weights())
            })
        };
        let (none, attention, all) = (run(Recompute::None), run(Recompute::Attention), run(Recompute::All));
        assert!(none.0 > attention.0 && attention.0 > all.0, "{} {} {}", none.0, attention.0, all.0);
        assert!(none.1 == attention.1 && none.1 == all.1);
    }
}

#[test]
fn bits_do_not_depend_on_how_long_weights_stay_packed() {
    for precision in [Precision::F32, Precision::Bf16] {
        let run = |packing| {
            in_pool(2, || {
                let mut trainer = Trainer::new(Cpu::with_head(precision, precision).with_packing(packing), Recompute::None);
                (0..3).for_each(|n| trainer.step(n));
                trainer.weights()
            })
        };
        assert!(run(Packing::Kept) == run(Packing::EachUse));
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for precision in [Precision::F32, Precision::Bf16] {
        let run = |threads| {
            in_pool(threads, || {
                let mut trainer = Trainer::new(Cpu::with_head(precision, precision), Recompute::None);
                (0..3).for_each(|n| trainer.step(n));
                trainer.weights()
            })
        };
        let one = run(1);
        assert!([2, 3, 5].into_iter().all(|threads| run(threads) == one));
    }
}

#[test]
fn a_step_allocates_no_buffers() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).start_handler(|_| COUNTED.set(true)).build().unwrap();
    for packing in [Packing::Kept, Packing::EachUse] {
        pool.install(|| allocates_no_buffers(packing));
    }
}

fn allocates_no_buffers(packing: Packing) {
    let cpu = Cpu::new(Precision::F32).with_packing(packing);
    cpu.reserve(working_bytes(Precision::F32, Recompute::None, packing)).unwrap();
    let mut trainer = Trainer::new(cpu, Recompute::None);
    // The first step makes what is kept: packed weights, tables of angles.
    trainer.step(0);
    let before = LARGE.load(Ordering::Relaxed);
    assert!(before > 0, "the weights at least were counted");
    let batches: Vec<Batch> = (1..5).map(batch).collect();
    let before = LARGE.load(Ordering::Relaxed);
    for pair in batches.chunks(2) {
        let alone = Alone::new(&trainer.state.table);
        step(&trainer.engine, &mut trainer.state, &trainer.cfg, &alone, pair, 1e-3, &Watch::NONE).unwrap().done().unwrap();
    }
    assert_eq!(LARGE.load(Ordering::Relaxed) - before, 0, "buffers of {LARGE_BYTES} bytes or more");
}

/// Losses of rows without a label are not computed: a batch where they are few equals one of the labelled rows alone.
#[test]
fn few_labels_among_many_rows() {
    in_pool(2, || {
        let (d, vocab, rows) = (8, 40, 1500);
        let cpu = Cpu::new(Precision::F32);
        let series = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
        let (y, head) = (series(rows * d, 0.7), cpu.upload(&series(vocab * d, 0.3), vocab, d).unwrap());
        for every in [1, 2, 3, 700, 1499] {
            let labelled: Vec<usize> = (0..rows).step_by(every).collect();
            let batch =
                |labels: Vec<i64>| Batch { batch: 1, seq: labels.len(), ids: vec![0; labels.len()], labels, ..Batch::default() };
            let label = |t: usize| (t * 7 % vocab) as i64;
            let many = cpu.rows(&batch((0..rows).map(|t| if t % every == 0 { label(t) } else { -1 }).collect())).unwrap();
            let few = cpu.rows(&batch(labelled.iter().map(|t| label(*t)).collect())).unwrap();
            let few_y: Vec<f32> = labelled.iter().flat_map(|t| &y[t * d..][..d]).copied().collect();
            let (many_y, few_y) = (cpu.upload(&y, rows, d).unwrap(), cpu.upload(&few_y, labelled.len(), d).unwrap());
            let loss = cpu.cross_entropy(&many, &many_y, &head).unwrap();
            assert_eq!(loss.count, labelled.len() as u64);
            assert_eq!(loss, cpu.cross_entropy(&few, &few_y, &head).unwrap());
            let mut d_head = cpu.zeros(vocab, d).unwrap();
            let (again, dy) = cpu.cross_entropy_backward(&many, &many_y, &head, 1.0, &mut d_head).unwrap();
            assert!((again.sum - loss.sum).abs() <= 1e-6 * loss.sum);
            let dy = cpu.download(&dy).unwrap();
            assert!(dy.chunks(d).enumerate().all(|(t, row)| (t % every == 0) == row.iter().any(|x| *x != 0.0)));
        }
    });
}

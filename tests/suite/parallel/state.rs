//! A checkpoint of any layout is a state of every other: each number arrives where it is needed, and comes back as it was.

use std::sync::Arc;
use std::time::Duration;

use rayon::ThreadPoolBuilder;
use zaya::checkpoint::{self, CKPT_DIR, Checkpoint, Meta, SaveOptions, training_tensors};
use zaya::model::ParamTable;
use zaya::optim::balance::{BalanceConfig, Rule};
use zaya::parallel::threads::Hub;
use zaya::parallel::{Comm, Cut, Cutting, Layout, Mesh, Sharing, Stages, Together, Transport};
use zaya::tensor::cpu::Cpu;
use zaya::train::state::TrainState;

use super::layouts;
use super::toy::config;

/// A number of its own for every place of every tensor.
fn value(tensor: usize, i: usize) -> f32 {
    (tensor * 10_007 + i) as f32 * 0.25 + 1.0
}

#[test]
fn every_layout_holds_a_checkpoint_to_the_bit() {
    let table = ParamTable::new(&config());
    for rule in [
        Rule::AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8 },
        Rule::Pid { kp: 0.1, ki: 0.1, kd: 0.1 },
        Rule::Sign { step: 0.1 },
    ] {
        let balance = BalanceConfig { rule, warmup: 0, include_skip: false };
        let tensors = training_tensors(&table, &rule);
        let dir = tempfile::tempdir().unwrap();
        let mut meta = Meta { step: 7, tokens_seen: 99, ..Meta::new(config()) };
        for (i, name) in ["optimizer.updates", "optimizer.router_updates", "balance.updates"].into_iter().enumerate() {
            meta.set_u64(name, 5 + i as u64);
        }
        let numel = |t: usize| tensors[t].shape.iter().product::<usize>();
        let mut read = |t: usize| Ok((0..numel(t)).map(|i| value(t, i)).collect());
        let root = dir.path().join(CKPT_DIR);
        let saved = checkpoint::save(&root, &meta, &tensors, &mut read, &SaveOptions::default()).unwrap();
        let opened = Checkpoint::open(&saved.dir).unwrap();
        for l in layouts() {
            let layout = Layout::new(l.ranks, l.cp, l.ep, config().num_experts).unwrap();
            std::thread::scope(|scope| {
                for transport in Hub::ranks(l.ranks, Duration::from_secs(60)) {
                    let (opened, tensors) = (&opened, &tensors);
                    let body = move || {
                        let cpu = Cpu::default();
                        let transport: Arc<dyn Transport> = Arc::new(transport);
                        let mesh = Arc::new(Mesh::new(layout, Comm::new(transport, Stages::Flat)));
                        let cutting = Cutting::new(l.cp, Cut::Contiguous, 24).unwrap();
                        let together = Together::new(mesh.clone(), &config(), cutting, 1 << 16).unwrap();
                        let table = ParamTable::new(&config());
                        let zeros = |id: usize| Ok(vec![0.0; table.specs[id].numel()]);
                        let mut state = TrainState::shared(&cpu, &config(), &balance, together.ownership(), zeros).unwrap();
                        state.load(&cpu, opened).unwrap();
                        assert_eq!((state.step, state.tokens_seen), (7, 99));
                        assert_eq!(
                            (state.optimizer.updates, state.optimizer.router_updates, state.balancer.updates()),
                            (5, 6, 7)
                        );
                        for (t, tensor) in tensors.iter().enumerate() {
                            let found = state.collect(&cpu, &mesh.world, &tensor.name).unwrap();
                            // The first rank gets all of it; that is what it saves.
                            let n: usize = if mesh.rank == 0 { tensor.shape.iter().product() } else { 0 };
                            assert_eq!(found.len(), n);
                            let same = found.iter().enumerate().all(|(i, x)| x.to_bits() == value(t, i).to_bits());
                            assert!(same, "{} of {layout:?}", tensor.name);
                        }
                        // And every rank holds whole what it computes with.
                        for (id, spec) in table.specs.iter().enumerate().filter(|(id, _)| together.ownership().holds(*id)) {
                            use zaya::tensor::Backend;
                            let t = tensors.iter().position(|t| t.name == spec.name).unwrap();
                            let here = cpu.download(&state.params[id]).unwrap();
                            assert!(
                                here.iter().enumerate().all(|(i, x)| *x == value(t, i)),
                                "{} on rank {}",
                                spec.name,
                                mesh.rank
                            );
                        }
                    };
                    scope.spawn(|| ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(body));
                }
            });
        }
    }
}

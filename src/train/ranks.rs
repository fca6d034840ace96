//! A run on several ranks: the layout that a recipe asks for, and the start of ranks that are threads or processes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::backend::{self, Fitted, require_bf16};
use super::gpu;
use super::run::{EngineKind, Options, Run};
use super::stages;
use super::step::{StepConfig, agree};
use super::stop::{Outcome, Stop};
use crate::error::{BadInput, bad_input, panic_text};
use crate::failpoint;
use crate::parallel::bucket;
use crate::parallel::carrier::Carrier;
use crate::parallel::launch::{self, Launch};
#[cfg(feature = "mpi")]
use crate::parallel::mpi::MpiRank;
use crate::parallel::rccl::{self, RcclRank};
use crate::parallel::threads::Hub;
use crate::parallel::together::refuse_cut_sequences;
use crate::parallel::{Channel, Comm, Cut, Cutting, Group, Layout, Mesh, PeerFailed, Stages, Together, Transport};
use crate::print::set_silent;
use crate::recipe::{Collectives, CpChunks, Deterministic, PartialNodes, Recipe};
use crate::tensor::cpu::par;
use crate::tensor::hip;
use crate::tensor::trace;

/// How long ranks may take to notice that another one has failed, before the process ends without them.
const GRACE: Duration = Duration::from_secs(2);

/// The mesh of `ranks` ranks that a recipe asks for, and how it cuts sequences.
pub fn layout(recipe: &Recipe, ranks: usize) -> Result<(Layout, Cutting)> {
    let p = &recipe.parallel;
    let layout = Layout::new(ranks, p.cp, p.ep, recipe.model.num_experts)?;
    let cut = match p.cp_chunks {
        CpChunks::Auto => Cut::auto(recipe.train.seq_len),
        CpChunks::Contiguous => Cut::Contiguous,
        CpChunks::Zigzag => Cut::Zigzag,
    };
    Ok((layout, Cutting::new(p.cp, cut, recipe.train.seq_len)?))
}

/// Refuses a stage that cannot be shared by `ranks` ranks, before any of them is trained.
pub fn check_layouts(recipe: &Recipe, ranks: usize) -> Result<()> {
    for stage in recipe.each_stage() {
        let check = || -> Result<()> {
            let (layout, _) = layout(&stage, ranks)?;
            match stage.train.deterministic {
                Deterministic::Layout => refuse_cut_sequences(layout),
                Deterministic::Run => Ok(()),
            }
        };
        match stage.stages.first().filter(|_| recipe.num_stages() > 1) {
            Some(named) => check().with_context(|| format!("stage `{}`", named.name))?,
            None => check()?,
        }
    }
    Ok(())
}

/// Bytes of the run's buckets, and what was measured for that.
///
/// # Errors
/// When another rank is lost meanwhile.
pub fn bucket_bytes(recipe: &Recipe, mesh: &Mesh) -> Result<(usize, Option<bucket::Found>)> {
    let found = match recipe.parallel.bucket_mib {
        Some(_) => None,
        // One rank sends nothing to anybody.
        None if mesh.layout.world == 1 => None,
        None => {
            mesh.comm.at(|place| place.phase = "sizing buckets");
            Some(bucket::measure(&mesh.background_world).context("measuring for parallel.bucket_mib = \"auto\"")?)
        }
    };
    let mib = recipe.parallel.bucket_mib.or(found.as_ref().map(|f| f.bucket_mib)).unwrap_or(bucket::DEFAULT_MIB);
    Ok(((mib << 20) as usize, found))
}

/// Compute threads of each of `ranks` ranks on this machine.
pub fn threads_of_rank(recipe: &Recipe, ranks: usize) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    (recipe.train.threads.unwrap_or_else(cores) / ranks).max(1)
}

/// Ranks of a node, checked against what the groups of every stage make of it. Warnings are told.
fn ranks_per_node(recipe: &Recipe, ranks: usize, of_launcher: Option<usize>) -> Result<usize> {
    let n = recipe.parallel.ranks_per_node.or(of_launcher).unwrap_or(ranks);
    let mut problems: Vec<String> = Vec::new();
    for stage in recipe.each_stage() {
        let (layout, _) = layout(&stage, ranks)?;
        let (sequences, replicas) = (stage.train.sequences_per_step() as usize, layout.replicas());
        if sequences < replicas {
            tell!(
                "warning: a global batch has {sequences} sequences, fewer than there are replicas ({replicas}): some have nothing to \
                 do. Make train.global_batch_tokens larger, or parallel.cp"
            );
        }
        for problem in layout.partial_nodes(n) {
            if !problems.contains(&problem) {
                problems.push(problem);
            }
        }
    }
    match recipe.parallel.partial_nodes {
        PartialNodes::Allow => {}
        PartialNodes::Warn => problems.iter().for_each(|p| tell!("warning: {p}")),
        PartialNodes::Error if problems.is_empty() => {}
        PartialNodes::Error => {
            return Err(bad_input(format!(
                "{}. Make the groups whole nodes, or set parallel.partial_nodes = \"warn\"",
                problems.join("; ")
            )));
        }
    }
    Ok(n)
}

/// How collectives travel between ranks of nodes of this size.
fn stages(recipe: &Recipe, ranks_per_node: usize) -> Stages {
    match recipe.parallel.collectives {
        Collectives::Flat => Stages::Flat,
        Collectives::Auto | Collectives::TwoStage => Stages::Two { ranks_per_node },
    }
}

/// Trains on `options.ranks` ranks. The first failure ends all of them, and is the one that is returned.
pub fn on_threads(recipe: &Recipe, options: &Options, stop: Stop) -> Result<Outcome> {
    refuse_alone(options)?;
    let ranks = options.ranks;
    check_layouts(recipe, ranks)?;
    let on_gpus = options.engine == EngineKind::Hip;
    if on_gpus {
        require_bf16(recipe.train.precision)?;
        require_devices(ranks)?;
    }
    let node = ranks_per_node(recipe, ranks, None)?;
    let threads = threads_of_rank(recipe, ranks);
    let (done, outcomes) = channel();
    for transport in Hub::ranks(ranks, recipe.parallel.timeout) {
        let rank = transport.rank();
        let comm = Comm::new(Arc::new(transport), stages(recipe, node));
        // The threads may outlive this call when one of them hangs, so they own what they use.
        let (recipe, options, stop, done) = (recipe.clone(), options.clone(), stop.clone(), done.clone());
        let body = move || {
            if on_gpus {
                stay_near(rank);
            }
            let pool = par::pool_named(Some(threads), format!("rank {rank}"));
            let run = || pool.and_then(|pool| pool.install(|| train(&recipe, &options, &stop, comm.clone(), rank)));
            let outcome = guarded(comm.transport.as_ref(), run);
            // Nobody listens any more when another rank has failed long ago.
            let _ = done.send((rank, outcome));
        };
        let name = format!("rank-{rank}");
        std::thread::Builder::new().name(name).spawn(body).with_context(|| format!("starting rank {rank} of {ranks}"))?;
    }
    drop(done);
    let (mut first, mut failure, mut deadline): (Option<Outcome>, Option<anyhow::Error>, Option<Instant>) = (None, None, None);
    for _ in 0..ranks {
        let next = match deadline {
            None => outcomes.recv().ok(),
            Some(deadline) => outcomes.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok(),
        };
        match next {
            // The rest hangs in something else than communication; the process ends without it.
            None => break,
            Some((0, Ok(outcome))) => first = Some(outcome),
            Some((_, Ok(_))) => {}
            Some((rank, Err(e))) => {
                // What the user can fix is the same on all of them.
                let e = if e.is::<PeerFailed>() || e.is::<BadInput>() { e } else { e.context(format!("rank {rank}")) };
                deadline.get_or_insert_with(|| Instant::now() + GRACE);
                if failure.as_ref().is_none_or(|f| f.is::<PeerFailed>() && !e.is::<PeerFailed>()) {
                    failure = Some(e);
                }
            }
        }
    }
    match (failure, first) {
        (Some(failure), _) => Err(failure),
        (None, Some(outcome)) => Ok(outcome),
        (None, None) => Err(anyhow!("the first rank ended without a word")),
    }
}

/// Trains as one of the processes of an MPI job.
#[cfg(feature = "mpi")]
pub fn on_mpi(recipe: &Recipe, options: &Options, stop: Stop, launch: Launch) -> Result<Outcome> {
    refuse_alone(options)?;
    // What is impossible is refused before MPI starts: afterwards a rank that ends takes all others with it.
    check_layouts(recipe, launch.world)?;
    let of_node = launch::ranks_per_node(&launch);
    let node = ranks_per_node(recipe, launch.world, of_node)?;
    let threads = threads_of_rank(recipe, of_node.unwrap_or(launch.world));
    let transport = MpiRank::start(recipe.parallel.timeout)?;
    let rank: Arc<dyn Transport> = Arc::new(transport);
    let comm = Comm::new(rank.clone(), stages(recipe, node));
    let pool = par::pool(Some(threads));
    guarded(&*rank, || pool.and_then(|pool| pool.install(|| train(recipe, options, &stop, comm, launch.local_rank.unwrap_or(0)))))
}

/// Trains as one of the processes that a launcher started, each with a GPU of its own.
pub fn on_gpus(recipe: &Recipe, options: &Options, stop: Stop, launch: Launch) -> Result<Outcome> {
    // What is impossible is refused before any rank waits for another.
    check_layouts(recipe, launch.world)?;
    require_bf16(recipe.train.precision)?;
    let of_node = launch::ranks_per_node(&launch);
    let node = ranks_per_node(recipe, launch.world, of_node)?;
    let local_rank = match launch.local_rank {
        Some(local_rank) => local_rank,
        None => {
            return Err(bad_input(format!(
                "{} has not said which of its node's processes this is, so which GPU it is to use is not known: set LOCAL_RANK",
                launch.by
            )));
        }
    };
    // A launcher may show each process its own device alone.
    if hip::devices()? > 1 {
        require_devices(local_rank + 1)?;
    }
    let address = rccl::address(|name| std::env::var(name).ok(), &launch)?;
    stay_near(local_rank);
    let (library, device, _) = hip::place_of(local_rank)?;
    let threads = threads_of_rank(recipe, of_node.unwrap_or(launch.world));
    let rank: Arc<dyn Transport> = Arc::new(RcclRank::start(&launch, library, device, &address, recipe.parallel.timeout)?);
    let comm = Comm::new(rank.clone(), stages(recipe, node));
    let pool = par::pool(Some(threads));
    guarded(&*rank, || pool.and_then(|pool| pool.install(|| train(recipe, options, &stop, comm, local_rank))))
}

/// Refuses ranks that would share a GPU: RCCL does not connect them.
fn require_devices(ranks: usize) -> Result<()> {
    let devices = hip::devices()?;
    if ranks > devices {
        return Err(bad_input(format!(
            "{ranks} ranks on this machine want a GPU each, and HIP finds {devices}: start at most {devices} ranks here"
        )));
    }
    Ok(())
}

/// Keeps this thread, and those that it starts, near the rank's device, where the system tells which processors that are.
fn stay_near(local_rank: usize) {
    if let Ok((_, _, Some(place))) = hip::place_of(local_rank) {
        rccl::bind_near(&place);
    }
}

fn refuse_alone(options: &Options) -> Result<()> {
    match options.engine {
        EngineKind::Candle => Err(bad_input("--backend candle trains on one rank: start one process, without --ranks")),
        EngineKind::Hip | EngineKind::Cpu => Ok(()),
    }
}

/// Runs a rank's part; its failure, or its panic, is made known to the others.
fn guarded(transport: &dyn Transport, run: impl FnOnce() -> Result<Outcome>) -> Result<Outcome> {
    let outcome =
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(anyhow!("it panicked: {}", panic_text(&*panic))));
    match &outcome {
        Ok(_) => transport.leave(),
        Err(e) if e.is::<PeerFailed>() => {}
        Err(e) => transport.fail(&format!("{e:#}")),
    }
    outcome
}

/// One rank, from start to end, in its own pool of threads.
fn train(recipe: &Recipe, options: &Options, stop: &Stop, comm: Arc<Comm>, local_rank: usize) -> Result<Outcome> {
    let rank = comm.transport.rank();
    let ranks = comm.transport.world();
    set_silent(rank > 0);
    failpoint::set_rank(rank);
    if rank > 0 {
        // A recording is of one rank.
        rayon::broadcast(|_| trace::mute());
    }
    // Between stages, all ranks are one group.
    let world = Group::new(&comm, Channel::Main, "run", (0..ranks).collect());
    // The ranks and what lies between them stay the same in all stages: measured once.
    let mut sized = None;
    stages::each(recipe, options, Some(&world), |mut leg| {
        let recipe = leg.recipe()?;
        let (layout, cutting) = layout(&recipe, ranks)?;
        let mesh = Arc::new(Mesh::new(layout, comm.clone()));
        let bucket_bytes = match sized {
            Some(bytes) => bytes,
            None => {
                let (bytes, found) = match options.engine {
                    // What is measured is how messages of the host travel.
                    EngineKind::Hip => ((recipe.parallel.bucket_mib.unwrap_or(bucket::DEFAULT_MIB) << 20) as usize, None),
                    _ => bucket_bytes(&recipe, &mesh)?,
                };
                if let Some(found) = &found {
                    tell!("{}", found.sentence(ranks));
                }
                leg.kept.buckets = found;
                *sized.insert(bytes)
            }
        };
        let fits = |here: bool| Ok(!agree(Some(&mesh.world), !here)?);
        match options.engine {
            EngineKind::Hip => {
                let Fitted { engine, recipe, reduced_from } = gpu::fitting(&recipe, local_rank, Some((layout, cutting)), fits)?;
                let together =
                    rccl::together(&engine.backend, mesh.clone(), &recipe.model, cutting, bucket_bytes, recipe.parallel.timeout)?;
                let together = in_order(together, &engine.backend, &recipe)?;
                let ended = Run::start(engine, &together, &recipe, leg, options, stop, reduced_from)?.train()?;
                together.finish();
                Ok(ended)
            }
            EngineKind::Cpu | EngineKind::Candle => {
                let Fitted { engine, recipe, reduced_from } = backend::fitting(&recipe, Some((layout, cutting)), fits)?;
                let together = Together::new(mesh.clone(), &recipe.model, cutting, bucket_bytes)?;
                let together = in_order(together, &engine.backend, &recipe)?;
                Run::start(engine, &together, &recipe, leg, options, stop, reduced_from)?.train()
            }
        }
    })
}

/// With sums over sequences, where the recipe asks for these.
fn in_order<C: Carrier>(together: Together<C>, backend: &C::B, recipe: &Recipe) -> Result<Together<C>> {
    match StepConfig::of(recipe).by_sequence {
        Some(sequences) => together.by_sequence(backend, sequences),
        None => Ok(together),
    }
}

//! Collectives between GPUs, by RCCL: a thread for each, as the ranks of one machine.

use std::ffi::c_void;
use std::sync::Arc;

use anyhow::{Context, Result};
use hip_sys::{DeviceBuffer, Hip as HipLibrary, Stream};
use rccl_sys::{Communicator, DataType, Op, Rccl, UniqueId};

use super::collectives::{CollectiveLine, Collectives, Operation, SIZES, group_sizes, on_threads, rounds};
use crate::error::bad_input;
use crate::parallel::bucket::{self, Rate, SIZES_MIB};
use crate::parallel::{Channel, Comm, Group};
use crate::tensor::hip::DeviceFacts;

/// Largest message where none is given: of a GPU, and of the software GPU.
const LARGEST: usize = 1 << 30;
const SOFTWARE_LARGEST: usize = 64 << 10;

/// Between `ranks` GPUs of this machine.
///
/// # Errors
/// When there are fewer, or RCCL fails.
pub fn between_gpus(ranks: usize, facts: &DeviceFacts, seconds: f64, progress: &dyn Fn(&str)) -> Result<Collectives> {
    let library = HipLibrary::open().context("opening HIP for collectives between GPUs")?;
    let rccl = Rccl::open().context("opening RCCL for collectives between GPUs")?;
    let devices = library.device_count()?;
    if (devices as usize) < ranks {
        return Err(bad_input(format!("--ranks {ranks} asks for as many GPUs, and this machine has {devices}")));
    }
    let largest = if facts.software { SOFTWARE_LARGEST } else { LARGEST };
    let mut lines: Vec<CollectiveLine> = Vec::new();
    for group in group_sizes(ranks) {
        progress(&format!("collectives of up to {} KiB in groups of {group} of {ranks} GPUs", largest >> 10));
        lines.extend(on_threads(ranks, move |comm| Rank::join(comm, library, rccl, group)?.measure(largest, seconds))?);
    }
    let bucket_mib = smallest_enough(&lines, ranks);
    Ok(Collectives::new("rccl", ranks, facts.software, lines, bucket_mib))
}

/// One GPU of a group.
struct Rank {
    /// All ranks of all groups, over the host's memory: who says when a round begins and ends.
    world: Group,
    library: &'static HipLibrary,
    comm: Communicator,
    stream: Stream,
    group: usize,
}

impl Rank {
    fn join(host: &Arc<Comm>, library: &'static HipLibrary, rccl: &'static Rccl, group: usize) -> Result<Self> {
        let rank = host.transport.rank();
        library.set_device(rank as i32)?;
        let world = Group::new(host, Channel::Main, "world", (0..host.transport.world()).collect());
        let first = rank / group * group;
        // Each group's first rank makes the id that its others join by.
        let own = if rank == first { rccl.unique_id()?.to_bytes() } else { [0; UniqueId::BYTES] };
        let ids = world.all_gather_slices("ids of communicators", &own)?;
        let id =
            ids.chunks_exact(UniqueId::BYTES).nth(first).and_then(|id| id.try_into().ok()).context("every rank sends an id")?;
        let comm = Communicator::new(rccl, UniqueId::from_bytes(id), (rank - first) as i32, group as i32)
            .with_context(|| format!("joining GPU {rank} to a group of {group}"))?;
        Ok(Self { world, library, comm, stream: Stream::new(library)?, group })
    }

    /// All operations and sizes.
    fn measure(self, largest: usize, seconds: f64) -> Result<Vec<CollectiveLine>> {
        let (mut from, mut to) = (DeviceBuffer::new(self.library, largest)?, DeviceBuffer::new(self.library, largest)?);
        // Sums of zeros stay zeros.
        from.fill(0)?;
        to.fill(0)?;
        let mut lines = Vec::new();
        for operation in Operation::ALL {
            for bytes in SIZES.into_iter().filter(|bytes| *bytes <= largest) {
                let mut operate = || self.operate(operation, bytes, &from, &to);
                let (times, _) = rounds(&self.world, seconds, &mut operate, None)?;
                lines.push(CollectiveLine::new(operation, self.group, bytes, times, Vec::new()));
            }
        }
        self.comm.destroy()?;
        Ok(lines)
    }

    /// One operation on f32 numbers, until it is done. `bytes`: of what a rank holds before an all-reduce, and of the longer side of
    /// the others.
    fn operate(&self, operation: Operation, bytes: usize, from: &DeviceBuffer, to: &DeviceBuffer) -> Result<()> {
        let (all, kind, stream) = (bytes / DataType::F32.bytes(), DataType::F32, &self.stream);
        let (each, from, to): (usize, *const c_void, *mut c_void) = (all / self.group, from.pointer(), to.pointer());
        // SAFETY: both buffers hold the largest message, live until the stream was waited for, and nobody else uses them.
        unsafe {
            match operation {
                Operation::AllReduce => self.comm.all_reduce(from, to, all, kind, Op::Sum, stream)?,
                Operation::ReduceScatter => self.comm.reduce_scatter(from, to, each, kind, Op::Sum, stream)?,
                Operation::AllGather => self.comm.all_gather(from, to, each, kind, stream)?,
                Operation::AllToAll => self.comm.all_to_all(from, to, each, kind, stream)?,
            }
        }
        stream.synchronize().with_context(|| format!("waiting for an {} of {bytes} bytes", operation.name()))
    }
}

/// The smallest size of gradient buckets that a reduce-scatter between all ranks moves at nearly the best rate.
fn smallest_enough(lines: &[CollectiveLine], ranks: usize) -> u64 {
    let name = Operation::ReduceScatter.name();
    let rate = |mib: u64| {
        let line = lines.iter().find(|l| l.group == ranks && l.name == name && l.bytes as u64 == mib << 20)?;
        Some(Rate { mib, gbytes_per_s: line.gbytes_per_s })
    };
    bucket::smallest_enough(&SIZES_MIB.into_iter().filter_map(rate).collect::<Vec<_>>())
}

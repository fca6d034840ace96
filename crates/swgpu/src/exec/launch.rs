//! Loading a module onto a device, and running a kernel's whole grid.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::WAVE;
use super::step::{Details, Machine};
use super::wave::{State, Wave};
use crate::cache::Caches;
use crate::counters::{self, Counts};
use crate::faults::faults;
use crate::isa::code_object::{self, KernelInfo};
use crate::isa::decode::{self, Program};
use crate::isa::{LoadError, disassembly};
use crate::memory::{self, Allocation, Owner, Segment, View};
use crate::settings::{Poison, settings};

/// Largest LDS of a workgroup in bytes.
pub const LDS_BYTES: usize = 64 << 10;

/// A code object loaded onto a device.
#[derive(Debug)]
pub struct Module {
    pub device: usize,
    pub program: Program,
    pub kernels: Vec<Arc<Kernel>>,
    /// Code, constants and global variables.
    image: Arc<Allocation>,
}

impl Module {
    /// Parses, disassembles and decodes `file`, and places its image on `device`.
    pub fn load(file: &[u8], device: usize) -> Result<Arc<Self>, LoadError> {
        let object = code_object::parse(file)?;
        let program = decode::decode(&disassembly::disassemble(file)?);
        let image = Allocation::new(object.image.len(), Owner::Module(device), false)
            .map_err(|error| LoadError::Object(format!("no memory for the image: {error}")))?;
        let segment = image.segment();
        // SAFETY: the allocation is as long as the image, and nobody else knows it yet.
        unsafe { std::ptr::copy_nonoverlapping(object.image.as_ptr(), segment.data, object.image.len()) };
        for (offset, value) in object.relocations {
            if !segment.contains(image.address.wrapping_add(offset), 8) {
                return Err(LoadError::Object(format!("relocation at {offset:#x} lies outside the image")));
            }
            let place = segment.place(image.address + offset).cast::<u64>();
            // SAFETY: just checked to lie inside the allocation.
            unsafe { place.write_unaligned(image.address.wrapping_add(value)) };
        }
        let mut kernels = Vec::new();
        for info in object.kernels {
            let entry = *program.index_of.get(&info.entry).ok_or_else(|| LoadError::Kernel {
                kernel: info.name.clone(),
                problem: format!("no instruction at its entry {:#x}", info.entry),
            })?;
            kernels.push(Arc::new(Kernel { info, entry }));
        }
        memory::register(&image);
        Ok(Arc::new(Self { device, program, kernels, image }))
    }

    pub fn kernel(&self, name: &str) -> Option<&Arc<Kernel>> {
        self.kernels.iter().find(|kernel| kernel.info.name == name)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        memory::release(self.image.address);
    }
}

#[derive(Debug)]
pub struct Kernel {
    pub info: KernelInfo,
    /// Index of its first instruction.
    pub entry: u32,
}

/// One kernel launch. Grid in workgroups, workgroup in work-items.
#[derive(Debug, Clone)]
pub struct Launch {
    pub module: Arc<Module>,
    pub kernel: Arc<Kernel>,
    pub grid: [u32; 3],
    pub workgroup: [u32; 3],
    pub dynamic_lds_bytes: usize,
    /// The explicit arguments at their offsets; hidden ones are filled in here.
    pub kernarg: Vec<u8>,
}

/// What a kernel did wrong, and where.
#[derive(Debug, thiserror::Error)]
#[error("kernel {kernel}: {problem}\n  at {address:#x}: {instruction}\n  workgroup {workgroup:?}, wave {wave}")]
pub struct Fault {
    pub kernel: String,
    pub problem: String,
    /// Relative address of the instruction.
    pub address: u64,
    pub instruction: String,
    pub workgroup: [u32; 3],
    pub wave: usize,
}

impl Launch {
    /// Why this launch is refused before it starts, if it is.
    pub fn check(&self) -> Result<(), String> {
        let info = &self.kernel.info;
        let items: u64 = self.workgroup.iter().map(|&size| u64::from(size)).product();
        if items == 0 || self.grid.contains(&0) {
            return Err(format!("empty grid {:?} of workgroups {:?}", self.grid, self.workgroup));
        }
        if items > info.max_workgroup as u64 {
            return Err(format!("workgroup of {items} items, {} was compiled for at most {}", info.name, info.max_workgroup));
        }
        if self.lds_bytes() > LDS_BYTES {
            return Err(format!("{} bytes of LDS, a workgroup has at most {LDS_BYTES}", self.lds_bytes()));
        }
        Ok(())
    }

    fn lds_bytes(&self) -> usize {
        self.kernel.info.lds_bytes + self.dynamic_lds_bytes
    }

    /// The kernarg segment with hidden arguments filled in, behind it the dispatch packet.
    fn kernarg_segment(&self) -> Vec<u8> {
        let info = &self.kernel.info;
        let mut bytes = self.kernarg.clone();
        bytes.resize(info.kernarg_bytes.max(bytes.len()), 0);
        for argument in info.arguments.iter().filter(|argument| argument.is_hidden()) {
            let dimension = match argument.kind.as_bytes().last() {
                Some(b'y') => 1,
                Some(b'z') => 2,
                _ => 0,
            };
            let value = match argument.kind.trim_end_matches(['x', 'y', 'z']).trim_end_matches('_') {
                "hidden_block_count" => u64::from(self.grid[dimension]),
                "hidden_group_size" => u64::from(self.workgroup[dimension]),
                "hidden_grid_dims" => {
                    self.grid.iter().zip(self.workgroup).rposition(|(&grid, group)| grid * group > 1).unwrap_or(0) as u64 + 1
                }
                "hidden_dynamic_lds_size" => self.dynamic_lds_bytes as u64,
                // Remainders and offsets are 0; the other hidden arguments are pointers that are not served.
                _ => 0,
            };
            bytes[argument.offset..argument.offset + argument.size].copy_from_slice(&value.to_le_bytes()[..argument.size]);
        }
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        bytes.extend_from_slice(&self.dispatch_packet());
        bytes
    }

    /// The AQL packet that the dispatch pointer points to.
    fn dispatch_packet(&self) -> [u8; 64] {
        let mut packet = [0; 64];
        for dimension in 0..3 {
            let group = self.workgroup[dimension];
            packet[4 + 2 * dimension..][..2].copy_from_slice(&(group as u16).to_le_bytes());
            packet[12 + 4 * dimension..][..4].copy_from_slice(&(group * self.grid[dimension]).to_le_bytes());
        }
        packet[28..32].copy_from_slice(&(self.lds_bytes() as u32).to_le_bytes());
        packet
    }

    /// Runs the whole grid; `visible` says whose memory the kernel may touch.
    pub fn run(&self, visible: impl Fn(Owner) -> bool) -> Result<Counts, Box<Fault>> {
        let kernarg = self.kernarg_segment();
        let no_memory = |error: std::io::Error| {
            Box::new(Fault {
                kernel: self.kernel.info.name.clone(),
                problem: format!("no memory for its arguments: {error}"),
                address: 0,
                instruction: String::new(),
                workgroup: [0; 3],
                wave: 0,
            })
        };
        let arguments = Allocation::new(kernarg.len(), Owner::Device(self.module.device), false).map_err(no_memory)?;
        // SAFETY: the allocation is as long as the segment and new.
        unsafe { std::ptr::copy_nonoverlapping(kernarg.as_ptr(), arguments.segment().data, kernarg.len()) };
        let view = View::new(std::slice::from_ref(&arguments), visible);
        let mut data = vec![0u8; self.lds_bytes()];
        let mut written = vec![0u8; self.lds_bytes()];
        let lds = Segment { start: 0, end: data.len() as u64, data: data.as_mut_ptr(), written: written.as_mut_ptr() };
        let mut machine = Machine {
            program: &self.module.program,
            load_address: self.module.image.address,
            view: &view,
            lds,
            check_unwritten: settings().poison != Poison::Off,
            max_instructions: settings().max_instructions,
            corrupt: faults().corrupt.contains(&self.kernel.info.name),
            counts: Counts { launches: 1, ..Counts::default() },
            details: settings()
                .details
                .then(|| Details { executed: vec![0; self.module.program.code.len()], caches: Caches::new() }),
        };
        let items = self.workgroup.iter().product::<u32>() as usize;
        let mut waves: Vec<Wave> = Vec::new();
        waves.resize_with(items.div_ceil(WAVE), Wave::default);
        for z in 0..self.grid[2] {
            for y in 0..self.grid[1] {
                for x in 0..self.grid[0] {
                    // SAFETY: both vectors live until the end of this function and are only reached through `lds`. All ones is
                    // a NaN as a float, so that a read with the check switched off does not go unnoticed.
                    unsafe {
                        std::ptr::write_bytes(lds.data, 0xff, self.lds_bytes());
                        std::ptr::write_bytes(lds.written, 0, self.lds_bytes());
                    }
                    self.start_waves(&mut waves, arguments.address, kernarg.len() as u64 - 64, [x, y, z], items);
                    machine.counts.workgroups += 1;
                    if let Some(details) = &mut machine.details {
                        details.caches.next_workgroup();
                    }
                    self.run_workgroup(&mut machine, &mut waves, [x, y, z])?;
                }
            }
        }
        let mut mnemonics = BTreeMap::new();
        if let Some(details) = &mut machine.details {
            details.caches.flush();
            machine.counts.memory_bytes_read = details.caches.bytes_read;
            machine.counts.memory_bytes_written = details.caches.bytes_written;
            for (count, text) in details.executed.iter().zip(&self.module.program.listing).filter(|(count, _)| **count > 0) {
                *mnemonics.entry(text.split(' ').next().unwrap_or_default()).or_insert(0) += count;
            }
        }
        counters::record(&self.kernel.info.name, &machine.counts, &mnemonics);
        Ok(machine.counts)
    }

    fn start_waves(&self, waves: &mut [Wave], kernarg: u64, packet_offset: u64, workgroup: [u32; 3], items: usize) {
        let info = &self.kernel.info;
        let mut scalars = Vec::new();
        let mut pair = |value: u64| scalars.extend([value as u32, (value >> 32) as u32]);
        if info.setup.dispatch_pointer {
            pair(kernarg + packet_offset);
        }
        if info.setup.kernarg_pointer {
            pair(kernarg);
        }
        if info.setup.dispatch_id {
            pair(0);
        }
        for (enabled, id) in info.setup.workgroup_id.into_iter().zip(workgroup) {
            if enabled {
                scalars.push(id);
            }
        }
        let [width, height, _] = self.workgroup;
        for (number, wave) in waves.iter_mut().enumerate() {
            // Accumulation registers are part of the unified count; both files are reset in full up to the larger one.
            wave.reset(self.kernel.entry, info.vgprs, info.vgprs);
            wave.scalars[..scalars.len()].copy_from_slice(&scalars);
            let mut exec = 0u64;
            for lane in 0..WAVE {
                let item = number * WAVE + lane;
                if item >= items {
                    break;
                }
                exec |= 1 << lane;
                let item = item as u32;
                // gfx90a and later pack the three work-item numbers into v0, ten bits each.
                wave.vectors[0][lane] = (item % width) | ((item / width % height) << 10) | ((item / (width * height)) << 20);
            }
            wave.write64(crate::isa::instruction::EXEC, exec);
        }
    }

    /// Runs the waves in turn from barrier to barrier.
    fn run_workgroup(&self, machine: &mut Machine, waves: &mut [Wave], workgroup: [u32; 3]) -> Result<(), Box<Fault>> {
        let fault = |problem: String, wave: &Wave, number: usize| {
            let index = wave.pc.saturating_sub(1) as usize;
            Box::new(Fault {
                kernel: self.kernel.info.name.clone(),
                problem,
                address: self.module.program.code.get(index).map_or(0, |instruction| instruction.address),
                instruction: self.module.program.listing.get(index).cloned().unwrap_or_default(),
                workgroup,
                wave: number,
            })
        };
        loop {
            let count = waves.len();
            for turn in 0..count {
                let number = if settings().reverse_waves { count - 1 - turn } else { turn };
                let wave = &mut waves[number];
                machine.run(wave).map_err(|problem| fault(problem, wave, number))?;
            }
            let waiting = waves.iter().filter(|wave| wave.state == State::AtBarrier).count();
            if waiting == 0 {
                return Ok(());
            }
            let first_waiting = |wave: &&mut Wave| wave.state == State::AtBarrier;
            if waiting < count {
                let ended = count - waiting;
                let problem = format!(
                    "{waiting} waves wait at a barrier that {ended} waves of the workgroup never reach, as they have ended"
                );
                let (number, wave) = waves.iter_mut().enumerate().find(|(_, wave)| first_waiting(wave)).expect("one waits");
                return Err(fault(problem, wave, number));
            }
        }
    }
}

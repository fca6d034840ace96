//! Matrix products on packed operands: the compute core of the CPU backend.
//!
//! A product is cut into blocks of at most `KC` along its inner dimension; B is packed once into panels (weights: once per
//! step), A is read where it lies or packed block by block. Blocks of C are added up in the order of the inner dimension, so
//! the bits do not depend on how the work is cut in the other two.

#[cfg(target_arch = "x86_64")]
pub mod amx;
mod micro;
pub mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod panels;
#[cfg(target_arch = "x86_64")]
mod turn;

pub use pack::Source;
pub use panels::{Layout, Panels, pack_all, pack_on_threads, pack_unit};
#[cfg(target_arch = "x86_64")]
pub use turn::turn;

use super::level::Level;
use micro::{MicroKernel, Tile};

/// How numbers are stored for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// One f32 per slot.
    F32,
    /// One f32 per slot, rounded to bfloat16: what products of bfloat16 are on a CPU without instructions for them.
    RoundedF32,
    /// Two bfloat16 per slot.
    Bf16,
}

impl Format {
    /// Numbers along the inner dimension in one slot.
    pub const fn per_slot(self) -> usize {
        match self {
            Format::F32 | Format::RoundedF32 => 1,
            Format::Bf16 => 2,
        }
    }
}

/// A micro-kernel with the numbers that packing must know.
#[derive(Debug, Clone, Copy)]
pub struct Core {
    pub format: Format,
    /// Rows and columns of a full tile.
    pub mr: usize,
    pub nr: usize,
    kernel: Kernel,
}

#[derive(Debug, Clone, Copy)]
enum Kernel {
    /// Called for each tile.
    Tile(MicroKernel),
    /// Takes a whole block.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// Inner dimension of a block, in numbers. A panel of a block stays in the first-level cache.
pub const KC: usize = 256;
/// Rows of A that a task takes at a time; a multiple of every `mr`.
pub const MC: usize = 96;

impl Core {
    /// Products in f32.
    pub fn f32() -> Self {
        Self::at(Level::current(), Format::F32)
    }

    /// Products of bfloat16 with sums in f32.
    pub fn bf16() -> Self {
        let level = Level::current();
        Self::at(level, if level >= Level::Avx512Bf16 { Format::Bf16 } else { Format::RoundedF32 })
    }

    /// The kernel of a level that this machine has.
    pub fn at(level: Level, format: Format) -> Self {
        assert!(level <= Level::detected(), "this machine has no {}", level.name());
        #[cfg(target_arch = "x86_64")]
        if (level, format) == (Level::Amx, Format::Bf16) {
            return Self { format, mr: amx::MR, nr: amx::NR, kernel: Kernel::Amx };
        }
        let (mr, nr, micro): (usize, usize, MicroKernel) = match (level, format) {
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512Bf16, Format::Bf16) => (micro::avx512bf16::MR, micro::avx512bf16::NR, micro::avx512bf16::kernel),
            (_, Format::Bf16) => unreachable!("bfloat16 pairs need {}", Level::Avx512Bf16.name()),
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512 | Level::Avx512Bf16 | Level::Amx, _) => (micro::avx512::MR, micro::avx512::NR, micro::avx512::kernel),
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, _) => (micro::avx2::MR, micro::avx2::NR, micro::avx2::kernel),
            _ => (micro::portable::MR, micro::portable::NR, micro::portable::f32),
        };
        Self { format, mr, nr, kernel: Kernel::Tile(micro) }
    }

    /// Products along the inner dimension, counted from a product's first number, that are summed before they are added to the rest.
    pub fn summed_together(&self) -> usize {
        match self.kernel {
            Kernel::Tile(_) => self.format.per_slot(),
            #[cfg(target_arch = "x86_64")]
            Kernel::Amx => amx::GROUP * self.format.per_slot(),
        }
    }

    /// Whether left operands have to lie in rows; else panels have their numbers by slots.
    pub fn left_lies_in_rows(&self) -> bool {
        !matches!(self.kernel, Kernel::Tile(_))
    }

    /// Slots that `k` numbers take along the inner dimension.
    pub fn slots(&self, k: usize) -> usize {
        k.div_ceil(self.format.per_slot())
    }
}

/// Rows of a left operand: element (r, s) is `data[r * row_stride + s * slot_stride]`, or, in panels, rows of tile i begin at
/// `i * tile_stride` and r counts from there.
#[derive(Clone, Copy)]
pub struct Left<'a> {
    pub data: &'a [u32],
    pub row_stride: usize,
    pub slot_stride: usize,
    /// Slots from one tile of `mr` rows to the next; None = the rows go on as before.
    pub tile_stride: Option<usize>,
}

impl<'a> Left<'a> {
    /// Rows of `slots` slots each.
    pub fn rows(data: &'a [u32], slots: usize) -> Self {
        Self::strided(data, slots, 1)
    }

    pub fn strided(data: &'a [u32], row_stride: usize, slot_stride: usize) -> Self {
        Self { data, row_stride, slot_stride, tile_stride: None }
    }

    /// `rows` rows that `pack::left_panel` wrote with room for `slots` slots; or, unless the core wants rows, a panel of a right
    /// operand whose columns they are.
    pub fn panel(core: &Core, data: &'a [u32], rows: usize, slots: usize) -> Self {
        if core.left_lies_in_rows() { Self::rows(data, slots) } else { Self::strided(data, 1, rows) }
    }

    /// Panels of `core.mr` rows of `slots` slots each, as `pack::left_panels` writes them.
    pub fn panels(core: &Core, data: &'a [u32], slots: usize) -> Self {
        Self { tile_stride: Some(core.mr * slots), ..Self::panel(core, data, core.mr, slots) }
    }
}

/// The f32 numbers of a row-major matrix as slots of format `F32`.
pub fn as_slots(x: &[f32]) -> &[u32] {
    // SAFETY: f32 and u32 have the same size and alignment, and every bit pattern is a number of either.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}

/// The other way round, to write slots into a buffer of f32.
pub fn as_slots_mut(x: &mut [f32]) -> &mut [u32] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), x.len()) }
}

/// `c[m, n] = a b`, or `+=` with `accumulate`: `m` rows of `a` with `slots` slots against one packed block whose panels lie
/// one after the other in `b`. Rows of c are `c_row_stride` apart.
#[allow(clippy::too_many_arguments)]
pub fn multiply_block(
    core: &Core,
    m: usize,
    n: usize,
    slots: usize,
    a: Left,
    b: &[u32],
    c: &mut [f32],
    c_row_stride: usize,
    accumulate: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(c_row_stride >= n && (m - 1) * c_row_stride + n <= c.len(), "target of a block product is too short");
    // SAFETY: the target is borrowed mutably and long enough.
    unsafe { multiply_block_at(core, m, n, slots, a, b, c.as_mut_ptr(), c_row_stride, accumulate) }
}

/// As `multiply_block`, into a part of a matrix that other threads write other parts of.
///
/// # Safety
/// `c` reaches `m` rows of `n` numbers, `c_row_stride` apart, that nobody else touches meanwhile.
#[allow(clippy::too_many_arguments)]
pub unsafe fn multiply_block_at(
    core: &Core,
    m: usize,
    n: usize,
    slots: usize,
    a: Left,
    b: &[u32],
    c: *mut f32,
    c_row_stride: usize,
    accumulate: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    let tile_stride = a.tile_stride.unwrap_or(core.mr * a.row_stride);
    if slots > 0 {
        let (tile, row) = ((m - 1) / core.mr, (m - 1) % core.mr);
        let last = tile * tile_stride + row * a.row_stride + (slots - 1) * a.slot_stride;
        assert!(last < a.data.len(), "left operand of a block product is too short");
    }
    assert!(n.div_ceil(core.nr) * core.nr * slots <= b.len(), "panels of a block product are too short");
    let micro = match core.kernel {
        Kernel::Tile(micro) => micro,
        #[cfg(target_arch = "x86_64")]
        Kernel::Amx => {
            assert!(a.slot_stride == 1, "the left operand of a block product does not lie in rows");
            let product = amx::Product {
                m,
                n,
                slots,
                a: a.data.as_ptr(),
                a_row_stride: a.row_stride,
                a_tile_stride: tile_stride,
                b: b.as_ptr(),
                c,
                c_row_stride,
                accumulate,
            };
            // SAFETY: `Core::at` gives this kernel only where there is AMX; operands reach as far as they say, by the assertions above.
            return unsafe { amx::multiply(product) };
        }
    };
    for j in (0..n).step_by(core.nr) {
        for (tile, i) in (0..m).step_by(core.mr).enumerate() {
            let tile = Tile {
                slots,
                // SAFETY: inside the operands, by the assertions above (no slots: never read).
                a: unsafe { a.data.as_ptr().add(if slots > 0 { tile * tile_stride } else { 0 }) },
                a_row_stride: a.row_stride,
                a_slot_stride: a.slot_stride,
                b: unsafe { b.as_ptr().add(j * slots) },
                // SAFETY: row i < m and column j < n.
                c: unsafe { c.add(i * c_row_stride + j) },
                c_row_stride,
                m: core.mr.min(m - i),
                n: core.nr.min(n - j),
                accumulate,
            };
            // SAFETY: `Core::at` gives kernels of this machine only; operands reach as far as the tile says.
            unsafe { micro(tile) }
        }
    }
}

#[cfg(test)]
mod tests;

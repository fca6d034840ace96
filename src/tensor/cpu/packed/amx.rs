//! Products of bfloat16 on Intel's AMX: tiles of 16 rows of 16 slots, multiplied 16 by 16 in one instruction.
//!
//! A tile of C is 32 by 32 numbers, four registers; a panel of B is what AMX wants as it stands. The left operand has to lie in
//! rows (`pack::left_panel`). An element of C is summed in groups of 16 slots, counted from the first slot of the operands, whatever
//! its place in a tile.
//!
//! The intrinsics are not in stable Rust; this is inline assembly. Every product sets the registers up and releases them at its
//! end: the compiler knows nothing of them, and uses none.

use std::arch::asm;
use std::mem::offset_of;
use std::sync::OnceLock;

pub const MR: usize = 32;
pub const NR: usize = 32;
/// Slots of a tile's row, and rows and columns of a register.
const SIDE: usize = 16;
/// Slots that are summed before they are added to C.
pub const GROUP: usize = SIDE;

/// Whether the processor has AMX's bfloat16 products and the system lets this process use them: Linux wants to be asked, once,
/// for all threads.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && system_allows())
}

fn has_instructions() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    const OSXSAVE: u32 = 1 << 27;
    /// Registers that the system saves: tile configuration and tiles.
    const SAVED: u64 = 0b11 << 17;
    #[target_feature(enable = "xsave")]
    fn saved() -> u64 {
        // SAFETY: called where OSXSAVE was found.
        unsafe { _xgetbv(0) }
    }
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || __cpuid_count(7, 0).edx & (BF16 | TILES) != BF16 | TILES {
        return false;
    }
    // SAFETY: OSXSAVE was found.
    unsafe { saved() & SAVED == SAVED }
}

#[cfg(target_os = "linux")]
fn system_allows() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: asks for a permission; nothing is written.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn system_allows() -> bool {
    false
}

/// Arguments of `ldtilecfg`. Registers 0 to 3 are C (by rows), 4 and 5 A, 6 and 7 B.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    _unused: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// For C of `m` by `n` and groups of `slots` slots.
    fn new(m: usize, n: usize, slots: usize) -> Self {
        let mut shapes = Self { palette: 1, start_row: 0, _unused: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let part = |of: usize, i: usize| of.saturating_sub(i * SIDE).min(SIDE);
        let mut set = |register: usize, rows: usize, columns: usize| {
            if rows > 0 && columns > 0 {
                (shapes.rows[register], shapes.row_bytes[register]) = (rows as u8, (columns * 4) as u16);
            }
        };
        for i in 0..2 {
            for j in 0..2 {
                set(i * 2 + j, part(m, i), part(n, j));
            }
            set(4 + i, part(m, i), slots);
            set(6 + i, slots, part(n, i));
        }
        shapes
    }
}

/// The registers while they are in use: set up anew when shapes change, which takes as long as a small tile.
#[derive(Default)]
struct Registers(Option<Shapes>);

impl Registers {
    /// # Safety
    /// AMX is `available`.
    unsafe fn shape(&mut self, shapes: Shapes) -> &Shapes {
        if self.0.as_ref() != Some(&shapes) {
            // SAFETY: the shapes are within what the processor has; nothing else uses the registers.
            unsafe { asm!("ldtilecfg [{shapes}]", shapes = in(reg) &shapes, options(nostack, readonly)) };
        }
        self.0.insert(shapes)
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        if self.0.is_some() {
            // SAFETY: AMX is there.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

/// Tiles of one shape along a row or a column of tiles, as the assembly reads it. Steps and strides are in bytes.
#[repr(C)]
struct Run {
    a: *const u32,
    b: *const u32,
    c: *mut f32,
    a_row: usize,
    c_row: usize,
    /// From the first half of the rows to the second.
    a_half: usize,
    c_half: usize,
    a_step: usize,
    b_step: usize,
    c_step: usize,
    groups: usize,
    tiles: usize,
    /// 1 = C keeps what it had.
    keep: usize,
}

/// What the assembly does with the registers that a tile has; `$products` are those of one group of slots.
macro_rules! run {
    ($run:expr, load: [$($load:literal)*], zero: [$($zero:literal)*], products: [$($product:literal)*], store: [$($store:literal)*]) => {
        asm!(
            "mov {a_row}, [{r} + {A_ROW}]",
            "mov {c_row}, [{r} + {C_ROW}]",
            "mov {b_row:e}, {B_ROW}",
            "2:",
            "mov {c}, [{r} + {C}]",
            "mov {c2}, [{r} + {C_HALF}]",
            "add {c2}, {c}",
            "mov {a}, [{r} + {A}]",
            "mov {a2}, [{r} + {A_HALF}]",
            "add {a2}, {a}",
            "mov {b}, [{r} + {B}]",
            "mov {k}, [{r} + {GROUPS}]",
            "mov {next}, {c}",
            "add {next}, [{r} + {C_STEP}]",
            "cmp qword ptr [{r} + {KEEP}], 0",
            "je 3f",
            $($load,)*
            "jmp 4f",
            "3:",
            $($zero,)*
            "4:",
            $($product,)*
            // Four rows of the next tile of C come nearer.
            ".rept 4",
            "prefetchw [{next}]",
            "prefetchw [{next} + 64]",
            "add {next}, {c_row}",
            ".endr",
            "add {a}, {STEP}",
            "add {a2}, {STEP}",
            "add {b}, {STEP} * {NR}",
            "dec {k}",
            "jnz 4b",
            $($store,)*
            "mov {k}, [{r} + {A_STEP}]",
            "add [{r} + {A}], {k}",
            "mov {k}, [{r} + {B_STEP}]",
            "add [{r} + {B}], {k}",
            "mov {k}, [{r} + {C_STEP}]",
            "add [{r} + {C}], {k}",
            "dec qword ptr [{r} + {TILES}]",
            "jnz 2b",
            r = in(reg) $run,
            a = out(reg) _, a2 = out(reg) _, b = out(reg) _, c = out(reg) _, c2 = out(reg) _, k = out(reg) _, next = out(reg) _,
            a_row = out(reg) _, b_row = out(reg) _, c_row = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            A = const offset_of!(Run, a), B = const offset_of!(Run, b), C = const offset_of!(Run, c),
            A_ROW = const offset_of!(Run, a_row), C_ROW = const offset_of!(Run, c_row),
            A_HALF = const offset_of!(Run, a_half), C_HALF = const offset_of!(Run, c_half),
            A_STEP = const offset_of!(Run, a_step), B_STEP = const offset_of!(Run, b_step), C_STEP = const offset_of!(Run, c_step),
            GROUPS = const offset_of!(Run, groups), TILES = const offset_of!(Run, tiles), KEEP = const offset_of!(Run, keep),
            B_ROW = const NR * 4, STEP = const SIDE * 4, NR = const NR,
            options(nostack),
        )
    };
}

impl Run {
    /// # Safety
    /// The registers have these shapes, and the pointers reach as far as the numbers say.
    unsafe fn go(&mut self, shapes: &Shapes) {
        let (two_rows, two_columns) = (shapes.rows[2] > 0, shapes.rows[1] > 0);
        let run = std::ptr::from_mut(self);
        // SAFETY: passed on.
        unsafe {
            match (two_rows, two_columns) {
                (true, true) => run!(
                    run,
                    load: ["tileloadd tmm0, [{c} + {c_row}]" "tileloadd tmm1, [{c} + {c_row} + 64]"
                           "tileloadd tmm2, [{c2} + {c_row}]" "tileloadd tmm3, [{c2} + {c_row} + 64]"],
                    zero: ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"],
                    products: ["tileloadd tmm6, [{b} + {b_row}]" "tileloadd tmm4, [{a} + {a_row}]" "tdpbf16ps tmm0, tmm4, tmm6"
                               "tileloadd tmm7, [{b} + {b_row} + 64]" "tdpbf16ps tmm1, tmm4, tmm7"
                               "tileloadd tmm5, [{a2} + {a_row}]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"],
                    store: ["tilestored [{c} + {c_row}], tmm0" "tilestored [{c} + {c_row} + 64], tmm1"
                            "tilestored [{c2} + {c_row}], tmm2" "tilestored [{c2} + {c_row} + 64], tmm3"]
                ),
                (true, false) => run!(
                    run,
                    load: ["tileloadd tmm0, [{c} + {c_row}]" "tileloadd tmm2, [{c2} + {c_row}]"],
                    zero: ["tilezero tmm0" "tilezero tmm2"],
                    products: ["tileloadd tmm6, [{b} + {b_row}]" "tileloadd tmm4, [{a} + {a_row}]" "tdpbf16ps tmm0, tmm4, tmm6"
                               "tileloadd tmm5, [{a2} + {a_row}]" "tdpbf16ps tmm2, tmm5, tmm6"],
                    store: ["tilestored [{c} + {c_row}], tmm0" "tilestored [{c2} + {c_row}], tmm2"]
                ),
                (false, true) => run!(
                    run,
                    load: ["tileloadd tmm0, [{c} + {c_row}]" "tileloadd tmm1, [{c} + {c_row} + 64]"],
                    zero: ["tilezero tmm0" "tilezero tmm1"],
                    products: ["tileloadd tmm6, [{b} + {b_row}]" "tileloadd tmm4, [{a} + {a_row}]" "tdpbf16ps tmm0, tmm4, tmm6"
                               "tileloadd tmm7, [{b} + {b_row} + 64]" "tdpbf16ps tmm1, tmm4, tmm7"],
                    store: ["tilestored [{c} + {c_row}], tmm0" "tilestored [{c} + {c_row} + 64], tmm1"]
                ),
                (false, false) => run!(
                    run,
                    load: ["tileloadd tmm0, [{c} + {c_row}]"],
                    zero: ["tilezero tmm0"],
                    products: ["tileloadd tmm6, [{b} + {b_row}]" "tileloadd tmm4, [{a} + {a_row}]" "tdpbf16ps tmm0, tmm4, tmm6"],
                    store: ["tilestored [{c} + {c_row}], tmm0"]
                ),
            }
        }
    }
}

/// Products of a block: arguments as those of `multiply_block_at`, all in numbers or slots. The left operand lies in rows.
#[derive(Clone, Copy)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub slots: usize,
    pub a: *const u32,
    pub a_row_stride: usize,
    pub a_tile_stride: usize,
    pub b: *const u32,
    pub c: *mut f32,
    pub c_row_stride: usize,
    pub accumulate: bool,
}

/// # Safety
/// AMX is `available`; the pointers reach as far as the numbers say, and nobody else touches C meanwhile.
pub unsafe fn multiply(p: Product) {
    let mut registers = Registers::default();
    // SAFETY (of all below): rows and slots are inside the operands, by the caller's word.
    unsafe {
        if p.slots == 0 && !p.accumulate {
            (0..p.m).for_each(|r| p.c.add(r * p.c_row_stride).write_bytes(0, p.n));
        }
        if p.n <= NR {
            // One panel: down the rows.
            p.strip(&mut registers, p.m, p.a, p.c, (p.a_tile_stride * 4, 0, MR * p.c_row_stride * 4));
            return;
        }
        for i in (0..p.m).step_by(MR) {
            let (a, c) = (p.a.add(i / MR * p.a_tile_stride), p.c.add(i * p.c_row_stride));
            p.strip(&mut registers, MR.min(p.m - i), a, c, (0, p.slots * NR * 4, NR * 4));
        }
    }
}

/// Products of registers alone, to measure how fast the units are: `PRODUCTS` in each iteration, of tiles full of `a` and `b`
/// (bfloat16 bits). One number of the sum.
///
/// # Safety
/// AMX is `available`.
pub unsafe fn products_of_registers(iterations: u64, a: u16, b: u16) -> f32 {
    let [a, b] = [a, b].map(|x| [x; SIDE * SIDE * 2]);
    let mut sums = [[0f32; SIDE * SIDE]; 4];
    let mut registers = Registers::default();
    // SAFETY: the arrays are whole tiles.
    unsafe {
        registers.shape(Shapes::new(MR, NR, SIDE));
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "tileloadd tmm4, [{a} + {row}]", "tileloadd tmm5, [{a} + {row}]",
            "tileloadd tmm6, [{b} + {row}]", "tileloadd tmm7, [{b} + {row}]",
            "test {n}, {n}",
            "jz 3f",
            "2:",
            ".rept {rounds}",
            "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
            ".endr",
            "dec {n}",
            "jnz 2b",
            "3:",
            "tilestored [{c} + {row}], tmm0", "tilestored [{c} + {row} + 1024], tmm1",
            "tilestored [{c} + {row} + 2048], tmm2", "tilestored [{c} + {row} + 3072], tmm3",
            a = in(reg) a.as_ptr(),
            b = in(reg) b.as_ptr(),
            c = in(reg) sums.as_mut_ptr(),
            row = in(reg) SIDE * 4,
            rounds = const PRODUCTS / 4,
            n = inout(reg) iterations => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
    sums.iter().map(|sum| sum[0]).sum()
}

/// Of `products_of_registers`, in an iteration.
pub const PRODUCTS: usize = 12;
/// FLOP of one.
pub const PRODUCT_FLOPS: usize = SIDE * SIDE * 2 * SIDE * 2;

impl Product {
    /// Tiles along one direction: all columns of at most `MR` rows, or `m` rows of at most `NR` columns. `step` (bytes of A, B and C)
    /// leads from one to the next. The last tile may be a smaller one, and a last group of slots that is short goes over the tiles
    /// once more.
    ///
    /// # Safety
    /// As of `multiply`, for rows of `a` and `c`.
    unsafe fn strip(&self, registers: &mut Registers, m: usize, a: *const u32, c: *mut f32, step: (usize, usize, usize)) {
        let down = self.n <= NR;
        let whole = if down { m / MR } else { self.n / NR };
        let (tile, last) = if down { ((MR, self.n), (m % MR, self.n)) } else { ((m, NR), (m, self.n % NR)) };
        let (groups, rest) = (self.slots / SIDE, self.slots % SIDE);
        for (from, tiles, (m, n)) in [(0, whole, tile), (whole, 1, last)] {
            for (first, groups, slots) in [(0, groups, SIDE), (groups * SIDE, 1, rest)] {
                if tiles * groups * slots * m * n == 0 {
                    continue;
                }
                // SAFETY: AMX is available.
                let shapes = unsafe { registers.shape(Shapes::new(m, n, slots)) };
                let mut run = Run {
                    // SAFETY (of these three): inside the operands, as the caller says.
                    a: unsafe { a.add(first).byte_add(from * step.0) },
                    b: unsafe { self.b.add(first * NR).byte_add(from * step.1) },
                    c: unsafe { c.byte_add(from * step.2) },
                    a_row: self.a_row_stride * 4,
                    c_row: self.c_row_stride * 4,
                    a_half: self.a_row_stride * 4 * SIDE,
                    c_half: self.c_row_stride * 4 * SIDE,
                    a_step: step.0,
                    b_step: step.1,
                    c_step: step.2,
                    groups,
                    tiles,
                    keep: usize::from(self.accumulate || first > 0),
                };
                // SAFETY: passed on.
                unsafe { run.go(shapes) };
            }
        }
    }
}

//! What a decoded instruction looks like. Decoded once when a module is loaded; nothing here is text.

use super::names::{AtomicOp, CarryOp, MatrixOp, NarrowOp, PackedOp, ScalarCompare, ScalarOp, WideOp};

/// Numbers of special scalar registers.
pub const VCC: u8 = 106;
pub const M0: u8 = 124;
pub const EXEC: u8 = 126;
/// Accumulation registers follow the 256 ordinary vector registers.
pub const FIRST_ACCUMULATION_REGISTER: u16 = 256;
/// High half of a flat address that means LDS.
pub const SHARED_APERTURE: u32 = 0x0001_0000;

/// Where a value comes from. A 64-bit value takes two neighbouring registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    Vector(u16),
    Scalar(u8),
    Literal(u64),
    Scc,
    VccIsZero,
    ExecIsZero,
}

/// Part of a 32-bit value that an SDWA operand selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Whole,
    Byte(u8),
    Word(u8),
}

/// A source with its modifiers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    pub source: Source,
    pub negate: bool,
    pub absolute: bool,
    pub part: Part,
    pub sign_extend: bool,
}

impl Operand {
    pub fn new(source: Source) -> Self {
        Self { source, negate: false, absolute: false, part: Part::Whole, sign_extend: false }
    }

    pub fn is_plain(&self) -> bool {
        !self.negate && !self.absolute && self.part == Part::Whole
    }
}

/// From which lane a DPP operand takes its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneControl {
    QuadPermute([u8; 4]),
    RowShiftLeft(u8),
    RowShiftRight(u8),
    RowRotateRight(u8),
    WaveShiftLeft,
    WaveRotateLeft,
    WaveShiftRight,
    WaveRotateRight,
    RowMirror,
    RowHalfMirror,
    RowBroadcast15,
    RowBroadcast31,
    RowNewBroadcast(u8),
}

/// Data-parallel primitives: the first source comes from other lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dpp {
    pub control: LaneControl,
    pub row_mask: u8,
    pub bank_mask: u8,
    /// A lane without a source lane gets 0 instead of keeping its old result.
    pub zero_invalid: bool,
}

/// What an SDWA instruction does with the bits outside the part that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unused {
    Pad,
    SignExtend,
    Preserve,
}

/// Modifiers of a vector instruction's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Output {
    pub dpp: Option<Dpp>,
    pub part: Part,
    pub unused: Unused,
    /// Clamp a float result to 0..=1.
    pub clamp: bool,
    /// Factor on a float result, 1 if none.
    pub scale: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Always,
    SccZero,
    SccOne,
    VccZero,
    VccNonZero,
    ExecZero,
    ExecNonZero,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    Never,
    Less,
    Equal,
    LessEqual,
    Greater,
    LessGreater,
    GreaterEqual,
    Ordered,
    Unordered,
    NotGreaterEqual,
    NotLessGreater,
    NotGreater,
    NotLessEqual,
    NotEqual,
    NotLess,
    Always,
    /// `v_cmp_class`: the second source is a mask of number classes.
    Class,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareType {
    F32,
    F64,
    I32,
    U32,
    I64,
    U64,
    I16,
    U16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Flat,
    Lds,
}

/// Which half of the destination register a 16-bit load writes, or which half a store reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    Whole,
    Low,
    High,
}

/// Address of a memory access: `vector` (+ `scalar`) + `offset` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub space: Space,
    pub vector: u16,
    /// With a scalar base the vector part is a 32-bit offset.
    pub scalar: Option<u8>,
    pub offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    Scalar {
        op: ScalarOp,
        dst: u8,
        a: Operand,
        b: Operand,
    },
    ScalarCompare {
        op: ScalarCompare,
        a: Operand,
        b: Operand,
    },
    ScalarLoad {
        dwords: u8,
        dst: u8,
        base: u8,
        index: Option<u8>,
        offset: i64,
    },
    /// Steps of a counter, which stands for both of the hardware's clocks.
    ReadClock {
        dst: u8,
    },
    /// A hardware register of which the emulator knows only that it reads as zero here (`XCC_ID`).
    ReadZero {
        dst: u8,
    },
    Branch {
        condition: Condition,
        target: u32,
    },
    /// `s_setpc_b64`, and with `link` `s_swappc_b64`.
    Jump {
        link: Option<u8>,
        to: u8,
    },
    Narrow {
        op: NarrowOp,
        dst: u16,
        sources: [Operand; 3],
        output: Output,
    },
    Wide {
        op: WideOp,
        dst: u16,
        sources: [Operand; 3],
    },
    Packed {
        op: PackedOp,
        dst: u16,
        sources: [Operand; 3],
        select_low: u8,
        select_high: u8,
        negate_low: u8,
        negate_high: u8,
    },
    /// The third source of additions with carry is the incoming mask.
    Carry {
        op: CarryOp,
        dst: u16,
        carry_out: u8,
        sources: [Operand; 3],
    },
    DivFmas {
        double: bool,
        dst: u16,
        sources: [Operand; 3],
    },
    Select {
        dst: u16,
        sources: [Operand; 2],
        mask: Operand,
        output: Output,
    },
    Compare {
        relation: Relation,
        kind: CompareType,
        dst: u8,
        sources: [Operand; 2],
        write_exec: bool,
    },
    ReadFirstLane {
        dst: u8,
        source: Operand,
    },
    ReadLane {
        dst: u8,
        source: Operand,
        lane: Operand,
    },
    WriteLane {
        dst: u16,
        value: Operand,
        lane: Operand,
    },
    SwapRegisters {
        a: u16,
        b: u16,
    },
    Matrix {
        op: MatrixOp,
        dst: u16,
        a: u16,
        b: u16,
        c: Operand,
    },
    Load {
        address: Address,
        dst: u16,
        bytes: u8,
        signed: bool,
        half: Half,
    },
    Store {
        address: Address,
        data: u16,
        bytes: u8,
        half: Half,
    },
    /// Two loads or stores of `bytes` at `offsets` (in bytes) from one LDS address.
    LoadPair {
        vector: u16,
        dst: u16,
        bytes: u8,
        offsets: [u32; 2],
    },
    StorePair {
        vector: u16,
        data: [u16; 2],
        bytes: u8,
        offsets: [u32; 2],
    },
    Atomic {
        address: Address,
        op: AtomicOp,
        data: u16,
        returns: Option<u16>,
    },
    /// `ds_bpermute_b32`: each lane names the lane that it reads from.
    PermuteBackward {
        dst: u16,
        index: u16,
        data: u16,
        offset: u32,
    },
    /// `ds_permute_b32`: each lane names the lane that it writes to.
    PermuteForward {
        dst: u16,
        index: u16,
        data: u16,
        offset: u32,
    },
    Swizzle {
        dst: u16,
        data: u16,
        pattern: u16,
    },
    Barrier,
    EndProgram,
    Trap,
    /// Waits, hints and cache control: nothing to do, as every access is done at once.
    Nothing,
    /// An error when reached. The text is in the module's listing.
    Unsupported,
}

/// Classes that launches count instructions by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Matrix,
    Vector,
    Scalar,
    Lds,
    VectorMemory,
    ScalarMemory,
    Control,
}

pub const CLASSES: usize = 7;
pub const CLASS_NAMES: [&str; CLASSES] = ["mfma", "valu", "salu", "lds", "vmem", "smem", "control"];

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Instruction {
    pub address: u64,
    pub class: Class,
    pub action: Action,
}

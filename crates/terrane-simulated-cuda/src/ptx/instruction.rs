//! Instructions, decoded.

/// The type of a number: its bits, and whether it is signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Type {
    pub is_signed: bool,
    pub bits: u32,
}

impl Type {
    /// The bits of a 64-bit number that a value of this type keeps.
    pub const fn cut(self, value: u64) -> u64 {
        if self.bits >= 64 { value } else { value & ((1 << self.bits) - 1) }
    }

    /// Extends a value of this type to 64 bits, with its sign.
    pub const fn widen(self, value: u64) -> u64 {
        let value = self.cut(value);
        let is_negative = self.is_signed && self.bits < 64 && value >> (self.bits - 1) & 1 == 1;
        if is_negative { value | !((1 << self.bits) - 1) } else { value }
    }

    pub const fn bytes(self) -> u64 {
        // A multiplication without a change of type.
        match self.bits {
            64 => 8,
            32 => 4,
            16 => 2,
            _ => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    Register(usize),
    Number(u64),
    Special(Special),
}

/// The position of a thread; the number is the dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Parameters,
    Global,
    Shared,
    Local,
}

/// An address: a register or number, and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub base: Operand,
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    /// The upper half of the product.
    MultiplyHigh,
    /// The product in twice the bits.
    MultiplyWide,
    Divide,
    Remainder,
    Least,
    Greatest,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    Not,
    Negate,
    Absolute,
    /// The number of set bits.
    Count,
    /// The number of leading zeros.
    Leading,
    Reverse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Equal,
    Unequal,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Move {
        to: usize,
        from: Operand,
        kind: Type,
    },
    /// Several registers into one, the lowest first.
    Pack {
        to: usize,
        from: Vec<Operand>,
        part: Type,
    },
    Unpack {
        to: Vec<usize>,
        from: Operand,
        part: Type,
    },
    Unary {
        operation: Unary,
        kind: Type,
        to: usize,
        from: Operand,
    },
    Binary {
        operation: Binary,
        kind: Type,
        to: usize,
        left: Operand,
        right: Operand,
    },
    /// A product of this kind, and a sum.
    MultiplyAdd {
        operation: Binary,
        kind: Type,
        to: usize,
        factors: [Operand; 2],
        summand: Operand,
    },
    /// Inserts bits of one value into another: the source, the target, the first bit, the number of
    /// bits.
    Insert {
        kind: Type,
        to: usize,
        from: [Operand; 4],
    },
    /// Extracts bits of a value: the source, the first bit, the number of bits.
    Extract {
        kind: Type,
        to: usize,
        from: [Operand; 3],
    },
    Compare {
        operation: Comparison,
        kind: Type,
        to: usize,
        opposite: Option<usize>,
        from: [Operand; 2],
    },
    Select {
        kind: Type,
        to: usize,
        from: [Operand; 2],
        by: Operand,
    },
    Convert {
        to_kind: Type,
        kind: Type,
        to: usize,
        from: Operand,
    },
    Load {
        memory: Memory,
        kind: Type,
        to: Vec<usize>,
        address: Address,
    },
    Store {
        memory: Memory,
        kind: Type,
        from: Vec<Operand>,
        address: Address,
    },
    /// Combines a value in memory with another one atomically.
    Atomic {
        operation: Binary,
        memory: Memory,
        kind: Type,
        /// The register for the previous value, if it is needed.
        to: Option<usize>,
        address: Address,
        from: Operand,
    },
    Branch(usize),
    Barrier,
    Exit,
    Trap,
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// The predicate register, and the value that it must have.
    pub guard: Option<(usize, bool)>,
    pub action: Action,
}

//! Pieces of text on their way from the splitter to the word cache.

/// Pieces of one batch: enough to hide the time that memory takes to answer, few enough to stay in the first-level cache.
pub const BATCH: usize = 512;

/// Pieces that [`Batch::push_ends`] writes at a time.
const GROUP: usize = 8;

/// A piece of text, or a token that is already known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Piece {
    /// First byte in the text; for `len` 0, the id of an added token.
    pub start: u32,
    /// Bytes.
    pub len: u32,
}

/// Up to [`BATCH`] pieces.
pub struct Batch {
    pieces: Box<[Piece; BATCH]>,
    count: usize,
}

impl Default for Batch {
    fn default() -> Self {
        Self { pieces: Box::new([Piece::default(); BATCH]), count: 0 }
    }
}

impl Batch {
    #[inline(always)]
    pub fn room(&self) -> usize {
        BATCH - self.count
    }

    #[inline(always)]
    pub fn push(&mut self, start: usize, len: usize) {
        self.pieces[self.count] = Piece { start: start as u32, len: len as u32 };
        self.count += 1;
    }

    pub fn push_token(&mut self, id: u32) {
        self.push(id as usize, 0);
    }

    /// Pieces of the text from `at` that end at the bits of `ends`, which tell of the bytes from `at` and do not have bit 0.
    /// There must be room for 64. Returns where the last one ends.
    #[inline(always)]
    pub fn push_ends(&mut self, at: usize, mut ends: u64) -> usize {
        let (groups, _) = self.pieces[self.count..][..64].as_chunks_mut::<GROUP>();
        self.count += ends.count_ones() as usize;
        let last = 63 - (ends | 1).leading_zeros() as usize;
        let mut start = 0;
        for group in groups {
            // Whole groups, as their number is foreseen more often than that of the ends; what is too much is written over later.
            for piece in group {
                let end = ends.trailing_zeros();
                *piece = Piece { start: at as u32 + start, len: end.wrapping_sub(start) };
                start = end;
                ends &= ends.wrapping_sub(1);
            }
            if ends == 0 {
                break;
            }
        }
        at + last
    }

    pub fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }

    pub fn clear(&mut self) {
        self.count = 0;
    }
}

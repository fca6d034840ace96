//! Cutting a buffer of scratch into its parts.

/// f32 numbers in a cache line.
const LINE: usize = 16;

/// Length of a part after which the next one starts at a multiple of a cache line.
pub fn aligned(len: usize) -> usize {
    len.next_multiple_of(LINE)
}

/// Cuts the next `len` numbers off.
pub fn cut<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (part, tail) = std::mem::take(rest).split_at_mut(len);
    *rest = tail;
    part
}

/// As `cut`, leaving the rest aligned as the whole was: takes `aligned(len)`.
pub fn cut_aligned<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    &mut cut(rest, aligned(len))[..len]
}

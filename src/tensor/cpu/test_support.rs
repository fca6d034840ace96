//! What tests of several kernels need.

use super::packed::{Core, Layout, Source, pack_all};

/// Numbers that look random, from -1 to 1.
pub fn series(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2654435761).wrapping_add(12345);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..n).map(next).collect()
}

/// Runs `f` on a pool of so many threads.
pub fn on<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    super::par::pool(Some(threads)).unwrap().install(f)
}

/// `source` `[k, n]` as a packed right operand, in room that held something else.
pub fn pack_right(core: &Core, source: Source, k: usize, n: usize) -> (Layout, Vec<u32>) {
    let layout = Layout::new(core, k, n);
    let mut data = vec![u32::MAX; layout.len()];
    pack_all(core, layout, source, &mut data);
    (layout, data)
}

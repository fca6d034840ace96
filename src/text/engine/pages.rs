//! Large tables on large pages, where the system gives them: a look at a random place then seldom misses the page table too.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Zeroable;
use memmap2::MmapMut;

/// Of most systems with 4 KiB pages.
const LARGE_PAGE: usize = 2 << 20;

/// A table that begins as zeros.
///
/// The memory comes from the system itself: what the allocator hands out again has small pages already, and advice comes too late.
pub struct Pages<T> {
    start: NonNull<T>,
    count: usize,
    _owner: Owner<T>,
}

enum Owner<T> {
    Small(#[expect(dead_code, reason = "owns what `start` points to")] Vec<T>),
    Large(#[expect(dead_code, reason = "owns what `start` points to")] MmapMut),
}

// SAFETY: a table owns its memory, like a `Vec`.
unsafe impl<T: Send> Send for Pages<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Pages<T> {}

impl<T: Zeroable> Pages<T> {
    pub fn zeroed(count: usize) -> Self {
        Self::large(count).unwrap_or_else(|| {
            let mut table: Vec<T> = std::iter::repeat_with(T::zeroed).take(count).collect();
            let start = NonNull::new(table.as_mut_ptr()).unwrap_or(NonNull::dangling());
            Self { start, count, _owner: Owner::Small(table) }
        })
    }

    /// None for small tables, and where the system has no such memory.
    fn large(count: usize) -> Option<Self> {
        let bytes = count * size_of::<T>();
        if bytes < LARGE_PAGE || align_of::<T>() > LARGE_PAGE {
            return None;
        }
        // With room to start where a large page does. What is never touched takes no memory.
        let mut map = MmapMut::map_anon(bytes + LARGE_PAGE).ok()?;
        #[cfg(target_os = "linux")]
        // That it may fail is no matter.
        let _ = map.advise(memmap2::Advice::HugePage);
        let skip = map.as_ptr().align_offset(LARGE_PAGE).min(LARGE_PAGE);
        let start = NonNull::new(map[skip..].as_mut_ptr().cast())?;
        Some(Self { start, count, _owner: Owner::Large(map) })
    }
}

impl<T> Deref for Pages<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `owner` has `count` values from `start` on, aligned, all set (zeros are values, as `Zeroable` says), and lends
        // them to nobody else. Moving it does not move them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T> DerefMut for Pages<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_every_size_are_zeros_and_keep_what_is_written() {
        for count in [0, 1, 1000, LARGE_PAGE / 32, LARGE_PAGE / 32 + 1, LARGE_PAGE / 4] {
            let mut table = Pages::<[u64; 4]>::zeroed(count);
            assert_eq!(table.len(), count);
            assert!(table.iter().all(|slot| *slot == [0; 4]));
            table.iter_mut().enumerate().for_each(|(i, slot)| *slot = [i as u64; 4]);
            let table = table;
            assert!(table.iter().enumerate().all(|(i, slot)| *slot == [i as u64; 4]));
        }
    }
}

//! What of a kernel's accesses would pass the second-level caches of an MI300X: one for each of eight chiplets, 4 MiB, 16 ways, lines of
//! 128 bytes (CDNA 3 white paper); least recently used lines leave first. Workgroups go to the chiplets in turn.
//!
//! A model, for counting bytes: workgroups run one after the other here, so lines that workgroups of one chiplet share are found more
//! often than where they run at once. Lines that a launch wrote are written back at its end. The caches are empty when it begins.

const CHIPLETS: usize = 8;
const LINE: u64 = 128;
const WAYS: usize = 16;
const SETS: u64 = (4 << 20) / LINE / WAYS as u64;

/// Lines of one set, the one that was used last in front.
#[derive(Clone, Default)]
struct Set {
    lines: Vec<Line>,
}

#[derive(Clone, Copy)]
struct Line {
    number: u64,
    dirty: bool,
}

/// The caches of all chiplets during one launch.
pub struct Caches {
    sets: Vec<Set>,
    chiplet: usize,
    /// The line that was used last, and whether it was written: neighbouring lanes mostly ask for the same.
    last: Option<Line>,
    /// Bytes that came from behind the caches, and that went there, in whole lines.
    pub bytes_read: u64,
    pub bytes_written: u64,
}

impl Caches {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let sets = vec![Set::default(); CHIPLETS * SETS as usize];
        // The first workgroup makes it 0.
        Self { sets, chiplet: CHIPLETS - 1, last: None, bytes_read: 0, bytes_written: 0 }
    }

    /// The next workgroup begins, on the next chiplet.
    pub fn next_workgroup(&mut self) {
        self.chiplet = (self.chiplet + 1) % CHIPLETS;
        self.last = None;
    }

    /// One lane reads or writes `bytes` at `address`.
    #[inline]
    pub fn access(&mut self, address: u64, bytes: u64, write: bool) {
        for number in address / LINE..=(address + bytes - 1) / LINE {
            if self.last.is_none_or(|last| last.number != number || write && !last.dirty) {
                self.touch(number, write);
            }
        }
    }

    fn touch(&mut self, number: u64, write: bool) {
        let set = &mut self.sets[self.chiplet * SETS as usize + (number % SETS) as usize].lines;
        let line = match set.iter().position(|line| line.number == number) {
            Some(place) => set.remove(place),
            None => {
                if set.len() == WAYS && set.pop().is_some_and(|line| line.dirty) {
                    self.bytes_written += LINE;
                }
                // A line that is written first need not be read: the cache masks bytes.
                self.bytes_read += if write { 0 } else { LINE };
                Line { number, dirty: false }
            }
        };
        let line = Line { dirty: line.dirty || write, ..line };
        set.insert(0, line);
        self.last = Some(line);
    }

    /// Writes back what was written.
    pub fn flush(&mut self) {
        let dirty = self.sets.iter_mut().flat_map(|set| set.lines.drain(..)).filter(|line| line.dirty).count();
        self.bytes_written += dirty as u64 * LINE;
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_read_once_by_a_chiplet_and_written_once() {
        let mut caches = Caches::new();
        for workgroup in 0..16 {
            caches.next_workgroup();
            for lane in 0..64 {
                // All workgroups read the same kilobyte, and write one of their own.
                caches.access(lane * 16, 16, false);
                caches.access((1 << 20) | (workgroup << 10) | (lane * 16), 16, true);
            }
        }
        caches.flush();
        assert_eq!((caches.bytes_read, caches.bytes_written), (8 << 10, 16 << 10));
    }

    #[test]
    fn what_does_not_fit_is_read_again() {
        let mut caches = Caches::new();
        caches.next_workgroup();
        for _ in 0..2 {
            (0..(8 << 20) / LINE).for_each(|line| caches.access(line * LINE, 4, line % 2 == 0));
        }
        caches.flush();
        // In order through twice the capacity nothing is ever found again.
        assert_eq!((caches.bytes_read, caches.bytes_written), (8 << 20, 8 << 20));
    }

    #[test]
    fn an_access_over_a_border_takes_both_lines() {
        let mut caches = Caches::new();
        caches.next_workgroup();
        caches.access(120, 16, false);
        assert_eq!(caches.bytes_read, 2 * LINE);
    }
}

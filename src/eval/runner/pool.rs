//! Which rows of the pools of keys and values are taken, and which states.

use std::ops::Range;

/// Rows, given out in ranges as long as there are.
#[derive(Debug)]
pub struct Pool {
    /// By place, no two of them adjacent.
    free: Vec<Range<usize>>,
    used: usize,
    rows: usize,
    peak: usize,
}

impl Pool {
    pub fn new(rows: usize) -> Self {
        Self { free: std::iter::once(0..rows).filter(|r| !r.is_empty()).collect(), used: 0, rows, peak: 0 }
    }

    pub fn free(&self) -> usize {
        self.rows - self.used
    }

    /// Most rows that were taken at a time.
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// `n` rows: one range where one is long enough (the first such), else the first that there are. At most `free()`.
    pub fn take(&mut self, n: usize) -> Vec<Range<usize>> {
        assert!(n <= self.free(), "{n} rows of {} free ones", self.free());
        self.used += n;
        self.peak = self.peak.max(self.used);
        let (mut taken, mut missing) = (Vec::new(), n);
        let mut at = self.free.iter().position(|r| r.len() >= n).unwrap_or(0);
        while missing > 0 {
            let range = &mut self.free[at];
            let part = range.start..range.start + missing.min(range.len());
            range.start = part.end;
            if range.start == range.end {
                self.free.remove(at);
            } else {
                at += 1;
            }
            missing -= part.len();
            taken.push(part);
        }
        taken
    }

    /// Takes rows back.
    pub fn give_back(&mut self, ranges: &[Range<usize>]) {
        for range in ranges.iter().filter(|r| !r.is_empty()) {
            self.used -= range.len();
            let at = self.free.partition_point(|r| r.start < range.start);
            self.free.insert(at, range.clone());
            // With the neighbours that it touches.
            if self.free.get(at + 1).is_some_and(|next| next.start == range.end) {
                self.free[at].end = self.free.remove(at + 1).end;
            }
            if at > 0 && self.free[at - 1].end == range.start {
                self.free[at - 1].end = self.free.remove(at).end;
            }
        }
    }
}

/// Appends `range` to a list of ranges, one with the last where they touch.
pub fn append(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// Numbers of states from `first` on, the lowest free one first.
#[derive(Debug)]
pub struct States {
    free: Vec<usize>,
    next: usize,
}

impl States {
    pub fn from(first: usize) -> Self {
        Self { free: Vec::new(), next: first }
    }

    pub fn take(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    pub fn give_back(&mut self, state: usize) {
        self.free.push(state);
    }

    /// Above all numbers that were ever given out.
    pub fn end(&self) -> usize {
        self.next
    }
}

#[cfg(test)]
// Lists of one range are meant.
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_given_out_once_and_come_back_whole() {
        let mut pool = Pool::new(10);
        let (a, b, c) = (pool.take(3), pool.take(4), pool.take(3));
        assert_eq!((&a[..], &b[..], &c[..], pool.free()), (&[0..3][..], &[3..7][..], &[7..10][..], 0));
        pool.give_back(&a);
        pool.give_back(&c);
        assert_eq!(pool.take(5), [0..3, 7..9]);
        pool.give_back(&[0..3, 7..9]);
        pool.give_back(&b);
        assert_eq!(pool.take(10), [0..10]);
        assert_eq!(pool.peak(), 10);
        assert!(Pool::new(0).take(0).is_empty());
    }

    #[test]
    fn states_are_used_again() {
        let mut states = States::from(1);
        assert_eq!([states.take(), states.take()], [1, 2]);
        states.give_back(1);
        assert_eq!((states.take(), states.take(), states.end()), (1, 3, 4));
    }
}

//! The numbers of a tensor as a stream, so that what goes from one file to another never lies in memory whole.

use anyhow::Result;

/// Numbers that are held at a time: 16 MiB in f32.
pub const PIECE: usize = 4 << 20;

/// A tensor from its first number to its last: each call fills the buffer with the numbers that follow. Asked for none, it checks
/// what there is to check of those before.
pub type Numbers<'a> = Box<dyn FnMut(&mut [f32]) -> Result<()> + 'a>;

/// Shows the next `count` numbers, at most [`PIECE`] of them at a time. `buffer` is where they lie meanwhile.
///
/// # Errors
/// What reading and `visit` fail with.
pub fn each_piece(
    numbers: &mut Numbers,
    count: usize,
    buffer: &mut Vec<f32>,
    visit: &mut dyn FnMut(&[f32]) -> Result<()>,
) -> Result<()> {
    let mut left = count;
    loop {
        let n = left.min(PIECE);
        if buffer.len() < n {
            buffer.resize(n, 0.0);
        }
        let piece = &mut buffer[..n];
        numbers(piece)?;
        visit(piece)?;
        left -= n;
        if left == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_bounded_and_in_order() {
        let count = 2 * PIECE + 3;
        let mut next = 0u32;
        let mut numbers: Numbers = Box::new(|out| {
            for x in out {
                *x = (next % 1000) as f32;
                next += 1;
            }
            Ok(())
        });
        let (mut sizes, mut at, mut right, mut buffer) = (Vec::new(), 0u32, true, Vec::new());
        let mut visit = |piece: &[f32]| {
            sizes.push(piece.len());
            for x in piece {
                right &= *x == (at % 1000) as f32;
                at += 1;
            }
            Ok(())
        };
        each_piece(&mut numbers, count, &mut buffer, &mut visit).unwrap();
        assert!(right);
        assert_eq!((sizes, buffer.len()), (vec![PIECE, PIECE, 3], PIECE));
        // Of nothing, the source is asked all the same: a hash may be due.
        let mut asked = 0;
        let mut nothing: Numbers = Box::new(|_| {
            asked += 1;
            Ok(())
        });
        each_piece(&mut nothing, 0, &mut Vec::new(), &mut |_| Ok(())).unwrap();
        drop(nothing);
        assert_eq!(asked, 1);
    }
}

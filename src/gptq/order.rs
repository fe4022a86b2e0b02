//! The order in which columns are taken, written from last to first.

use crate::kernels::cholesky::BLOCK;

/// Positions 0..n hold columns so that the *last* position is taken first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Natural column number at each position.
    pub column: Vec<u32>,
}

impl Order {
    pub fn len(&self) -> usize {
        self.column.len()
    }

    pub fn is_empty(&self) -> bool {
        self.column.is_empty()
    }

    /// First column to last.
    pub fn natural(n: usize) -> Self {
        Self { column: (0..n as u32).rev().collect() }
    }

    /// By falling diag(H); equal ones by column number.
    pub fn descending(diagonal: &[f32]) -> Self {
        let mut column: Vec<u32> = (0..diagonal.len() as u32).collect();
        column.sort_by(|&a, &b| diagonal[b as usize].total_cmp(&diagonal[a as usize]));
        column.reverse();
        Self { column }
    }

    /// The how-many-th a position is taken: 0 for the last position.
    pub fn turn(&self, position: usize) -> usize {
        self.column.len() - 1 - position
    }

    /// Blocks of positions, first to last, so that turns are cut into 128, 128, …, rest as the
    /// original program cuts them: a short block can only be the first in position.
    pub fn blocks(n: usize) -> Vec<(usize, usize)> {
        let mut blocks = Vec::new();
        let mut end = n;
        while end > 0 {
            let start = end.saturating_sub(BLOCK);
            blocks.push((start, end));
            end = start;
        }
        blocks.reverse();
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_positions_and_only_the_first_is_short() {
        assert_eq!(Order::blocks(320), [(0, 64), (64, 192), (192, 320)]);
        assert_eq!(Order::blocks(128), [(0, 128)]);
        assert_eq!(Order::blocks(5), [(0, 5)]);
    }

    #[test]
    fn the_column_with_the_largest_diagonal_is_taken_first() {
        let order = Order::descending(&[1.0, 5.0, 3.0, 5.0]);
        assert_eq!(order.column, [0, 2, 3, 1]);
        assert_eq!(order.turn(3), 0);
    }
}

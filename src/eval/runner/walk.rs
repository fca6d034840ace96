//! The depth-first walk over a trie that fills batches. Keys, values and states of the path to the next token stay, and no others:
//! each token goes through the model once, in memory for one path and one batch.

use std::ops::Range;
use std::rc::Rc;

use super::pool::{Pool, States, append};
use super::trie::{ROOT, Trie};
use crate::model::tree::{KeptState, START, TreeStep};
use crate::tensor::tree::{Before, Segment};

/// Rows of the pools that hold a node's keys and values. Whoever lets go of them last gives them back.
pub type Held = Rc<Vec<Range<usize>>>;

/// Lets go of rows.
pub fn release(held: Held, pool: &mut Pool) {
    if let Some(rows) = Rc::into_inner(held) {
        pool.give_back(&rows);
    }
}

/// The last two tokens of a sequence, the nearer first: in a batch, or as a state.
#[derive(Debug, Clone, Copy)]
pub struct Tail(pub [Before; 2]);

impl Tail {
    pub fn of_state(state: usize) -> Self {
        Self([Before::Halo(2 * state + 1), Before::Halo(2 * state)])
    }

    /// After `n` more rows, the first of them row `row` of the batch.
    pub fn after(self, row: usize, n: usize) -> Self {
        Self([Before::Row(row + n - 1), if n > 1 { Before::Row(row + n - 2) } else { self.0[0] }])
    }

    /// What keeps it as `state`; none of a tail that is a state already.
    pub fn keep(self, state: usize) -> Option<KeptState> {
        match self.0 {
            [Before::Row(last), before] => Some(KeptState { state, last, before }),
            _ => None,
        }
    }
}

/// A node on the path.
struct Frame {
    node: usize,
    /// Tokens computed.
    done: usize,
    next_child: usize,
    rows: Held,
    tail: Tail,
    /// The state that holds `tail`, if it is this frame's to give back.
    state: Option<usize>,
}

/// A part of a node in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    pub node: usize,
    /// Tokens of the node before it.
    pub offset: usize,
    pub len: usize,
    /// Its first row in the batch.
    pub row: usize,
}

/// A sequence on which requests end, whose last row is in the batch.
#[derive(Debug)]
pub struct Ended {
    pub node: usize,
    pub row: usize,
    pub tail: Tail,
    pub held: Vec<Held>,
    pub keys: Vec<Range<usize>>,
}

pub struct Walk<'t> {
    trie: &'t Trie,
    path: Vec<Frame>,
    /// Rows and states to let go of after the batch.
    dead_rows: Vec<Held>,
    dead_states: Vec<usize>,
}

impl<'t> Walk<'t> {
    pub fn new(trie: &'t Trie) -> Self {
        let tail = Tail::of_state(START);
        let root = Frame { node: ROOT, done: 0, next_child: 0, rows: Held::default(), tail, state: None };
        let mut walk = Self { trie, path: vec![root], dead_rows: Vec::new(), dead_states: Vec::new() };
        walk.retire();
        walk
    }

    pub fn is_done(&self) -> bool {
        self.path.is_empty()
    }

    /// Adds up to `room` rows to `step`; fewer only at the end of the walk and where the pool has no more than `reserved` left.
    pub fn fill(&mut self, room: usize, reserved: usize, pool: &mut Pool, step: &mut TreeStep) -> Vec<Piece> {
        self.fill_with_ends(room, reserved, pool, step, &mut |_| 0)
    }

    /// As `fill`. `on_end` is told of every node that requests end on; the rows that these will need are reserved from then on.
    pub fn fill_with_ends(
        &mut self,
        room: usize,
        mut reserved: usize,
        pool: &mut Pool,
        step: &mut TreeStep,
        on_end: &mut dyn FnMut(Ended) -> usize,
    ) -> Vec<Piece> {
        let end = step.ids.len() + room;
        let mut pieces = Vec::new();
        while step.ids.len() < end
            && let Some(top) = self.path.last_mut()
        {
            let node = &self.trie.nodes[top.node];
            if top.done == node.tokens.len() {
                // `retire` left only frames with another child.
                let (child, tail) = (node.children[top.next_child], top.tail);
                top.next_child += 1;
                self.path.push(Frame { node: child, done: 0, next_child: 0, rows: Held::default(), tail, state: None });
                continue;
            }
            let free = pool.free().saturating_sub(reserved);
            let n = (end - step.ids.len()).min(node.tokens.len() - top.done).min(free);
            if n == 0 {
                break;
            }
            let piece = self.extend(n, pool, step);
            pieces.push(piece);
            if piece.offset + piece.len == node.tokens.len() && !node.ends.is_empty() {
                reserved += on_end(self.ended(piece));
            }
            self.retire();
        }
        self.retire();
        pieces
    }

    /// The path, which ends with `piece`.
    fn ended(&self, piece: Piece) -> Ended {
        let tail = self.path.last().map_or(Tail::of_state(START), |f| f.tail);
        let held = self.path.iter().map(|f| f.rows.clone()).collect();
        Ended { node: piece.node, row: piece.row + piece.len - 1, tail, held, keys: self.keys() }
    }

    /// Rows of the pools of the whole path.
    fn keys(&self) -> Vec<Range<usize>> {
        let mut keys = Vec::new();
        self.path.iter().flat_map(|f| f.rows.iter()).for_each(|range| append(&mut keys, range.clone()));
        keys
    }

    /// Adds the next `n` tokens of the last node on the path.
    fn extend(&mut self, n: usize, pool: &mut Pool, step: &mut TreeStep) -> Piece {
        let last = self.path.len() - 1;
        let top = &mut self.path[last];
        let node = &self.trie.nodes[top.node];
        let (row, offset, before) = (step.ids.len(), top.done, top.tail);
        step.ids.extend_from_slice(&self.trie.tokens[node.tokens.clone()][offset..offset + n]);
        // Nobody else holds the rows of a node that is not complete.
        let rows = Rc::make_mut(&mut top.rows);
        for range in pool.take(n) {
            step.keys_to.extend(range.clone().map(|r| r as u32));
            append(rows, range);
        }
        top.done += n;
        top.tail = before.after(row, n);
        self.dead_states.extend(top.state.take());
        let position = node.position + offset;
        let keys = self.keys();
        step.tree.segments.push(Segment { rows: row..row + n, position, before: before.0, keys });
        Piece { node: self.path[last].node, offset, len: n, row }
    }

    /// Takes nodes off the path that nothing follows.
    fn retire(&mut self) {
        while let Some(top) = self.path.last() {
            let node = &self.trie.nodes[top.node];
            if top.done < node.tokens.len() || top.next_child < node.children.len() {
                break;
            }
            if let Some(top) = self.path.pop() {
                self.dead_rows.push(top.rows);
                self.dead_states.extend(top.state);
            }
        }
    }

    /// Has `step` keep what the walk goes on from after it.
    pub fn keep(&mut self, states: &mut States, step: &mut TreeStep) {
        let last = self.path.len().saturating_sub(1);
        for (i, frame) in self.path.iter_mut().enumerate() {
            // Only the last can be incomplete, and of the others only those with another child are come back to.
            let resumed = i == last || frame.next_child < self.trie.nodes[frame.node].children.len();
            if resumed && matches!(frame.tail.0[0], Before::Row(_)) {
                let state = states.take();
                step.keep.extend(frame.tail.keep(state));
                (frame.tail, frame.state) = (Tail::of_state(state), Some(state));
            }
        }
    }

    /// After the batch was computed: lets go of what the walk is through with.
    pub fn let_go(&mut self, pool: &mut Pool, states: &mut States) {
        self.dead_rows.drain(..).for_each(|held| release(held, pool));
        self.dead_states.drain(..).for_each(|state| states.give_back(state));
    }
}

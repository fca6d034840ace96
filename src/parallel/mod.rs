//! Training on many ranks: engines that carry messages, collectives, and what is shared by whom.
//!
//! From the ground up: [`transport`] says what an engine offers, [`threads`] is one; [`group`] has the collectives, [`tree`] the order
//! of their sums; [`mesh`] says which ranks work together. On these stand the kinds of parallelism: [`zero`] and [`exchange`] (who
//! owns what, and how gradients and weights travel), [`context`], [`experts`]. [`sharing`] is what the training step sees of it all.

pub mod background;
pub mod bucket;
pub mod carrier;
pub mod context;
pub mod exchange;
pub mod experts;
pub mod forest;
pub mod group;
mod head;
pub mod launch;
pub mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod rccl;
pub mod sharing;
pub mod threads;
pub mod together;
pub mod transport;
pub mod tree;
pub mod zero;

pub use context::{Cut, Cutting};
pub use group::{Comm, Group, Stages};
pub use mesh::{Layout, Mesh};
pub use sharing::{Alone, Sharing};
pub use together::Together;
pub use transport::{Channel, PeerFailed, Place, Transport};
pub use zero::Ownership;

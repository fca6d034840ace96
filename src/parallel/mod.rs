//! Training on many ranks: engines that carry messages, collectives, and what is shared by whom.

pub mod group;
pub mod mesh;
pub mod threads;
pub mod transport;
pub mod tree;

pub use group::{Comm, Group, Stages};
pub use mesh::{Layout, Mesh};
pub use transport::{Channel, PeerFailed, Place, Transport};

//! Token shards, mixtures, sample order, loader.
//!
//! [`build`] turns text into shards (`zaya tokenize`). [`loader::Loader`] hands out training batches as a pure function
//! of seed and step; [`validation::ValidationSet`] walks held-out shards once, in order. What lies between:
//!
//! | module | holds |
//! |---|---|
//! | [`shard`], [`writer`], [`sidecar`] | one `.bin`/`.idx` pair with its `.json`: reading and writing |
//! | [`mask`] | which tokens of a shard of conversations are learnt |
//! | [`companions`] | files beside it for other programs |
//! | [`manifest`] | several shards that one run of `zaya tokenize` wrote |
//! | [`upkeep`] | verifying, merging and measuring shards |
//! | [`dataset`] | several shards read as one row of documents |
//! | [`order`] | bijective shuffles and the hash under them |
//! | [`source`], [`best_fit`] | the endless training samples of one dataset: windows of a stream, or whole examples |
//! | [`mixture`] | which source gives the next sample |
//! | [`loader`], [`validation`] | batches |

pub mod best_fit;
pub mod build;
pub mod companions;
pub mod dataset;
pub mod loader;
pub mod manifest;
pub mod mask;
pub mod mixture;
pub mod order;
pub mod shard;
pub mod sidecar;
pub mod source;
pub mod upkeep;
pub mod validation;
pub mod writer;

pub use loader::{Loader, LoaderConfig, SourceSpec};
pub use mixture::MixtureState;
pub use validation::ValidationSet;

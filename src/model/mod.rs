//! The ZAYA model: its shape, its one table of parameters, its layers, and the candle reference that judges them.

pub mod attention;
pub mod config;
pub mod cx;
pub mod init;
pub mod merge;
pub mod moe;
pub mod numbers;
pub mod params;
pub mod peers;
pub mod presets;
pub mod reference;
pub mod stack;
pub mod store;
pub mod tree;

pub use config::ModelConfig;
pub use cx::{Cx, Probe};
pub use params::{ParamId, ParamTable};
pub use stack::Model;
pub use store::ParamStore;

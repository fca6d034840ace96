//! The ZAYA model: its shape, its one table of parameters, its layers, and the candle reference that judges them.

pub mod config;
pub mod params;
pub mod presets;
pub mod reference;

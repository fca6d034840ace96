//! RCCL's C declarations, as far as they are used, under their C names.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

mod functions;
mod types;

pub use functions::*;
pub use types::*;

use hip_sys::declare::Interface;

/// What is declared here, for comparison with AMD's own declarations.
pub fn interface() -> Interface {
    Interface {
        library: "rccl",
        constants: types::CONSTANTS,
        enumerations: types::ENUMERATIONS.to_vec(),
        structures: types::STRUCTURES.to_vec(),
        aliases: types::ALIASES.to_vec(),
        functions: functions::FUNCTIONS.to_vec(),
    }
}

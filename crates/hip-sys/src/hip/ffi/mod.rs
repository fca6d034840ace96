//! HIP's C declarations, as far as they are used, under their C names.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

mod enums;
mod functions;
mod structs;

pub use enums::*;
pub use functions::*;
pub use structs::*;

use crate::declare::Interface;

/// What is declared here, for comparison with AMD's own declarations.
pub fn interface() -> Interface {
    Interface {
        library: "hip",
        constants: enums::CONSTANTS,
        enumerations: enums::ENUMERATIONS.to_vec(),
        structures: structs::STRUCTURES.to_vec(),
        aliases: structs::ALIASES.to_vec(),
        functions: functions::FUNCTIONS.to_vec(),
    }
}

//! hipBLASLt's C declarations, as far as they are used, under their C names.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

mod enums;
mod functions;
mod structs;

pub use enums::*;
pub use functions::*;
pub use structs::*;

use crate::declare::{Alias, Interface};

/// A handle of the library: `void *` in C.
pub type hipblasLtHandle_t = *mut std::ffi::c_void;

const VOID_ALIAS: Alias = Alias { name: "hipblasLtHandle_t", kind: "*mut c_void" };

/// What is declared here, for comparison with AMD's own declarations.
pub fn interface() -> Interface {
    Interface {
        library: "hipblaslt",
        constants: &[],
        enumerations: enums::ENUMERATIONS.to_vec(),
        structures: structs::STRUCTURES.to_vec(),
        aliases: structs::ALIASES.iter().copied().chain([VOID_ALIAS]).collect(),
        functions: functions::FUNCTIONS.to_vec(),
    }
}

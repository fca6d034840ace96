//! Macros that declare a C interface, and what they tell about it.
//!
//! Each macro makes the Rust items and, from the same text, their description. Examples of the crates print the descriptions, and
//! `tests/python/check_hip_bindings.py` compares them with those of AMD's own bindings, so what is checked is what is used.

mod json;

/// A named value: an enumerator, or what the header defines with `#define`.
#[derive(Debug, Clone, Copy)]
pub struct Constant {
    pub name: &'static str,
    pub value: i64,
}

/// A C enumeration and the enumerators that are declared of it, perhaps not all.
#[derive(Debug, Clone, Copy)]
pub struct Enumeration {
    pub name: &'static str,
    /// In bytes.
    pub size: usize,
    pub constants: &'static [Constant],
}

/// A field of a structure; offset and size in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    pub kind: &'static str,
    pub offset: usize,
    pub size: usize,
}

/// A structure; size and alignment in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Structure {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    pub fields: &'static [Field],
}

/// A name for another type.
#[derive(Debug, Clone, Copy)]
pub struct Alias {
    pub name: &'static str,
    pub kind: &'static str,
}

/// A function: types as Rust writes them.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    pub name: &'static str,
    /// (name, type) of every argument.
    pub arguments: &'static [(&'static str, &'static str)],
    pub result: &'static str,
    /// Whether the library may lack it.
    pub optional: bool,
}

/// All that is declared of one library.
#[derive(Debug, Clone)]
pub struct Interface {
    pub library: &'static str,
    pub constants: &'static [Constant],
    pub enumerations: Vec<Enumeration>,
    pub structures: Vec<Structure>,
    pub aliases: Vec<Alias>,
    pub functions: Vec<Function>,
}

/// C enumerations. Each becomes a type of its own around an `i32`, for a library may return a value that is not listed, and its
/// enumerators constants beside it. Also makes `ENUMERATIONS`.
#[macro_export]
macro_rules! c_enums {
    ($($(#[$doc:meta])* $type:ident { $($name:ident = $value:literal),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[repr(transparent)]
            #[derive(Clone, Copy, PartialEq, Eq, Hash)]
            pub struct $type(pub i32);

            $(pub const $name: $type = $type($value);)*

            impl $type {
                /// The name of this value, if it is declared here.
                pub fn name(self) -> Option<&'static str> {
                    Self::ENUMERATION.constants.iter().find(|c| c.value == i64::from(self.0)).map(|c| c.name)
                }

                const ENUMERATION: $crate::declare::Enumeration = $crate::declare::Enumeration {
                    name: stringify!($type),
                    size: size_of::<$type>(),
                    constants: &[$($crate::declare::Constant { name: stringify!($name), value: $value }),*],
                };
            }

            impl std::fmt::Debug for $type {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    match self.name() {
                        Some(name) => f.write_str(name),
                        None => write!(f, "{}({})", stringify!($type), self.0),
                    }
                }
            }
        )*

        pub const ENUMERATIONS: &[$crate::declare::Enumeration] = &[$($type::ENUMERATION),*];
    };
}

/// Values that the header defines with `#define`. Also makes `CONSTANTS`.
#[macro_export]
macro_rules! c_constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $type = $value;)*

        pub const CONSTANTS: &[$crate::declare::Constant] =
            &[$($crate::declare::Constant { name: stringify!($name), value: $name as i64 }),*];
    };
}

/// C structures. Also makes `STRUCTURES`.
#[macro_export]
macro_rules! c_structs {
    ($($(#[$doc:meta])* $type:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            pub struct $type { $($(#[$field_doc])* pub $field: $kind),* }
        )*

        pub const STRUCTURES: &[$crate::declare::Structure] = &[$($crate::declare::Structure {
            name: stringify!($type),
            size: size_of::<$type>(),
            align: align_of::<$type>(),
            fields: &[$($crate::declare::Field {
                name: stringify!($field),
                kind: stringify!($kind),
                offset: std::mem::offset_of!($type, $field),
                size: size_of::<$kind>(),
            }),*],
        }),*];
    };
}

/// Handles: pointers to structures that only the library knows, one type each so that they cannot be confused. Also makes `ALIASES`.
#[macro_export]
macro_rules! c_handles {
    ($($(#[$doc:meta])* $name:ident = *mut $target:ident;)*) => {
        $(
            #[doc = concat!("What [`", stringify!($name), "`] points to.")]
            #[repr(C)]
            #[derive(Debug)]
            pub struct $target {
                _private: [u8; 0],
            }

            $(#[$doc])*
            pub type $name = *mut $target;
        )*

        pub const ALIASES: &[$crate::declare::Alias] = &[$($crate::declare::Alias {
            name: stringify!($name),
            kind: concat!("*mut ", stringify!($target)),
        }),*];
    };
}

/// A table of a library's functions, looked up when it is made. Optional ones may be absent. Also makes `FUNCTIONS`.
#[macro_export]
macro_rules! c_functions {
    (
        $(#[$table_doc:meta])* $table:ident
        { $(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)* }
        optional { $(fn $maybe:ident($($maybe_argument:ident: $maybe_kind:ty),*) -> $maybe_result:ty;)* }
    ) => {
        $(#[$table_doc])*
        #[derive(Debug)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($kind),*) -> $result,)*
            $(pub $maybe: Option<unsafe extern "C" fn($($maybe_kind),*) -> $maybe_result>,)*
            // Keeps the library open, so that the pointers stay good.
            library: $crate::library::Library,
        }

        impl $table {
            /// Looks every function up in `library`.
            ///
            /// # Errors
            /// The first function that `library` lacks.
            ///
            /// # Safety
            /// What `library` exports under these names must have these signatures.
            pub unsafe fn load(library: $crate::library::Library) -> Result<Self, $crate::Error> {
                // SAFETY: the caller vouches for the signatures, and `library` is kept beside the pointers.
                unsafe {
                    Ok(Self {
                        $($name: library.symbol(concat!(stringify!($name), "\0"))?,)*
                        $($maybe: library.symbol(concat!(stringify!($maybe), "\0")).ok(),)*
                        library,
                    })
                }
            }

            /// The library that the functions belong to.
            pub fn library(&self) -> &$crate::library::Library {
                &self.library
            }
        }

        pub const FUNCTIONS: &[$crate::declare::Function] = &[
            $($crate::declare::Function {
                name: stringify!($name),
                arguments: &[$((stringify!($argument), stringify!($kind))),*],
                result: stringify!($result),
                optional: false,
            },)*
            $($crate::declare::Function {
                name: stringify!($maybe),
                arguments: &[$((stringify!($maybe_argument), stringify!($maybe_kind))),*],
                result: stringify!($maybe_result),
                optional: true,
            },)*
        ];
    };
}

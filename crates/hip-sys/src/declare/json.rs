//! An interface as JSON, for the check against AMD's bindings.

use std::fmt::{Display, Formatter, Result};

use super::{Constant, Enumeration, Function, Interface, Structure};

/// Displays as a JSON array of strings, numbers, objects.
///
/// What is described are names and types of C and Rust: ASCII without quotes or control characters, which Rust's `{:?}` writes as
/// JSON does.
struct List<'a, T>(&'a [T], fn(&T, &mut Formatter<'_>) -> Result);

impl<T> Display for List<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str("[")?;
        for (index, item) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { ", " })?;
            (self.1)(item, f)?;
        }
        f.write_str("]")
    }
}

fn constant(constant: &Constant, f: &mut Formatter<'_>) -> Result {
    write!(f, "{{\"name\": {:?}, \"value\": {}}}", constant.name, constant.value)
}

fn enumeration(enumeration: &Enumeration, f: &mut Formatter<'_>) -> Result {
    let Enumeration { name, size, constants } = enumeration;
    write!(f, "\n  {{\"name\": {name:?}, \"size\": {size}, \"constants\": {}}}", List(constants, constant))
}

fn structure(structure: &Structure, f: &mut Formatter<'_>) -> Result {
    let Structure { name, size, align, fields } = structure;
    let fields = List(fields, |field, f| {
        let (name, kind) = (field.name, field.kind);
        write!(f, "{{\"name\": {name:?}, \"kind\": {kind:?}, \"offset\": {}, \"size\": {}}}", field.offset, field.size)
    });
    write!(f, "\n  {{\"name\": {name:?}, \"size\": {size}, \"align\": {align}, \"fields\": {fields}}}")
}

fn function(function: &Function, f: &mut Formatter<'_>) -> Result {
    let Function { name, arguments, result, optional } = function;
    let arguments = List(arguments, |(name, kind), f| write!(f, "{{\"name\": {name:?}, \"kind\": {kind:?}}}"));
    write!(f, "\n  {{\"name\": {name:?}, \"result\": {result:?}, \"optional\": {optional}, \"arguments\": {arguments}}}")
}

impl Interface {
    /// As JSON, every item under the name that it has here; sizes in bytes.
    pub fn to_json(&self) -> String {
        let Interface { library, constants, enumerations, structures, aliases, functions } = self;
        let constants = List(constants, constant);
        let enumerations = List(enumerations, enumeration);
        let structures = List(structures, structure);
        let aliases = List(aliases, |alias, f| write!(f, "{{\"name\": {:?}, \"kind\": {:?}}}", alias.name, alias.kind));
        let functions = List(functions, function);
        format!(
            "{{\"library\": {library:?},\n \"constants\": {constants},\n \"enumerations\": {enumerations},\n \
             \"structures\": {structures},\n \"aliases\": {aliases},\n \"functions\": {functions}}}"
        )
    }
}

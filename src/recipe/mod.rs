//! The TOML recipe: schema, presets, overrides, errors that help.

//! From answers to scores: filters, metrics of a document, aggregation, groups, and the records that are written.

pub mod aggregate;
pub mod code;
pub mod counts;
pub mod document;
pub mod filters;
pub mod groups;
pub mod numeric;
pub mod results;
pub mod samples;

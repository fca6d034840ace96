//! Bindings to HIP and hipBLASLt, opened at run time.

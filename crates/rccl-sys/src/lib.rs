//! Bindings to RCCL, opened at run time.

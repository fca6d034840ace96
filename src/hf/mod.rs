//! Hugging Face names and configs, native and legacy, in and out.

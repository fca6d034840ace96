//! Checkpoints: layout-free safetensors and one manifest.

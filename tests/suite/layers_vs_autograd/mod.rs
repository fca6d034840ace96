//! Every verb of a backend, forward and backward, against the functions of the candle reference under autograd in f64, on
//! random odd shapes. The checks are generic: they see buffers only through `trait Backend`.

mod attention;
mod bf16;
mod cca;
mod decode;
mod harness;
mod head;
mod moe;
mod movement;
mod optimizers;
mod pointwise;
mod whole_model;

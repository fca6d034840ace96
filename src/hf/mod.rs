//! Hugging Face directories in and out: names, configs and layouts of ZAYA models as other programs write and read them.
//!
//! [`load`] opens a directory in any of the published forms and reads one parameter of the table at a time, or a piece of one; [`save`]
//! writes one parameter at a time, [`save_streamed`] piece by piece. Only this room knows that files stack experts, split blocks into
//! stages, or use other names. `docs/HUGGINGFACE.md` is the prose.

pub mod config;
mod dtype;
mod file_writer;
pub mod io_names;
mod load;
pub mod names;
mod save;
mod shards;
mod tokenizer_config;

pub use dtype::StoredDtype;
pub use load::{HfModel, load};
pub use names::Layout;
pub use save::{SaveOptions, SavedModel, save, save_streamed};

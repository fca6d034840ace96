//! Checkpoints: logical tensors in ordinary safetensors files, and one manifest. The format is told in `docs/CHECKPOINT.md`.
//!
//! A checkpoint knows nothing of the layout that wrote it: it holds whole tensors by their name in the parameter table
//! (`crate::model::params`), cut into row blocks only when they are very large. The manifest is written last and carries the
//! hash of everything; a folder without a manifest that matches is not a checkpoint.
//!
//! ```
//! use zaya::checkpoint::{self, Meta, SaveOptions, TensorInfo};
//!
//! let run = tempfile::tempdir()?;
//! let root = run.path().join(checkpoint::CKPT_DIR);
//! let meta = Meta { step: 100, ..Meta::new(zaya::model::presets::demo_6m()) };
//! let tensors = [TensorInfo::f32("final_norm", &[3])];
//! checkpoint::save(&root, &meta, &tensors, &mut |_| Ok(vec![1.0, 2.0, 3.0]), &SaveOptions::default())?;
//!
//! let found = checkpoint::latest_valid(&root)?;
//! let ckpt = found.checkpoint.expect("one was just saved");
//! assert_eq!(ckpt.meta().step, 100);
//! assert_eq!(ckpt.read("final_norm")?, [1.0, 2.0, 3.0]);
//! # anyhow::Ok(())
//! ```

mod bits;
mod commit;
mod layout;
mod locate;
mod manifest;
mod names;
mod pool;
mod read;
pub mod remote;
pub mod repack;
mod retain;
mod source;
mod stream;
mod write;

pub use bits::Bits;
pub use commit::{SaveOptions, Saved, free_bytes, save, save_slices};
pub use layout::{Dtype, TensorInfo};
pub use locate::{Found, latest_valid, list, locate};
pub use manifest::{Contents, Entry, FileEntry, Manifest, Meta, Part, model_hash};
pub use names::{is_optimizer, opt_name, parse_step_dir, split_opt_name, step_dir, training_tensors, weight_tensors};
pub use pool::collect_garbage;
pub use read::Checkpoint;
pub use retain::{RetainPolicy, Retained, retain};
pub use source::{ModelSource, open_checkpoint};

/// Folder of a run directory that holds its checkpoints.
pub const CKPT_DIR: &str = "ckpt";
/// The file whose presence makes a folder a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// A hint for people: the name of the newest checkpoint. Never trusted by the program.
pub const LATEST: &str = "LATEST";
/// A file of this name inside a checkpoint protects it from retention.
pub const PIN: &str = "PIN";

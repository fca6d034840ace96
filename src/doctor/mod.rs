//! `zaya doctor`: what this machine has of what zaya can use, and what to install for the rest.

mod files;
mod gpu;
mod host;

use std::path::Path;

use anyhow::Result;
use serde::Serialize;

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub topic: Topic,
    pub what: String,
    pub found: String,
    /// What is missing or slow because of it, and what to do.
    pub advice: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Topic {
    Host,
    Gpu,
    Launcher,
    Files,
}

impl Topic {
    pub fn title(self) -> &'static str {
        match self {
            Self::Host => "Processor and memory",
            Self::Gpu => "GPUs (--backend hip)",
            Self::Launcher => "Ranks",
            Self::Files => "Files",
        }
    }
}

impl Finding {
    fn new(topic: Topic, what: impl Into<String>, found: impl Into<String>) -> Self {
        Self { topic, what: what.into(), found: found.into(), advice: None }
    }

    fn advise(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// Looks at everything. `dir`: where runs would write; a folder that is there. Nothing stays behind in it.
///
/// # Errors
/// When `dir` is no folder.
pub fn examine(dir: &Path) -> Result<Vec<Finding>> {
    let mut found = host::examine();
    found.extend(gpu::examine());
    found.push(host::launcher());
    found.extend(files::examine(dir)?);
    Ok(found)
}

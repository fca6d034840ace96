//! From what the command line names to files: folders and patterns are spelt out, in an order that is the same everywhere.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{Input, Layout, compression};
use crate::error::bad_input;

/// Endings that are taken from a folder, with or without `.gz` and `.zst`.
const TAKEN: [&str; 7] = ["jsonl", "ndjson", "json", "parquet", "txt", "text", "md"];

/// Files that the inputs name.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub inputs: Vec<Input>,
    /// Files of folders that were passed over, by ending ("" where there is none).
    pub passed_over: BTreeMap<String, u64>,
}

impl Found {
    /// A sentence on what was passed over; None if nothing was.
    pub fn note(&self) -> Option<String> {
        let count: u64 = self.passed_over.values().sum();
        let endings = self.passed_over.iter().map(|(ending, n)| match ending.as_str() {
            "" => format!("{n} without an ending"),
            ending => format!("{n} .{ending}"),
        });
        let taken = TAKEN.join(", .");
        (count > 0).then(|| {
            let files = if count == 1 { "file is" } else { "files are" };
            format!(
                "{count} {files} passed over in directories ({}): taken there are .{taken}, also with .gz and .zst; \
                     --format takes all",
                endings.collect::<Vec<_>>().join(", ")
            )
        })
    }
}

/// Spells `paths` out. A folder stands for its files and those of its folders, sorted by path; hidden ones and links to folders
/// are left out, and, unless a layout is given, files whose ending is not known. A path that does not exist and has `*`,
/// `?` or `[` is a pattern (`**` for any number of folders).
///
/// # Errors
/// What cannot be read, a folder or pattern without any file.
pub fn expand(paths: &[PathBuf], layout: Option<Layout>) -> Result<Found> {
    let mut found = Found::default();
    for path in paths {
        if path.is_dir() {
            add_folder(path, layout, &mut found)?;
            continue;
        }
        let text = path.to_string_lossy();
        if path.exists() || !text.contains(['*', '?', '[']) {
            found.inputs.push(Input::find(path, layout)?);
            continue;
        }
        let matches = glob::glob(&text).map_err(|e| bad_input(format!("input pattern {text} is malformed: {e}")))?;
        let before = found.inputs.len();
        for path in matches {
            let path = path
                .map_err(|e| bad_input(format!("input pattern {text}: {} cannot be read: {}", e.path().display(), e.error())))?;
            // What `**` finds in a folder it finds by itself; behind a link to a folder it would find the same again, or without end.
            if path.is_file() && !(text.contains("**") && is_behind_a_link(&path, &text)) {
                found.inputs.push(Input::find(&path, layout)?);
            }
        }
        if found.inputs.len() == before {
            return Err(bad_input(format!("input pattern {text} fits no file")));
        }
    }
    Ok(found)
}

/// A folder of `path` is a link, of those that `pattern` does not name.
fn is_behind_a_link(path: &Path, pattern: &str) -> bool {
    let named =
        Path::new(pattern).components().take_while(|c| !c.as_os_str().to_string_lossy().contains(['*', '?', '['])).count();
    path.ancestors().skip(1).any(|folder| folder.components().count() > named && folder.is_symlink())
}

fn add_folder(folder: &Path, layout: Option<Layout>, found: &mut Found) -> Result<()> {
    let mut files = Vec::new();
    walk(folder, &mut files)?;
    // Folder by folder, by the bytes of names: an order that no file system or locale changes.
    files.sort();
    let before = found.inputs.len();
    for file in files {
        let ending = compression::inner_extension(&file).unwrap_or_default();
        if layout.is_some() || TAKEN.contains(&ending.as_str()) {
            found.inputs.push(Input::find(&file, layout)?);
        } else {
            *found.passed_over.entry(ending).or_default() += 1;
        }
    }
    if found.inputs.len() == before {
        let why = found.note().map_or(String::new(), |note| format!(": {note}"));
        return Err(bad_input(format!("input {} is a directory without any file to read{why}", folder.display())));
    }
    Ok(())
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |e: std::io::Error| bad_input(format!("input directory {} cannot be read: {e}", folder.display()));
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() {
            walk(&entry.path(), files)?;
        } else if kind.is_file() || entry.path().is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in
            ["b/2.jsonl.zst", "b/1.JSONL", "a.txt", "b-c.md", "x.csv", "b/y.csv.gz", "LICENSE", ".hidden.txt", ".git/z.txt"]
        {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        std::os::unix::fs::symlink(dir.path(), dir.path().join("b/loop")).unwrap();
        dir
    }

    fn names(dir: &Path, found: &Found) -> Vec<String> {
        found.inputs.iter().map(|i| i.path.strip_prefix(dir).unwrap().display().to_string()).collect()
    }

    #[test]
    fn folders_are_read_in_order_and_say_what_they_pass_over() {
        let dir = tree();
        let found = expand(&[dir.path().to_path_buf()], None).unwrap();
        // The folder `b` stands before `b-c.md`, though `-` comes before `/`.
        assert_eq!(names(dir.path(), &found), ["a.txt", "b/1.JSONL", "b/2.jsonl.zst", "b-c.md"]);
        assert_eq!(found.inputs[1].layout, Layout::JsonLines);
        let note = found.note().unwrap();
        assert!(note.starts_with("3 files are passed over in directories (1 without an ending, 2 .csv)"), "{note}");
        let all = expand(&[dir.path().to_path_buf()], Some(Layout::Text)).unwrap();
        assert_eq!((all.inputs.len(), all.note()), (7, None));
    }

    #[test]
    fn patterns_are_spelt_out() {
        let dir = tree();
        let of = |pattern: &str| expand(&[dir.path().join(pattern)], None).map(|found| names(dir.path(), &found));
        assert_eq!(of("b/*.jsonl*").unwrap(), ["b/2.jsonl.zst"]);
        assert_eq!(of("**/*.txt").unwrap(), [".git/z.txt", ".hidden.txt", "a.txt"]);
        assert_eq!(of("[ab]*.??*").unwrap(), ["a.txt", "b-c.md"]);
        assert!(of("*.jsonl").unwrap_err().to_string().contains("fits no file"));
        assert!(of("a[").unwrap_err().to_string().contains("malformed"));
        // A name that is there is a name.
        std::fs::write(dir.path().join("a[1].txt"), "x").unwrap();
        assert_eq!(of("a[1].txt").unwrap(), ["a[1].txt"]);
    }

    #[test]
    fn a_folder_without_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x.csv"), "x").unwrap();
        let error = expand(&[dir.path().to_path_buf()], None).unwrap_err().to_string();
        assert!(error.contains("is a directory without any file to read") && error.contains("1 .csv"), "{error}");
    }
}

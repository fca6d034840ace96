//! Paths of a recipe: relative to its folder in the file, absolute in the resolved recipe; shard patterns spelt out.

use std::path::{Component, Path, PathBuf};

/// `path` as seen from `base`, an absolute folder. Leading `..` climb from `base`; the file need not exist.
pub fn absolute(base: &Path, path: &str) -> PathBuf {
    let mut out = base.to_path_buf();
    let mut climbing = true;
    for part in Path::new(path).components() {
        match part {
            Component::CurDir => {}
            // Behind a name, `..` stays: that name may be a link to anywhere.
            Component::ParentDir if climbing => {
                out.pop();
            }
            part => {
                climbing = matches!(part, Component::RootDir | Component::Prefix(_));
                out.push(part);
            }
        }
    }
    out
}

/// Prefixes of the `.bin`/`.idx` pairs that one path of a source names. A pattern that matches nothing stays as it is,
/// and is then found missing.
pub fn shards(base: &Path, path: &str) -> Vec<PathBuf> {
    let path = absolute(base, path);
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("").to_string();
    let stem = name.strip_suffix(".bin").or_else(|| name.strip_suffix(".idx")).unwrap_or(&name);
    let prefix = path.with_file_name(stem);
    if !stem.contains(['*', '?']) {
        return vec![prefix];
    }
    let folder = prefix.parent().unwrap_or(Path::new("/")).to_path_buf();
    let mut found: Vec<PathBuf> = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| name.strip_suffix(".idx").map(str::to_string))
        .filter(|name| matches(stem.as_bytes(), name.as_bytes()))
        .map(|name| folder.join(name))
        .collect();
    // The order of a folder's entries differs from machine to machine; the order of samples must not.
    found.sort();
    if found.is_empty() { vec![prefix] } else { found }
}

/// Whether `name` fits `pattern`: `*` is any run of characters, `?` any one byte.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                // The star takes one character more.
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_seen_from_the_recipes_folder() {
        let base = Path::new("/a/b");
        for (path, whole) in [
            ("x", "/a/b/x"),
            ("./x/./y", "/a/b/x/y"),
            ("../x", "/a/x"),
            ("../../../../x", "/x"),
            ("x/../y", "/a/b/x/../y"),
            ("/x/y", "/x/y"),
            (".", "/a/b"),
        ] {
            assert_eq!(absolute(base, path), Path::new(whole), "{path}");
        }
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, yes) in [
            ("*", "", true),
            ("a*c", "abbc", true),
            ("a*c", "abbcd", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*-*", "web-001", true),
            ("**b", "aab", true),
            ("abc", "abc", true),
            ("abc", "abcd", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), yes, "{pattern} {name}");
        }
    }

    #[test]
    fn shard_patterns_are_spelt_out_in_order() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["web-2.idx", "web-1.idx", "web-1.bin", "code.idx", "web-3.txt"] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        let names = |path: &str| -> Vec<String> {
            shards(dir.path(), path).iter().map(|p| p.file_name().unwrap().to_str().unwrap().to_string()).collect()
        };
        assert_eq!(names("web-*"), ["web-1", "web-2"]);
        assert_eq!(names("web-?.bin"), ["web-1", "web-2"]);
        assert_eq!(names("code.idx"), ["code"]);
        assert_eq!(names("code"), ["code"]);
        assert_eq!(names("nothing-*"), ["nothing-*"]);
    }
}

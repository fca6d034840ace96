//! Fake libraries, compiled from C, and child processes that open them: a library is opened once in a process, and where it is
//! looked for is told by environment variables.

use std::path::{Path, PathBuf};
use std::process::Command;

use hip_sys::declare::Interface;

/// Set in a child process, to the name of what it is to do.
pub const TASK: &str = "HIP_SYS_TEST_TASK";

/// Compiles `source` to the shared library `file`, with all functions of `interface` but `without`. Those that `source` does not
/// define do nothing and succeed.
pub fn build(file: &Path, source: &str, interface: &Interface, without: &[&str]) -> PathBuf {
    let mut text = source.to_string();
    for function in interface.functions.iter().filter(|f| !without.contains(&f.name)) {
        if !source.contains(&format!(" {}(", function.name)) && !source.contains(&format!("*{}(", function.name)) {
            text.push_str(&format!("int {}() {{ return 0; }}\n", function.name));
        }
    }
    let code = file.with_extension("c");
    std::fs::write(&code, text).unwrap();
    let output =
        Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).args([file, &code]).output().expect("a C compiler, cc");
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    file.to_path_buf()
}

/// What the test `child` of this executable prints when it does `task` with these environment variables.
pub fn run(task: &str, variables: &[(&str, &Path)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(TASK, task);
    for unset in ["ZAYA_HIP_LIB", "ZAYA_HIPBLASLT_LIB", "ZAYA_RCCL_LIB", "ROCM_PATH", "LD_LIBRARY_PATH"] {
        command.env_remove(unset);
    }
    command.envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "task {task} ended with {}:\n{text}", output.status);
    text
}

/// The lines of `text` that begin with `start`, without it.
pub fn lines<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.strip_prefix(start)).collect()
}

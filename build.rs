//! Compiles `kernels/` for AMD's GPUs and puts the code objects into the executable. Where no clang compiles for AMD, the executable is
//! built without them, and says so when it is asked for a GPU.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    let kernels = Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("kernels");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    // Not the whole folder: tests lie there, too.
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CLANG");
    println!("cargo::rerun-if-env-changed=ARCHS");
    for entry in sources(&kernels) {
        println!("cargo::rerun-if-changed={}", entry.display());
    }
    let built = out.join("kernels");
    let text = match compile(&kernels, &built) {
        Ok(()) => table(&built),
        Err(why) => {
            println!("cargo::warning=built without GPU kernels ({why}; then `touch build.rs`, and build again)");
            "const CODE_OBJECTS: &[CodeObject] = &[];\n".into()
        }
    };
    fs::write(out.join("code_objects.rs"), text).expect("writing into OUT_DIR");
}

/// Everything that kernels are compiled from.
fn sources(kernels: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in [kernels.to_path_buf(), kernels.join("zk")] {
        let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("reading {}: {e}", dir.display()));
        found.extend(entries.flatten().map(|e| e.path()).filter(|p| p.is_file()));
    }
    found.sort();
    found
}

fn compile(kernels: &Path, built: &Path) -> Result<(), String> {
    let output = Command::new(kernels.join("build.sh"))
        .arg(built)
        .output()
        .map_err(|e| format!("starting {}: {e}", kernels.join("build.sh").display()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("no clang that compiles for AMD") {
        return Err(said.trim().trim_start_matches("error: ").to_string());
    }
    // A compiler that is there and fails is a fault of the kernels.
    panic!("compiling the kernels: {said}{}", String::from_utf8_lossy(&output.stdout));
}

/// The code objects, and the kernels in each.
fn table(built: &Path) -> String {
    let mut objects: Vec<PathBuf> = fs::read_dir(built)
        .expect("the folder of the code objects")
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "co"))
        .collect();
    objects.sort();
    let mut text = String::from("const CODE_OBJECTS: &[CodeObject] = &[\n");
    for object in &objects {
        let stem = object.file_stem().and_then(|s| s.to_str()).expect("a name in UTF-8");
        let (name, arch) = stem.rsplit_once('.').expect("NAME.ARCH.co");
        let kernels = kernels_of(&object.with_extension("co.log"));
        let image = format!("include_bytes!({object:?})");
        let _ = writeln!(text, "    CodeObject {{ arch: {arch:?}, name: {name:?}, kernels: &{kernels:?}, image: {image} }},");
    }
    text + "];\n"
}

/// Names of the kernels of a code object. Macros may make them, so the compiler's report is what is read.
fn kernels_of(report: &Path) -> Vec<String> {
    let report = fs::read_to_string(report).unwrap_or_default();
    let mut found: Vec<String> = report
        .lines()
        .filter_map(|l| l.split_once("Function Name: "))
        .map(|(_, rest)| rest.split_whitespace().next().unwrap_or_default().to_string())
        .collect();
    found.sort();
    found.dedup();
    found
}

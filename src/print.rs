//! Printing that cannot fail a run. `println!` and `eprintln!` panic when nobody reads any more (a closed terminal, a dead
//! `tee`, a full disk under a log file); what a run computes must not depend on that.

use std::cell::Cell;

thread_local! {
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Whether `tell!` says nothing on this thread: of many ranks, one speaks for all.
pub fn is_silent() -> bool {
    SILENT.get()
}

/// `tell!` says nothing more on this thread, or does again.
pub fn set_silent(silent: bool) {
    SILENT.set(silent);
}

/// A line on stderr whatever `set_silent` says: a rank's own failure.
pub fn aloud(line: &str) {
    use std::io::Write;
    // In one piece: ranks that are processes share a stderr. Nobody may be reading it any more.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// A line on stdout, or nothing where stdout is gone.
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($arg)*);
    }};
}

/// A line on stderr, or nothing where stderr is gone. It goes out in one piece: lines of several processes do not mix.
#[macro_export]
macro_rules! tell {
    ($($arg:tt)*) => {{
        if !$crate::print::is_silent() {
            $crate::print::aloud(&format!($($arg)*));
        }
    }};
}

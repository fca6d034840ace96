//! Printing that cannot fail a run. `println!` and `eprintln!` panic when nobody reads any more (a closed terminal, a dead
//! `tee`, a full disk under a log file); what a run computes must not depend on that.

/// A line on stdout, or nothing where stdout is gone.
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($arg)*);
    }};
}

/// A line on stderr, or nothing where stderr is gone.
#[macro_export]
macro_rules! tell {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($arg)*);
    }};
}

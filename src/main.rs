//! Parse, dispatch, exit code: nothing else.

use std::process::ExitCode;

use clap::Parser;
use zaya::{cli, error};

fn main() -> ExitCode {
    let args = cli::Cli::parse();
    match cli::run(args) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::from(error::exit_code_of(&e))
        }
    }
}

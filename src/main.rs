//! Parse, dispatch, exit code: nothing else.

use std::process::ExitCode;

use clap::Parser;
use zaya::{cli, error, tell};

fn main() -> ExitCode {
    let args = cli::Cli::parse();
    match cli::run(args) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            tell!("error: {e:#}");
            ExitCode::from(error::exit_code_of(&e))
        }
    }
}

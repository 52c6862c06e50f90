//! The program `terrane`. All code is in the library, so that a Python wheel can install the
//! command too.

use std::process::ExitCode;

fn main() -> ExitCode {
    let status = terrane_cli::run(std::env::args_os(), &terrane_cli::Restart::of_this_executable());
    ExitCode::from(status.code())
}

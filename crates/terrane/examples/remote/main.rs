//! Moves KV blocks of a real model from a prefill process to a decode process. This program starts
//! both. Every byte is verified in the process that receives it.
//!
//! `cargo run --release --features nixl --example remote`; `-- --help` lists the options.

mod channel;
mod cli;
mod decode;
mod failure;
#[path = "../offload/models.rs"]
mod models;
mod moves;
mod prefill;
mod report;
mod tier;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

use cli::{Options, Role};
use failure::Failure;

fn main() -> ExitCode {
    let options = Options::parse();
    let (who, outcome) = match options.role {
        Role::Prefill => ("", prefill::run(&options)),
        Role::Decode => ("decode: ", decode::run(&options)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_already_printed() {
                print_error(who, &failure);
            }
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Prints the error and its causes.
fn print_error(who: &str, failure: &Failure) {
    let mut text = format!("error: {who}{failure}\n");
    let mut cause = failure.source();
    while let Some(error) = cause {
        text.push_str(&format!("  caused by: {error}\n"));
        cause = error.source();
    }
    // Output that cannot be written is ignored.
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

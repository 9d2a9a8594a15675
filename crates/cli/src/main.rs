//! The tensorwire command.

use std::process::ExitCode;

fn main() -> ExitCode {
    tensorwire_cli::run(std::env::args_os()).into()
}

//! `tensorwire completions`: what the shell needs to complete arguments.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::exit::{Failure, Status};
use crate::printer::Printer;

/// Print completions for a shell
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  tensorwire completions bash > /etc/bash_completion.d/tensorwire
  tensorwire completions zsh > ~/.zfunc/_tensorwire
  tensorwire completions fish > ~/.config/fish/completions/tensorwire.fish")]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "tensorwire", &mut script);
    printer.bytes(&script)?;
    Ok(Status::Success)
}

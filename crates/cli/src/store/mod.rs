//! `tensorwire store`: serve a store, look into one, measure one.

mod bench;
mod client;
mod serve;

use crate::exit::{Failure, Status};
use crate::printer::Printer;

/// Serve a rendezvous store, look into one, or measure it
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire store serve --port 29500                 serve on all addresses
  tensorwire store set model ready --at node1:29500   set a key
  tensorwire store get model --at node1:29500         wait for a key, print it
  tensorwire store list --json                        all keys
  tensorwire store bench --against torch              measure both servers

The protocol is that of PyTorch's TCPStore. These commands can talk to torch's
server, and torch's clients can talk to ours.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Serve(serve::Args),
    Get(client::GetArgs),
    Set(client::SetArgs),
    List(client::ListArgs),
    Bench(bench::Args),
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    match args.command {
        Command::Serve(args) => serve::execute(args, printer),
        Command::Get(args) => client::get(args, printer),
        Command::Set(args) => client::set(args),
        Command::List(args) => client::list(args, printer),
        Command::Bench(args) => bench::execute(args, printer),
    }
}

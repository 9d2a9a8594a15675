//! `tensorwire store serve`.

use std::io::Read;

use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tensorwire::store::TcpServer;

use crate::exit::{Failure, Status};
use crate::printer::Printer;

/// Serve a store until SIGINT, SIGTERM or SIGHUP
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire store serve                            all addresses, port 29500
  tensorwire store serve --host 127.0.0.1 --port 0  this machine, a free port

The command prints the address once clients can connect. Anyone who can reach
the port can read and write the store, so serve on a trusted network only.

Exit codes: 0 ended by a signal, 1 the address cannot be used, 2 wrong usage.")]
pub(crate) struct Args {
    /// The address to serve at [default: all addresses]
    #[arg(long)]
    host: Option<String>,
    /// The port; 0 takes a free one
    #[arg(long, default_value_t = super::client::PORT)]
    port: u16,
    /// Print the address as JSON
    #[arg(long)]
    json: bool,
    /// End when stdin does, as the bench wants it
    #[arg(long, hide = true)]
    until_eof: bool,
}

#[derive(Serialize)]
struct Serving {
    address: String,
    port: u16,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|error| Failure::failed(format!("handling signals: {error}")))?;
    let server = match &args.host {
        Some(host) => TcpServer::bind((host.as_str(), args.port)),
        None => TcpServer::bind_all(args.port),
    };
    let host = args.host.as_deref().unwrap_or("all addresses");
    let server = server.map_err(|error| Failure::serving(format!("{host}, port {}", args.port), &error))?;
    let address = server.local_addr();
    match args.json {
        true => printer.json(&Serving { address: address.to_string(), port: address.port() })?,
        false => printer.line(&format!("serving at {address}"))?,
    }
    match args.until_eof {
        true => drop(std::io::stdin().read_to_end(&mut Vec::new())),
        false => drop(signals.wait()),
    }
    Ok(Status::Success)
}

//! `tensorwire store get`, `set` and `list`.

use std::io::Read;
use std::time::Duration;

use serde::Serialize;
use tensorwire::store::{Limits, Store, TcpStore};

use crate::exit::{Failure, Status};
use crate::printer::Printer;
use crate::run::seconds;

/// torchrun's port, and so everybody's.
pub(super) const PORT: u16 = 29500;

/// Where the store is, and how long to wait for it.
#[derive(clap::Args, Debug)]
struct StoreAddress {
    /// The store's address
    #[arg(long, value_name = "HOST:PORT", default_value_t = format!("127.0.0.1:{PORT}"))]
    at: String,
    /// How long to wait for the store and for a key
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds, allow_negative_numbers = true)]
    timeout: Duration,
}

/// Wait for a key and print its value
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire store get model        wait for the key, print its value
  tensorwire store get weights --raw --at node1:29500 > weights

Exit codes: 0 success, 1 no such key or no store in time, 2 wrong usage.")]
pub(crate) struct GetArgs {
    /// The key
    key: String,
    /// Print the value's bytes and nothing else
    #[arg(long, conflicts_with = "json")]
    raw: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreAddress,
}

/// Set a key
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire store set model ready
  tensorwire store set weights - < weights     the value comes from stdin

Exit codes: 0 success, 1 no store within the time-out, 2 wrong usage.")]
pub(crate) struct SetArgs {
    /// The key
    key: String,
    /// The value; - reads it from stdin
    value: String,
    #[command(flatten)]
    store: StoreAddress,
}

/// List all keys
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire store list
  tensorwire store list --json --at node1:29500

Exit codes: 0 success, 1 no store within the time-out, 2 wrong usage.")]
pub(crate) struct ListArgs {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreAddress,
}

/// A value as JSON has it: text where it is text.
#[derive(Serialize)]
struct Entry {
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<Vec<u8>>,
}

pub(crate) fn get(args: GetArgs, printer: &Printer) -> Result<Status, Failure> {
    let value = args.store.connect()?.get(&args.key)?;
    if args.raw {
        printer.bytes(&value)?;
    } else if args.json {
        let (value, bytes) = match String::from_utf8(value) {
            Ok(text) => (Some(text), None),
            Err(error) => (None, Some(error.into_bytes())),
        };
        printer.json(&Entry { key: args.key, value, bytes })?;
    } else {
        printer.line(&String::from_utf8_lossy(&value))?;
    }
    Ok(Status::Success)
}

pub(crate) fn set(args: SetArgs) -> Result<Status, Failure> {
    let mut value = args.value.into_bytes();
    if value == b"-" {
        value.clear();
        let most = Limits::default().value;
        std::io::stdin()
            .take(most as u64 + 1)
            .read_to_end(&mut value)
            .map_err(|error| Failure::failed(format!("reading the value from stdin: {error}")))?;
        if value.len() > most {
            return Err(Failure::failed(format!(
                "stdin has more than the {most} bytes that a value may have"
            )));
        }
    }
    args.store.connect()?.set(&args.key, &value)?;
    Ok(Status::Success)
}

pub(crate) fn list(args: ListArgs, printer: &Printer) -> Result<Status, Failure> {
    let mut keys = args.store.connect()?.list_keys()?;
    keys.sort();
    match args.json {
        true => printer.json(&keys)?,
        false => keys.iter().try_for_each(|key| printer.line(key))?,
    }
    Ok(Status::Success)
}

impl StoreAddress {
    fn connect(&self) -> Result<TcpStore, Failure> {
        let wrong = |what: &str| Failure::usage(format!("{what}; for example --at node1:{PORT}"));
        let (host, port) = self.at.rsplit_once(':').ok_or_else(|| wrong("--at needs HOST:PORT"))?;
        let port = port.parse().map_err(|_| wrong("--at needs a port from 1 to 65535"))?;
        Ok(TcpStore::connect(host.trim_matches(['[', ']']), port, self.timeout)?)
    }
}

//! The servers that are measured, each a process that ends with its stdin.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde::Deserialize;

use crate::exit::Failure;
use crate::this_program;

/// Serves until its stdin ends, and first says where.
const TORCH: &str = "
import json, sys, torch
from torch.distributed import TCPStore
store = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False, use_libuv=sys.argv[1] == 'libuv')
print(json.dumps({'port': store.port, 'version': torch.__version__}), flush=True)
sys.stdin.read()
";

/// A running server.
#[derive(Debug)]
pub(super) struct Server {
    name: String,
    port: u16,
    process: Child,
}

#[derive(Deserialize)]
struct Serving {
    port: u16,
    #[serde(default)]
    version: String,
}

impl Server {
    pub(super) fn ours() -> Result<Self, Failure> {
        let mut command = this_program::command();
        command.args(["store", "serve", "--host=127.0.0.1", "--port=0", "--json", "--until-eof"]);
        let (process, _, port) = start(command, "tensorwire store serve")?;
        Ok(Self { name: "tensorwire".into(), port, process })
    }

    pub(super) fn torch(python: &Path, libuv: bool) -> Result<Self, Failure> {
        let kind = if libuv { "libuv" } else { "legacy" };
        let mut command = Command::new(python);
        command.args(["-c", TORCH, kind]);
        // It asks the DNS for the name of each client, and would stand still where nobody answers.
        command.env("RES_OPTIONS", "timeout:1 attempts:1");
        let what = format!("{} with torch's TCPStore", python.display());
        let (process, version, port) = start(command, &what)?;
        // Without what was built in: 2.11.0+cpu.
        let version = version.split('+').next().unwrap_or_default();
        let name = if libuv { format!("torch {version}") } else { format!("torch {version} legacy") };
        Ok(Self { name, port, process })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has nothing to lose.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(mut command: Command, what: &str) -> Result<(Child, String, u16), Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::failed(format!("{what} did not start: {why}"));
    let mut process =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(|error| failed(&error))?;
    let serving = match process.stdout.take().map(first_line) {
        Some(Ok(line)) if !line.is_empty() => {
            serde_json::from_str::<Serving>(&line).map_err(|error| error.to_string())
        }
        Some(Err(RecvTimeoutError::Timeout)) => Err(format!("it said nothing for {START:?}")),
        _ => Err("it ended before it served".into()),
    };
    match serving {
        Ok(serving) => Ok((process, serving.version, serving.port)),
        Err(why) => {
            let _ = process.kill();
            let _ = process.wait();
            Err(failed(&why))
        }
    }
}

/// How long a server may take to start; importing torch takes seconds on a busy machine.
const START: Duration = Duration::from_secs(120);

/// The first line, read by a thread that ends with the pipe.
fn first_line(out: ChildStdout) -> Result<String, RecvTimeoutError> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(out).read_line(&mut line);
        let _ = sender.send(read.map(|_| line).unwrap_or_default());
    });
    receiver.recv_timeout(START)
}

//! Log lines of the library, for a program in Python: to standard error, as `TENSORWIRE_LOG` asks.
//!
//! Not to Python's `logging`: lines come from threads of ours, which would have to wait for the interpreter.

use std::io::IsTerminal;

use tensorwire::Config;
use tracing_subscriber::EnvFilter;

/// Starts logging, unless something in this process logs already. A wrong variable is left for the first call that
/// reads the configuration to complain about.
pub(crate) fn start() {
    let wanted = Config::from_env().ok().and_then(|config| EnvFilter::try_new(config.log).ok());
    let filter = wanted.unwrap_or_else(|| EnvFilter::new(Config::default().log));
    // Where nothing can be written (a full disk, a closed pipe), complaining about it would panic.
    let lines = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    let lines = lines.with_writer(std::io::stderr);
    let _ = lines.with_ansi(std::io::stderr().is_terminal()).try_init();
}

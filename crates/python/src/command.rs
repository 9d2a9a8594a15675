//! The command `tensorwire`, run by the interpreter that the package is installed in.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use pyo3::prelude::*;

/// What an interpreter is told to be the command: a folder to import us from comes first, the arguments follow. The
/// site packages are left out (-S), which saves half of the time of a start, and so is the working folder (-P).
const BEGIN: &str =
    "import sys; sys.path.append(sys.argv.pop(1)); from tensorwire.__main__ import main; main()";

/// Runs the command with its arguments, without its name, and gives its exit code.
///
/// It handles signals and ends child processes as the command does: for a process that does nothing else.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, args: Vec<OsString>) -> PyResult<u8> {
    let again = again(py)?;
    let args = [OsString::from("tensorwire")].into_iter().chain(args);
    Ok(py.detach(|| {
        let code = tensorwire_cli::run_inside(again, args);
        // Rust flushes when its own main returns, and that is not here. A reader that left is no failure.
        let _ = std::io::stdout().flush();
        code
    }))
}

/// How this interpreter is started to be the command; empty where it does not know its own name.
fn again(py: Python<'_>) -> PyResult<Vec<OsString>> {
    let executable: Option<OsString> = py.import("sys")?.getattr("executable")?.extract()?;
    let package: PathBuf = py.import("tensorwire")?.getattr("__file__")?.extract()?;
    let folder = package.parent().and_then(|package| package.parent());
    let (Some(executable), Some(folder)) = (executable.filter(|name| !name.is_empty()), folder) else {
        return Ok(Vec::new());
    };
    let words = [executable, "-S".into(), "-P".into(), "-c".into(), BEGIN.into(), folder.into()];
    Ok(words.into())
}

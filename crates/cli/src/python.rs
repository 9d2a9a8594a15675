//! Which Python runs what is written in it.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::this_program;

/// The Python that is asked for, or that this command is installed in, or of the active environment, or that is found
/// first.
pub(crate) fn python() -> OsString {
    let given = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let of_environment = || {
        let python = PathBuf::from(given("VIRTUAL_ENV")?).join("bin/python");
        python.exists().then(|| python.into_os_string())
    };
    let found = given("PYTHON").or_else(this_program::interpreter).or_else(of_environment);
    found.unwrap_or_else(|| OsString::from("python3"))
}

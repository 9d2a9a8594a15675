//! Finds the program before any rank is started, so that a typo is one error and not one for each rank.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::io::Errno;

use crate::exit::{Failure, Status};

/// Checks that the program can be executed, looking at PATH as `execvp` does.
pub(crate) fn find(program: &OsStr) -> Result<(), Failure> {
    if program.as_encoded_bytes().contains(&b'/') {
        return check(Path::new(program)).map_err(|errno| cannot_start(program, errno));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/bin:/usr/bin".into());
    let mut worst = Errno::NOENT;
    for folder in std::env::split_paths(&path) {
        match check(&folder.join(program)) {
            Ok(()) => return Ok(()),
            Err(Errno::ACCESS) => worst = Errno::ACCESS,
            Err(_) => {}
        }
    }
    Err(match worst {
        Errno::NOENT => not_found(program, "not found in PATH"),
        errno => cannot_start(program, errno),
    })
}

/// What a shell's user expects: 127 not found, 126 found and not executable.
pub(crate) fn cannot_start(program: &OsStr, errno: Errno) -> Failure {
    match errno {
        // exec says so too when it is the interpreter of a script that is missing.
        Errno::NOENT if Path::new(program).exists() => {
            not_found(program, "the interpreter it names was not found")
        }
        Errno::NOENT => not_found(program, "no such file"),
        errno => {
            let reason = io::Error::from(errno);
            Failure::with(Status::Program(126), format!("cannot start {}: {reason}", program.display()))
        }
    }
}

fn not_found(program: &OsStr, reason: &str) -> Failure {
    Failure::with(Status::Program(127), format!("cannot start {}: {reason}", program.display()))
}

fn check(path: &Path) -> Result<(), Errno> {
    access(path, Access::EXEC_OK)?;
    if path.is_dir() { Err(Errno::ACCESS) } else { Ok(()) }
}

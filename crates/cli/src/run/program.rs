//! Finds the program before any rank is started, so that a typo is one error and not one for each rank.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::io::Errno;

use crate::exit::{Failure, Status};
use crate::python::python;

/// What is executed for the words that a user typed, once it is known that it can be.
pub(super) fn words(typed: Vec<OsString>, module: bool, as_it_is: bool) -> Result<Vec<OsString>, Failure> {
    let Some(program) = typed.first() else { return Err(Failure::usage("no program")) };
    let path = Path::new(program);
    let is_python = !as_it_is && path.extension().is_some_and(|end| end == "py");
    let mut words: Vec<OsString> = Vec::new();
    if module {
        words.extend([python(), "-u".into(), "-m".into()]);
    } else if is_python && path.is_file() {
        // As torchrun does: what a rank prints is seen at once.
        words.extend([python(), "-u".into()]);
    } else if let Err(failure) = find(program) {
        return Err(meant(program, failure));
    }
    if let Some(python) = words.first() {
        find(python).map_err(|failure| {
            let why = failure.text().unwrap_or_default();
            let said = format!("{} needs Python: {why}; PYTHON names another one", program.display());
            Failure::with(failure.status(), said)
        })?;
    }
    words.extend(typed);
    Ok(words)
}

/// Adds what was probably meant to why a program cannot be started.
fn meant(program: &OsStr, failure: Failure) -> Failure {
    let name = program.to_string_lossy();
    let path = Path::new(program);
    let has_folder = name.contains('/');
    let hint = if name.parse::<u32>().is_ok() {
        format!("did you mean -n {name}?")
    } else if name.starts_with('-') {
        "options of tensorwire run come before the program, and before --".into()
    } else if path.is_dir() {
        "it is a folder; name a program in it".into()
    } else if path.is_file() && !has_folder {
        format!("there is such a file here: write ./{name}")
    } else if path.is_file() && failure.status() == Status::Program(126) {
        format!("make it executable (chmod +x {name}), or name the program that reads it first")
    } else if failure.status() != Status::Program(127) {
        return failure;
    } else if name.ends_with(".py") && !has_folder {
        "there is no such file in this folder either".into()
    } else if name.contains('.') && !has_folder {
        format!("a Python module is named with -m {name}")
    } else {
        return failure;
    };
    Failure::with(failure.status(), format!("{}; {hint}", failure.text().unwrap_or_default()))
}

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

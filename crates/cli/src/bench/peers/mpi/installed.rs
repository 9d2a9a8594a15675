//! Where a library of MPI is on this machine: below the repository, in the running Python environment, or on PATH.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Mpi, compile};

/// Where scripts/peers installs what it installs, a folder for each library.
const PEERS: &str = ".peers";

/// The name of the library under which Intel's and MPICH's programs look for it: both have the same calls.
const SHARED: &str = "lib/libmpi.so.12";

/// A library that is there.
#[derive(Debug)]
pub(super) struct Installed {
    mpi: Mpi,
    pub(super) launcher: PathBuf,
    /// The folder with its `bin`, `include` and `lib`.
    prefix: PathBuf,
}

impl Installed {
    /// The first in the order of the module, or where it was looked for in vain.
    pub(super) fn find(mpi: Mpi) -> Result<Self, String> {
        Self::find_in(mpi, folders(mpi))
    }

    fn find_in(mpi: Mpi, folders: Vec<PathBuf>) -> Result<Self, String> {
        let mut others = Vec::new();
        for folder in folders {
            let launcher = folder.join(mpi.launcher());
            if !launcher.is_file() {
                continue;
            }
            match version(&launcher) {
                Ok(said) if said.contains(mpi.signature()) => {
                    let prefix = folder.parent().unwrap_or(&folder).to_owned();
                    return Ok(Self { mpi, launcher, prefix });
                }
                Ok(said) => {
                    let first = said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
                    others.push(format!("{} calls itself {:?}", launcher.display(), first.trim()));
                }
                Err(why) => others.push(why),
            }
        }
        others.dedup();
        let (title, launcher, remedy) = (mpi.title(), mpi.launcher(), mpi.remedy());
        let others = if others.is_empty() { String::new() } else { format!(" ({})", others.join("; ")) };
        Err(format!(
            "there is no {launcher} of {title} in {PEERS}/{}, the Python environment, or PATH{others}; {remedy}",
            mpi.name()
        ))
    }

    /// Compiles a program for it.
    pub(super) fn compile(&self, source: &Path, program: &Path) -> Result<(), String> {
        let (include, shared) = (self.prefix.join("include"), self.prefix.join(SHARED));
        // Compilers of packages from PyPI may have the paths of the machine where they were made.
        if self.mpi != Mpi::Open && include.join("mpi.h").is_file() && shared.is_file() {
            let mut folder = OsString::from("-Wl,-rpath,");
            folder.push(self.prefix.join("lib"));
            let mut cc = Command::new("cc");
            cc.arg("-O2").arg("-I").arg(include).arg("-o").arg(program).args([source, &shared]).arg(folder);
            return compile("cc", &mut cc);
        }
        let mut mpicc = Command::new(self.launcher.with_file_name("mpicc"));
        mpicc.arg("-O2").arg("-o").arg(program).arg(source);
        compile("mpicc", &mut mpicc)
    }

    /// What its programs find their own files by, and its settings.
    pub(super) fn set_variables(&self, command: &mut Command) {
        let unset = |name: &str| std::env::var_os(name).is_none();
        if self.mpi == Mpi::Intel && unset("I_MPI_ROOT") {
            command.env("I_MPI_ROOT", &self.prefix);
        }
        command.envs(self.mpi.settings().iter().copied().filter(|(name, _)| unset(name)));
    }
}

/// Where its launcher may be.
fn folders(mpi: Mpi) -> Vec<PathBuf> {
    let own = |folder: &Path| folder.join(PEERS).join(mpi.name()).join("bin");
    let program = std::env::current_exe().unwrap_or_default();
    let above = program.ancestors().skip(1).map(own);
    let here = std::env::current_dir().ok().map(|folder| own(&folder));
    // The command may be a script of an environment.
    let beside = program.parent().map(Path::to_owned);
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os);
    let environments = environments.map(|folder| PathBuf::from(folder).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path: Vec<_> = std::env::split_paths(&path).collect();
    let all = above.chain(here).chain(environments).chain(beside).chain(path);
    all.filter(|folder| folder.is_absolute()).collect()
}

/// What a launcher says of itself, on either stream.
fn version(launcher: &Path) -> Result<String, String> {
    let asked = Command::new(launcher).arg("--version").stdin(Stdio::null()).output();
    let asked = asked.map_err(|error| format!("{} cannot be started: {error}", launcher.display()))?;
    Ok(format!("{}{}", String::from_utf8_lossy(&asked.stdout), String::from_utf8_lossy(&asked.stderr)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::super::Folder;
    use super::*;

    #[test]
    fn a_launcher_of_another_library_is_not_taken() {
        let folder = Folder::new("test").unwrap();
        let launcher = folder.path().join("mpiexec.hydra");
        let find = || Installed::find_in(Mpi::Mpich, vec![folder.path().to_owned()]).unwrap_err();
        let nothing = find();
        assert!(nothing.ends_with("or PATH; scripts/peers installs it"), "{nothing}");
        symlink("/bin/echo", &launcher).unwrap();
        let other = find();
        assert!(other.contains("mpiexec.hydra calls itself"), "{other}");
        std::fs::remove_file(&launcher).unwrap();
        std::fs::write(&launcher, "").unwrap();
        let broken = find();
        assert!(broken.contains("mpiexec.hydra cannot be started"), "{broken}");
    }

    #[test]
    fn what_scripts_install_is_looked_for_first() {
        let folders = folders(Mpi::Intel);
        assert!(folders[0].ends_with(".peers/impi/bin"), "{folders:?}");
        assert!(folders.iter().all(|folder| folder.is_absolute()), "{folders:?}");
    }
}

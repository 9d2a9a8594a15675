//! Every environment variable of tensorwire, in one place.
//!
//! Launchers' variables (RANK, SLURM_PROCID, ...) are read in `group/` only.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tensorwire_device::secret::Secret;

use crate::error::{Error, Result};

/// The configuration of a process. `Config::default()` is what holds when no variable is set.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// How long an operation without a time-out of its own may take.
    pub timeout: Duration,
    /// A label that keeps ranks with different labels from sharing memory. It never joins.
    pub host: Option<String>,
    /// Where private sockets are made as files instead of abstract names.
    pub socket_dir: Option<PathBuf>,
    /// The address that other hosts reach this one by.
    pub address: Option<String>,
    /// How long another host may be silent before its ranks count as dead.
    pub heartbeat: Duration,
    /// Whether a fallback to a slower path is an error.
    pub strict: bool,
    /// The NICs for the GPUs, in their order; chosen where it is empty.
    pub nics: Vec<String>,
    /// What is logged, in the syntax of tracing's filters.
    pub log: String,
    /// What all ranks of a job know and nobody else does. Without it, whoever reaches the store can join.
    pub key: Option<Key>,
    /// What is sealed between hosts in a job that has a key.
    pub seal: Seal,
    /// What carries messages between hosts.
    pub link: LinkKind,
}

/// Where Python and conda have their packages, libucp among them, as they themselves say. The only variables of others that the library
/// reads besides those of launchers.
pub(crate) struct Environments {
    pub(crate) python: Option<PathBuf>,
    pub(crate) conda: Option<PathBuf>,
}

impl Environments {
    /// Those that are active in this process.
    pub(crate) fn active() -> Self {
        let from = |name| std::env::var_os(name).map(PathBuf::from);
        let conda = from("CONDA_PREFIX");
        Self { python: from("VIRTUAL_ENV").or_else(|| conda.clone()), conda }
    }
}

/// What carries messages between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LinkKind {
    /// TCP so far. UCX where there is an RDMA device, once that was measured.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// UCX, or an error.
    Ucx,
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
        })
    }
}

/// What is sealed between hosts: nobody on the way can read it, and a change is found. Only a job with a key seals anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Seal {
    /// Everything.
    #[default]
    All,
    /// What keeps groups together: who is there, who failed, and why. Tensors go open, as fast as the network is. Whoever is on the
    /// way can read and change them. Nobody without the key can connect.
    Control,
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all",
            Self::Control => "control",
        })
    }
}

/// The key of a job. Ranks with the same key can form groups; others are refused. `Debug` shows a fingerprint only.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Secret);

impl Key {
    /// From at least 32 characters that nobody can guess, such as those of `openssl rand -hex 32`.
    pub fn new(words: &str) -> Result<Self> {
        Self::from_bytes(words.as_bytes()).map_err(|why| Error::misuse(format!("a key {why}")))
    }

    /// From a file that only its owner may read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let refused = |why: String| Error::misuse(format!("the key file {} {why}", path.display()));
        let io = |error: std::io::Error| refused(format!("cannot be read: {error}"));
        // Opening a pipe would wait for whoever writes into it.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(refused("is not a file".into()));
        }
        let file = std::fs::File::open(path).map_err(io)?;
        let mode = file.metadata().map_err(io)?.permissions().mode();
        if mode & 0o066 != 0 {
            let mode = mode & 0o777;
            return Err(refused(format!("may be read or changed by others (mode {mode:03o}); chmod 600 it")));
        }
        let mut bytes = Vec::new();
        file.take(LONGEST_KEY + 1).read_to_end(&mut bytes).map_err(io)?;
        Self::from_bytes(&bytes).map_err(refused)
    }

    /// By what people can tell keys apart: it is no secret.
    pub fn fingerprint(&self) -> String {
        self.0.fingerprint().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(crate) fn secret(&self) -> &Secret {
        &self.0
    }

    /// One that also needs a secret: nobody has it who lacks either.
    pub(crate) fn with(other: Option<&Self>, secret: &str) -> Result<Self> {
        let own = Self::new(secret)?;
        Ok(match other {
            None => own,
            Some(other) => Self(other.0.derive("with a secret", &[secret.as_bytes()])),
        })
    }

    /// An editor or a shell may have put a line end behind it, which does not count.
    fn from_bytes(bytes: &[u8]) -> std::result::Result<Self, String> {
        let words = bytes.trim_ascii_end();
        let length = String::from_utf8_lossy(words).chars().count();
        if length < SHORTEST_KEY {
            return Err(format!("of {length} characters is too short; {SHORTEST_KEY} are needed"));
        }
        if bytes.len() as u64 > LONGEST_KEY {
            return Err(format!("is too long; {LONGEST_KEY} bytes are allowed"));
        }
        Ok(Self(Secret::from_words(words)))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.fingerprint())
    }
}

const SHORTEST_KEY: usize = 32;
const LONGEST_KEY: u64 = 4096;

/// One variable, as `tensorwire doctor` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Setting {
    /// The variable's name.
    pub name: &'static str,
    /// What holds now.
    pub value: String,
    /// Whether the environment set it.
    pub set: bool,
    /// One sentence.
    pub doc: &'static str,
}

const TIMEOUT: &str = "TENSORWIRE_TIMEOUT";
const HOST: &str = "TENSORWIRE_HOST";
const SOCKET_DIR: &str = "TENSORWIRE_SOCKET_DIR";
const ADDRESS: &str = "TENSORWIRE_ADDRESS";
const HEARTBEAT: &str = "TENSORWIRE_HEARTBEAT";
const STRICT: &str = "TENSORWIRE_STRICT";
const NICS: &str = "TENSORWIRE_NICS";
const LOG: &str = "TENSORWIRE_LOG";
const KEY: &str = "TENSORWIRE_KEY";
const SEAL: &str = "TENSORWIRE_SEAL";
const LINK: &str = "TENSORWIRE_LINK";

const KNOWN: [&str; 11] = [TIMEOUT, HOST, SOCKET_DIR, ADDRESS, HEARTBEAT, STRICT, NICS, LOG, KEY, SEAL, LINK];

/// Whether the value of a variable must not be shown.
#[doc(hidden)]
pub fn is_secret(name: &str) -> bool {
    name == KEY
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(300),
            host: None,
            socket_dir: None,
            address: None,
            heartbeat: Duration::from_secs(5),
            strict: false,
            nics: Vec::new(),
            log: "warn".into(),
            key: None,
            seal: Seal::All,
            link: LinkKind::Auto,
        }
    }
}

impl Config {
    /// Reads the environment. A variable of ours that does not exist, or has no meaning, is an error.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| name.starts_with("TENSORWIRE_"))?;
            Some((name, value.to_string_lossy().into_owned()))
        }))
    }

    /// The same from given variables.
    pub fn from_vars(vars: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let (mut config, mut seal) = (Self::default(), None);
        for (name, value) in vars {
            if value.is_empty() {
                continue;
            }
            match name.as_str() {
                TIMEOUT => config.timeout = seconds(&name, &value)?,
                HOST => config.host = Some(value),
                SOCKET_DIR => config.socket_dir = Some(value.into()),
                ADDRESS => config.address = Some(value),
                HEARTBEAT => config.heartbeat = heartbeat(&name, &value)?,
                STRICT => config.strict = truth(&name, &value)?,
                NICS => config.nics = list(&value),
                LOG => config.log = value,
                KEY => config.key = Some(key(&value)?),
                SEAL => seal = Some(read_seal(&value)?),
                LINK => config.link = read_link(&value)?,
                _ => {
                    let known = KNOWN.join(", ");
                    return Err(Error::misuse(format!(
                        "{name} is not a variable of tensorwire; these are: {known}"
                    )));
                }
            }
        }
        if let Some(seal) = seal {
            config.key.as_ref().ok_or_else(|| {
                Error::misuse(format!(
                    "{SEAL}={seal}: without {KEY} nothing is sealed; set {KEY}, or unset {SEAL}"
                ))
            })?;
            config.seal = seal;
        }
        if config.link == LinkKind::Ucx && config.key.is_some() && config.seal == Seal::All {
            return Err(Error::misuse(format!(
                "{LINK}=ucx: UCX does not seal what it carries, and the job has a key ({KEY}); set {SEAL}=control to let tensors go \
                 open, or unset {LINK}"
            )));
        }
        Ok(config)
    }

    /// Every variable with what holds now.
    pub fn settings(&self) -> Vec<Setting> {
        let default = Self::default();
        let setting = |name, value: String, was: String, doc| Setting { name, set: value != was, value, doc };
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let path =
            |value: &Option<PathBuf>| value.as_deref().map(|p| p.display().to_string()).unwrap_or_default();
        let secs = |value: Duration| format!("{}", value.as_secs_f64());
        let print = |key: &Option<Key>| key.as_ref().map(|key| format!("fingerprint {}", key.fingerprint()));
        vec![
            setting(
                TIMEOUT,
                secs(self.timeout),
                secs(default.timeout),
                "seconds an operation may take that has no time-out of its own",
            ),
            setting(
                HOST,
                text(&self.host),
                text(&default.host),
                "label that keeps ranks with other labels from sharing memory",
            ),
            setting(
                SOCKET_DIR,
                path(&self.socket_dir),
                path(&default.socket_dir),
                "folder for private sockets, where ranks have separate network namespaces",
            ),
            setting(
                ADDRESS,
                text(&self.address),
                text(&default.address),
                "address other hosts reach this one by",
            ),
            setting(
                HEARTBEAT,
                secs(self.heartbeat),
                secs(default.heartbeat),
                "seconds another host may be silent before its ranks count as dead",
            ),
            setting(
                STRICT,
                u8::from(self.strict).to_string(),
                u8::from(default.strict).to_string(),
                "1: falling back to a slower path is an error",
            ),
            setting(
                NICS,
                self.nics.join(","),
                default.nics.join(","),
                "NICs for the GPUs in their order, between commas; the nearest where it is not set",
            ),
            setting(
                LOG,
                self.log.clone(),
                default.log,
                "what the command and Python log: error, warn, info, debug, trace",
            ),
            setting(
                KEY,
                print(&self.key).unwrap_or_default(),
                print(&default.key).unwrap_or_default(),
                "what all ranks of a job know (32 characters, or file:/path); without it whoever reaches the store's port can join",
            ),
            setting(
                SEAL,
                self.seal.to_string(),
                default.seal.to_string(),
                "what is sealed between hosts where there is a key: all, or control (tensors go open, and faster)",
            ),
            setting(
                LINK,
                self.link.to_string(),
                default.link.to_string(),
                "what carries messages between hosts: tcp, ucx, or auto (TCP so far)",
            ),
        ]
    }
}

/// The value itself is in no error.
fn key(value: &str) -> Result<Key> {
    let key = match value.strip_prefix("file:") {
        Some(path) => Key::from_file(Path::new(path)),
        None => Key::new(value),
    };
    key.map_err(|error| match error {
        Error::Misuse(text) => Error::misuse(format!("{KEY}: {text}")),
        other => other,
    })
}

fn read_seal(value: &str) -> Result<Seal> {
    let seals = [Seal::All, Seal::Control];
    let named = seals.into_iter().find(|seal| seal.to_string() == value);
    named.ok_or_else(|| Error::misuse(format!("{SEAL}={value}: all or control is needed")))
}

fn read_link(value: &str) -> Result<LinkKind> {
    let links = [LinkKind::Auto, LinkKind::Tcp, LinkKind::Ucx];
    let named = links.into_iter().find(|link| link.to_string() == value);
    named.ok_or_else(|| Error::misuse(format!("{LINK}={value}: auto, tcp or ucx is needed")))
}

fn seconds(name: &str, value: &str) -> Result<Duration> {
    value
        .parse::<f64>()
        .ok()
        .filter(|secs| *secs > 0.0)
        .and_then(|secs| Duration::try_from_secs_f64(secs).ok())
        .ok_or_else(|| Error::misuse(format!("{name}={value}: a number of seconds above 0 is needed")))
}

/// Beats are half a second apart at most, so that ranks may be configured differently.
fn heartbeat(name: &str, value: &str) -> Result<Duration> {
    let patience = seconds(name, value)?;
    if patience < Duration::from_secs(1) {
        return Err(Error::misuse(format!("{name}={value}: at least 1 second is needed")));
    }
    Ok(patience)
}

fn list(value: &str) -> Vec<String> {
    value.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn truth(name: &str, value: &str) -> Result<bool> {
    match value {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err(Error::misuse(format!("{name}={value}: 1 or 0 is needed"))),
    }
}

//! Where a listener is, as text that can be handed over: `tcp://HOST:PORT/SECRET`.

use crate::config::Key;
use crate::error::{Error, Result};

/// An address taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) admits: Admits,
}

/// Who may connect.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Admits {
    /// Who has the address: it ends with a secret.
    Holders(String),
    /// Who has the key of the job, or anybody if the job has none.
    Job,
    /// Anybody who reaches the port.
    Anybody,
}

impl std::fmt::Debug for Admits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Holders(_) => "Holders",
            Self::Job => "Job",
            Self::Anybody => "Anybody",
        })
    }
}

/// Behind an address: anybody may connect.
const OPEN: &str = "open";

impl Address {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let wrong = |why: &str| {
            // Not all of it: it may hold a secret.
            let shown = text.split_once("://").map_or("...", |(scheme, rest)| {
                let place = rest.split_once('/').map_or(rest, |(place, _)| place);
                &text[..scheme.len() + 3 + place.len()]
            });
            Error::misuse(format!(
                "{shown:?} is not the address of a pipe: {why}; an address is tcp://HOST:PORT, and what Listener::address() gives"
            ))
        };
        let rest = text.strip_prefix("tcp://").ok_or_else(|| wrong("it does not begin with tcp://"))?;
        let (place, behind) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = place.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
        let port = port.parse().map_err(|_| wrong("its port is not a number from 0 to 65535"))?;
        let host = host.strip_prefix('[').map_or(Some(host), |inner| inner.strip_suffix(']'));
        let host = host.filter(|host| !host.is_empty()).ok_or_else(|| wrong("it has no host"))?;
        let admits = match behind {
            "" => Admits::Job,
            OPEN => Admits::Anybody,
            // A secret is 64 hexadecimal digits.
            secret if secret.len() == 64 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
                Admits::Holders(secret.to_owned())
            }
            _ => return Err(wrong("what stands behind its port is no secret of a listener")),
        };
        Ok(Self { host: host.to_owned(), port, admits })
    }

    /// The key of the pipes to this listener, where it is not that of the job. A job with a key wants that, too.
    pub(super) fn key(&self, job: Option<&Key>) -> Result<Option<Key>> {
        match &self.admits {
            Admits::Holders(secret) => Key::with(job, secret).map(Some),
            Admits::Job | Admits::Anybody => Ok(None),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port, admits } = self;
        match host.contains(':') {
            true => write!(f, "tcp://[{host}]:{port}")?,
            false => write!(f, "tcp://{host}:{port}")?,
        }
        match admits {
            Admits::Holders(secret) => write!(f, "/{secret}"),
            Admits::Job => Ok(()),
            Admits::Anybody => write!(f, "/{OPEN}"),
        }
    }
}

/// Any text as an address: what is understood comes out again.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz(text: &str) {
    if let Ok(address) = Address::parse(text) {
        assert_eq!(Address::parse(&address.to_string()).ok(), Some(address));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back() {
        let secret = "0123456789abcdef".repeat(4);
        for text in [
            format!("tcp://127.0.0.1:7000/{secret}"),
            "tcp://node7:1".into(),
            "tcp://[::1]:65535/open".into(),
        ] {
            assert_eq!(Address::parse(&text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_and_no_secret_is_shown() {
        let secret = "0123456789abcdef".repeat(4);
        for text in [
            "",
            "tcp://",
            "tcp://host",
            "tcp://:1",
            "tcp://h:x",
            "tcp://h:65536",
            "udp://h:1",
            "tcp://[::1:1",
            "tcp://h:1/short",
        ] {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(error.contains("is not the address of a pipe"), "{error}");
        }
        let error = Address::parse(&format!("tcp://h:x/{secret}")).unwrap_err().to_string();
        assert!(!error.contains(&secret), "{error}");
        for text in [format!("tcp://h:1/{secret}0"), format!("tcp://h:1/{secret}/"), secret.clone()] {
            let error = Address::parse(&text).unwrap_err().to_string();
            assert!(!error.contains(&secret), "{error}");
        }
        let address = Address::parse(&format!("tcp://h:1/{secret}")).unwrap();
        assert!(!format!("{address:?}").contains(&secret));
    }
}

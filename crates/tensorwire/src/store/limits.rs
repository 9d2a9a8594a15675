//! How much a store's server takes from its clients. Everything is checked before it is allocated.

/// The limits of a server. A client that exceeds one loses its connection, and the server logs a line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a key; 8 KiB, as in torch.
    pub key: usize,
    /// Bytes of a value; 8 MiB, as in torch.
    pub value: usize,
    /// Keys of one request; 131,072, as in torch.
    pub keys_per_request: usize,
    /// Bytes of one request, and of one reply; 256 MiB.
    pub request: usize,
    /// Keys in the store, with the values in its queues; 4 million.
    pub keys: usize,
    /// Bytes in the store, keys included; 4 GiB.
    pub bytes: usize,
    /// Bytes of requests not yet complete and of replies not yet read, of all clients together; 1 GiB.
    pub buffered: usize,
    /// Clients at once; what RLIMIT_NOFILE allows when the server starts, less 64 for the rest of the process.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key: 8 << 10,
            value: 8 << 20,
            keys_per_request: 128 << 10,
            request: 256 << 20,
            keys: 4 << 20,
            bytes: 4 << 30,
            buffered: 1 << 30,
            connections: connections(),
        }
    }
}

impl Limits {
    /// What torch's server takes, and therefore our client sends.
    pub(super) fn torch() -> Self {
        Self { key: 8 << 10, value: 8 << 20, keys_per_request: 128 << 10, ..Self::none() }
    }

    /// No limits: for a store that only this process can reach.
    pub fn none() -> Self {
        const MOST: usize = usize::MAX / 4;
        Self {
            key: MOST,
            value: MOST,
            keys_per_request: MOST,
            request: MOST,
            keys: MOST,
            bytes: MOST,
            buffered: MOST,
            connections: MOST,
        }
    }
}

fn connections() -> usize {
    const RESERVE: u64 = 64;
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    usize::try_from(files.saturating_sub(RESERVE).max(16)).unwrap_or(usize::MAX)
}

//! A TCPStore of torch, reached again by a client of ours.
//!
//! torch does not tell the prefix of a PrefixStore. So a key that nobody else has is set through the store and looked
//! for through our client; the rest of its name is the prefix. This also proves that both clients talk to one server.
//! The key is removed again.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tensorwire::store::{PrefixStore, Request, Store, TcpStore};
use tensorwire::{Deadline, Error, Result};

use super::TorchStore;
use super::methods::Methods;
use super::own_thread::{Stop, on_own_thread};
use super::shape::Bottom;

/// How long an answer may take, and everything. torch's server looks up the name of each client and answers nobody in the
/// meantime: a lost packet to the name server is 5 seconds, and two of them 10.
const ANSWER: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(60));
/// How many keys are listed to find one. In a fuller store torch is made to say its name, which also makes it log two
/// lines.
const LISTED: u64 = 2000;

/// The store over a client of ours if it is a TCPStore, else or if that cannot be over its methods.
pub(super) fn reach(methods: Methods, timeout: Duration) -> Result<Arc<dyn Store>> {
    let name = methods.shape().name().to_owned();
    let Bottom::Tcp { host, port, .. } = methods.shape().bottom().clone() else {
        tracing::debug!(store = name, "served by its Python methods");
        return Ok(Arc::new(TorchStore::new(methods, timeout)));
    };
    let own = methods.clone();
    let reached = on_own_thread(methods.crowd(), &name, Deadline::after(ANSWER.1), move |stop| {
        let native = TcpStore::connect_as_torch(&host, port, ANSWER.0.min(timeout))?;
        // A client of its own: another thread may be waiting in the one that we were given.
        let methods = own.cloned()?;
        let found = find(&methods, native, timeout, stop);
        Ok((methods, found))
    });
    let (methods, found) = match reached {
        Ok((methods, found)) => (methods, found),
        Err(error @ Error::Interrupted(_)) => return Err(error),
        Err(error) => (methods, Err(error)),
    };
    match found {
        Ok(store) => {
            tracing::debug!(store = name, "reached by a client of ours");
            Ok(store)
        }
        Err(error) => {
            tracing::warn!(
                "{name} cannot be reached by a client of ours and is served by its Python methods: {error}"
            );
            Ok(Arc::new(TorchStore::new(methods, timeout)))
        }
    }
}

/// A client of ours under the same prefix.
fn find(methods: &Methods, native: TcpStore, timeout: Duration, stop: &Stop) -> Result<Arc<dyn Store>> {
    native.set_timeout(ANSWER.0);
    let key = format!("tensorwire/probe/{:016x}{:016x}", random(), random());
    let value = format!("{:016x}", random()).into_bytes();
    let soon = || Deadline::after(ANSWER.0);
    methods.execute(Request::Set(key.clone(), value.clone()), soon(), stop)?;
    // torch does not wait until the server has set it. A question behind it on the same connection does.
    methods.execute(Request::Check(vec![key.clone()]), soon(), stop)?;
    let prefix = prefix(methods, &native, &key);
    let there = prefix.as_ref().ok().map(|prefix| format!("{prefix}{key}"));
    let found = there.as_ref().map(|there| look(&native, there));
    match (&there, &found) {
        (Some(there), Some(Ok(Some(_)))) => native.delete(there).map(drop)?,
        _ => methods.execute(Request::Delete(key), soon(), stop).map(drop)?,
    }
    let prefix = prefix?;
    match found.transpose()?.flatten() {
        Some(found) if found == value => {}
        _ => {
            let text =
                "a key that was set through it is not seen there by us: is it another server that we reach?";
            return Err(Error::misuse(text));
        }
    }
    // Before a prefix hides it: what is below a prefix connects again within its own time-out.
    native.set_timeout(timeout);
    Ok(match prefix.strip_suffix('/') {
        Some(prefix) => Arc::new(PrefixStore::new(prefix, Arc::new(native))),
        None => Arc::new(native),
    })
}

/// What a key has now. A short time-out would not do: the server may be slow to answer.
fn look(native: &TcpStore, key: &str) -> Result<Option<Vec<u8>>> {
    if native.check(&[key])? { native.get(key).map(Some) } else { Ok(None) }
}

/// What stands before `key` in the server.
fn prefix(methods: &Methods, native: &TcpStore, key: &str) -> Result<String> {
    let before = if methods.shape().prefixes() == 0 {
        Some(String::new())
    } else if native.num_keys()? <= LISTED {
        native.list_keys()?.iter().find_map(|long| long.strip_suffix(key).map(str::to_owned))
    } else {
        methods.long_name(&format!("{key}/absent"))?.strip_suffix(&format!("{key}/absent")).map(str::to_owned)
    };
    before.filter(|before| before.is_empty() || before.ends_with('/')).ok_or_else(|| {
        Error::misuse("its prefix was not found: a key that was set through it is not in the server's list")
    })
}

fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

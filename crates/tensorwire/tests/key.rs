//! Groups of a job that has a key: who has it not is named, and a store that lies lets nobody in.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ranks::{LONG, describe, on_threads};
use tensorwire::config::Key;
use tensorwire::store::{MemoryStore, Reply, Request, Store};
use tensorwire::{Config, Context, Deadline, Error, Group, PeerFaultKind, Result};

const OURS: &str = "the key of all ranks, which nobody guesses";
const OTHER: &str = "another key, as long and as good as the first";
/// How long a rank waits that nobody tells why it waits in vain.
const SHORT: Duration = Duration::from_secs(3);

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn context(host: &str, key: Option<&str>) -> Arc<Context> {
    let mut config = Config::default();
    config.host = Some(host.to_owned());
    config.heartbeat = Duration::from_secs(30);
    config.key = key.map(|words| Key::new(words).unwrap());
    Context::new(config).unwrap()
}

fn fingerprint(words: &str) -> String {
    Key::new(words).unwrap().fingerprint()
}

/// Forms a group of threads, two ranks on each host, with a key for each rank.
fn form(store: &Arc<dyn Store>, keys: &[Option<&str>], name: &str) -> Vec<Result<Group>> {
    form_within(LONG, store, keys, name)
}

fn form_within(
    timeout: Duration,
    store: &Arc<dyn Store>,
    keys: &[Option<&str>],
    name: &str,
) -> Vec<Result<Group>> {
    on_threads(keys.len(), |rank| {
        let builder = Group::builder().context(&context(["a", "b"][rank / 2 % 2], keys[rank])).name(name);
        builder.timeout(timeout).from_store(store.clone(), rank, keys.len())
    })
}

fn all_fail(ends: Vec<Result<Group>>) -> Vec<Error> {
    let outcomes: Vec<String> = ends.iter().map(ranks::outcome).collect();
    println!("{}", outcomes.join("\n"));
    ends.into_iter().map(|end| end.map(drop).unwrap_err()).collect()
}

// Who has no key, or another

#[test]
fn groups_sub_groups_and_shrunk_groups() {
    let store = Lying::new(|_, _| None);
    let groups: Vec<Group> =
        form(&store.store(), &[Some(OURS); 4], "world").into_iter().map(Result::unwrap).collect();
    on_threads(4, |rank| {
        let group = &groups[rank];
        assert_eq!(group.hosts(), [[0, 1], [2, 3]]);
        group.barrier().wait().unwrap();
        let across = group.split(Some(rank as u64 % 2), -(rank as i64)).unwrap().unwrap();
        assert_eq!((across.world(), across.rank()), (2, 1 - rank / 2));
        across.barrier().wait().unwrap();
        let within = group.subgroup(if rank < 2 { &[1, 0] } else { &[3, 2] }).unwrap();
        within.barrier().wait().unwrap();
        let shrunk = within.shrink().unwrap();
        assert_eq!(shrunk.world(), 2);
        shrunk.barrier().wait().unwrap();
        let text = format!("{:?} {:?} {}", group, group.context().config(), group.explain());
        assert!(!text.contains(OURS) && text.contains(&fingerprint(OURS)), "{text}");
    });
    // All that was written has a proof, but for counters.
    let written = store.written.lock().unwrap();
    assert!(written.len() > 20);
    for (key, value) in written.iter() {
        assert!(value.starts_with(b"twpf\x01"), "{key}: {value:?}");
    }
}

#[test]
fn a_rank_without_the_key_or_with_another() {
    for odd in [0, 1, 3] {
        for key in [None, Some(OTHER)] {
            let mut keys = [Some(OURS); 4];
            keys[odd] = key;
            let ends = all_fail(form(&memory(), &keys, "world"));
            for (rank, error) in ends.iter().enumerate() {
                let Error::Peer(fault) = error else { panic!("{}", describe(error)) };
                assert_eq!(fault.kind, PeerFaultKind::Incompatible, "rank {rank}: {error}");
                let text = error.to_string();
                assert!(text.contains("TENSORWIRE_KEY"), "{text}");
                // Both sides are named: who has which key, and by what it was noticed.
                let (ours, theirs) = (fingerprint(OURS), key.map(fingerprint));
                if odd != 0 && rank != odd {
                    assert_eq!(fault.rank, Some(odd), "{text}");
                    assert!(
                        text.contains(&format!("rank {odd} (host")) && text.contains("rank 0 (host"),
                        "{text}"
                    );
                    let says = theirs.map_or("no proof".to_owned(), |print| format!("the key {print}"));
                    assert!(text.contains(&says) && text.contains(&format!("has the key {ours}")), "{text}");
                } else if odd != 0 {
                    let has = theirs.map_or("no key".to_owned(), |print| format!("the key {print}"));
                    assert!(text.contains(&format!("proved with the key {ours}")), "{text}");
                    assert!(text.contains(&format!("rank {odd} (host")) && text.contains(&has), "{text}");
                } else if rank != 0 {
                    assert!(text.contains("\"verdict\" of the group \"world\""), "{text}");
                    let has = theirs.map_or("no key".to_owned(), |print| format!("the key {print}"));
                    assert!(
                        text.contains(&format!("and rank 0 (host a, pid {}) has {has}", std::process::id()))
                    );
                    assert!(text.contains(&format!("rank {rank} (host")), "{text}");
                }
            }
        }
    }
}

#[test]
fn a_latecomer_without_the_key() {
    let store = memory();
    let groups: Vec<Group> =
        form(&store, &[Some(OURS); 2], "world").into_iter().map(Result::unwrap).collect();
    let builder = Group::builder().context(&context("a", None)).timeout(LONG);
    let error = builder.from_store(store, 1, 2).unwrap_err();
    assert!(error.to_string().contains("and rank 1 (host a"), "{error}");
    assert!(error.to_string().contains("has no key"), "{error}");
    drop(groups);
}

// A store that lies

/// Gives another value for a key, or none if it does not lie about this one.
type Lie = dyn Fn(&str, &[u8]) -> Option<Vec<u8>> + Send + Sync;

/// A store that changes what it is asked for.
#[derive(Clone)]
struct Lying {
    below: Arc<dyn Store>,
    lie: Arc<Lie>,
    /// What it was told, last, but for counters.
    written: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
}

impl Lying {
    fn new(lie: impl Fn(&str, &[u8]) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self { below: memory(), lie: Arc::new(lie), written: Arc::default() }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn told(&self, key: &str, value: &[u8]) -> Vec<u8> {
        (self.lie)(key, value).unwrap_or_else(|| value.to_vec())
    }
}

impl std::fmt::Debug for Lying {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lying")
    }
}

impl Store for Lying {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        let mut written = self.written.lock().unwrap();
        let keys = match &request {
            Request::Get(key) => vec![key.clone()],
            Request::MultiGet(keys) => keys.clone(),
            Request::CompareSet { key, desired, .. } => {
                written.insert(key.clone(), desired.clone());
                vec![key.clone()]
            }
            Request::Set(key, value) => {
                written.insert(key.clone(), value.clone());
                Vec::new()
            }
            Request::MultiSet(pairs) => {
                written.extend(pairs.iter().cloned());
                Vec::new()
            }
            _ => Vec::new(),
        };
        drop(written);
        Ok(match self.below.call(request, deadline)? {
            Reply::Value(value) => Reply::Value(self.told(&keys[0], &value)),
            Reply::Values(values) => {
                Reply::Values(keys.iter().zip(&values).map(|(key, value)| self.told(key, value)).collect())
            }
            other => other,
        })
    }

    fn timeout(&self) -> Duration {
        self.below.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.below.set_timeout(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self { below: self.below.clone_store()?, ..self.clone() }))
    }
}

/// What a group reads before it is formed.
const READ: [&str; 6] = ["card/1", "verdict", "open/2", "host/2", "map", "hub"];

fn is_about(key: &str, what: &str) -> bool {
    key.starts_with("tensorwire/world/") && key.ends_with(&format!("/{what}"))
}

#[test]
fn a_store_that_changes_a_value() {
    for what in READ {
        let store = Lying::new(move |key, value| {
            is_about(key, what).then(|| {
                let mut changed = value.to_vec();
                *changed.last_mut().unwrap() ^= 1;
                changed
            })
        });
        let ends = all_fail(form(&store.store(), &[Some(OURS); 4], "world"));
        let named = |error: &Error| {
            let by_name =
                error.to_string().contains(&format!("{what:?} of the group \"world\" in its store"));
            let of_card = what == "card/1" && error.to_string().contains("its card has a wrong proof");
            matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Misbehaved)
                && (by_name || of_card)
        };
        assert!(ends.iter().any(named), "{what}");
    }
}

#[test]
fn a_store_that_takes_proofs_away() {
    for what in READ {
        let store = Lying::new(move |key, value| is_about(key, what).then(|| value[45..].to_vec()));
        let ends = all_fail(form(&store.store(), &[Some(OURS); 4], "world"));
        assert!(ends.iter().any(|error| error.to_string().contains("has no proof")), "{what}");
    }
}

#[test]
fn a_failure_that_nobody_proves() {
    let below = memory();
    let failure = tensorwire::wire::Writer::new().u8(3).bytes(b"a lie").finish();
    below.set("tensorwire/world/failed", &failure).unwrap();
    for error in all_fail(form(&below, &[Some(OURS); 4], "world")) {
        assert!(!error.to_string().contains("a lie"), "{error}");
    }
}

/// What was said under one name is said under another, and what a group said is told to the next one of that name.
#[test]
fn values_that_are_moved() {
    let first = Lying::new(|_, _| None);
    drop(form(&first.store(), &[Some(OURS); 4], "world").into_iter().map(Result::unwrap).collect::<Vec<_>>());
    let said = Arc::new(first.written.lock().unwrap().clone());
    let moves =
        [("map", "host/2"), ("host/2", "map"), ("hub", "map"), ("verdict", "card/1"), ("open/2", "hub")];
    let replays = READ.map(|what| (what, what));
    for (what, from) in moves.into_iter().chain(replays) {
        let said = said.clone();
        let store = Lying::new(move |key, _| {
            is_about(key, what).then(|| said[&format!("tensorwire/world/{from}")].clone())
        });
        println!("{from} for {what}:");
        // A card that its rank proved once: nobody finds a fault in it, and its rank is waited for.
        let timeout = if (what, from) == ("card/1", "card/1") { SHORT } else { LONG };
        all_fail(form_within(timeout, &store.store(), &[Some(OURS); 4], "world"));
        // The same to a group of another name.
        let said = first.written.lock().unwrap().clone();
        let store = Lying::new(move |key, _| {
            let lies = key.starts_with("tensorwire/other/") && key.ends_with(&format!("/{what}"));
            lies.then(|| said[&format!("tensorwire/world/{from}")].clone())
        });
        let ends = all_fail(form(&store.store(), &[Some(OURS); 4], "other"));
        assert!(ends.iter().any(|error| error.to_string().contains("wrong proof")), "{from} for {what}");
    }
}

#[test]
fn a_split_whose_wishes_are_changed() {
    let store = Lying::new(|key, value| {
        key.starts_with("tensorwire/world/split/0/3").then(|| {
            let mut changed = value.to_vec();
            // Behind it stands a mark of the exchange.
            let at = changed.len() - 2;
            changed[at] ^= 1;
            changed
        })
    });
    let groups: Vec<Group> =
        form(&store.store(), &[Some(OURS); 4], "world").into_iter().map(Result::unwrap).collect();
    on_threads(4, |rank| {
        let error = groups[rank].split(Some(1), rank as i64).unwrap_err();
        let Error::Peer(fault) = &error else { panic!("{}", describe(&error)) };
        assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Misbehaved, Some(3)), "{error}");
        assert!(error.to_string().contains("what it said in split() has a wrong proof"), "{error}");
    });
}

// The variable

/// A file that goes with the test.
struct File(PathBuf);

impl File {
    fn new(content: &[u8], mode: u32) -> Self {
        let id = tensorwire::device::Id::random().unwrap();
        let path = std::env::temp_dir().join(format!("tensorwire-key-{id}"));
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        Self(path)
    }

    fn read(&self) -> Result<Config> {
        variable(&format!("file:{}", self.0.display()))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn variable(value: &str) -> Result<Config> {
    Config::from_vars([("TENSORWIRE_KEY".to_owned(), value.to_owned())])
}

#[test]
fn keys_as_words_and_as_files() {
    let words = variable(OURS).unwrap();
    assert_eq!(words.key, Some(Key::new(OURS).unwrap()));
    for end in ["", "\n", "\r\n"] {
        let file = File::new(format!("{OURS}{end}").as_bytes(), 0o600);
        assert_eq!(file.read().unwrap(), words);
    }
    assert_ne!(variable(OTHER).unwrap(), words);
    let setting = words.settings().into_iter().find(|setting| setting.name == "TENSORWIRE_KEY").unwrap();
    assert_eq!(setting.value, format!("fingerprint {}", fingerprint(OURS)));
    assert!(setting.set && setting.doc.contains("whoever reaches the store's port can join"));
    let text = format!("{words:?}");
    assert!(text.contains(&fingerprint(OURS)) && !text.contains(OURS), "{text}");
}

#[test]
fn key_files_that_others_may_read_or_change() {
    for mode in [0o640, 0o604, 0o644, 0o620, 0o602, 0o666] {
        let error = File::new(OURS.as_bytes(), mode).read().unwrap_err();
        println!("{error}");
        let text = error.to_string();
        assert!(
            text.contains("TENSORWIRE_KEY: the key file /") && text.contains(&format!("mode {mode:03o}")),
            "{text}"
        );
        assert!(!text.contains(OURS), "{text}");
    }
}

#[test]
fn keys_that_are_none() {
    let short = "only thirty-one characters long";
    assert_eq!(short.len(), 31);
    for error in [variable(short).unwrap_err(), File::new(short.as_bytes(), 0o600).read().unwrap_err()] {
        println!("{error}");
        assert!(error.to_string().contains("of 31 characters is too short; 32 are needed"), "{error}");
        assert!(!error.to_string().contains("thirty"), "{error}");
    }
    let long = File::new(&[b'x'; 5000], 0o600).read().unwrap_err();
    assert!(long.to_string().contains("too long"), "{long}");
    for (path, why) in
        [("/nowhere/at/all", "cannot be read"), ("/tmp", "is not a file"), ("/dev/zero", "is not a file")]
    {
        let error = variable(&format!("file:{path}")).unwrap_err();
        println!("{error}");
        assert!(error.to_string().contains(path) && error.to_string().contains(why), "{error}");
    }
}

//! The file store where things go wrong.

#![allow(clippy::unwrap_used, clippy::panic)] // clippy.toml allows them in tests, but not in what tests call

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tensorwire::Deadline;
use tensorwire::store::{FileStore, Store};

/// A folder of its own for each test, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("tensorwire-file-{}-{test}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn store(&self) -> PathBuf {
        self.0.join("store")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn append(path: &Path, bytes: &[u8]) {
    OpenOptions::new().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn a_half_record_is_cut_off() {
    let folder = Folder::new("half");
    let path = folder.store();
    let store = FileStore::open(&path).unwrap();
    store.set("key", b"value").unwrap();
    let whole = fs::read(&path).unwrap();
    // Everything that a writer may have left when it died.
    for len in 1..whole.len() {
        append(&path, &whole[..len]);
        assert_eq!(store.get("key").unwrap(), b"value", "cut off after {len} bytes");
        let late = FileStore::open(&path).unwrap();
        assert_eq!(late.list_keys().unwrap().first().unwrap(), if len == 1 { "key" } else { "count" });
        assert_eq!(late.add("count", 1).unwrap(), len as i64);
        assert_eq!(store.add("count", 0).unwrap(), len as i64);
    }
    assert_eq!(
        FileStore::open(&path).unwrap().get("count").unwrap(),
        (whole.len() - 1).to_string().as_bytes()
    );
}

#[test]
fn another_kind_of_file_is_left_alone() {
    let folder = Folder::new("other");
    for (n, content) in
        [&b"hello, this is a text"[..], &[0xFF; 100], &[0; 3], b"abc", &[0; 64]].iter().enumerate()
    {
        let path = folder.0.join(n.to_string());
        fs::write(&path, content).unwrap();
        let error = FileStore::open(&path).unwrap_err().to_string();
        assert!(error.contains("byte 0") && error.contains(path.to_str().unwrap()), "{error}");
        assert_eq!(fs::read(&path).unwrap(), *content);
    }
    // Damage in the middle is named by its place.
    let path = folder.store();
    let store = FileStore::open(&path).unwrap();
    store.set("key", b"value").unwrap();
    let end = fs::metadata(&path).unwrap().len();
    append(&path, &[0xEE; 40]);
    let error = store.get("other").unwrap_err().to_string();
    assert!(error.contains(&format!("byte {end}")), "{error}");
    assert!(store.set("other", b"").is_err());
    assert_eq!(fs::metadata(&path).unwrap().len(), end + 40);
}

#[test]
fn what_is_no_file_is_named() {
    let folder = Folder::new("nofile");
    let error = FileStore::open(&folder.0).unwrap_err().to_string();
    assert!(error.contains(folder.0.to_str().unwrap()), "{error}");
    let error = FileStore::open(folder.0.join("none/store")).unwrap_err().to_string();
    assert!(error.contains("none/store") && error.contains("No such file"), "{error}");
    let error = FileStore::open("/dev/null").unwrap_err().to_string();
    assert!(error.contains("is not a file"), "{error}");
}

#[test]
fn a_removed_or_emptied_file_is_an_error_not_a_wait() {
    let folder = Folder::new("removed");
    let path = folder.store();
    let store = FileStore::open(&path).unwrap();
    store.set("key", b"value").unwrap();
    fs::write(&path, b"").unwrap();
    let error = store.get("other").unwrap_err().to_string();
    assert!(error.contains("cut"), "{error}");
    fs::remove_file(&path).unwrap();
    let error = store.get("other").unwrap_err().to_string();
    assert!(error.contains("removed"), "{error}");
}

/// One that waits for the file's lock does not make another wait beyond its own deadline.
#[test]
fn threads_that_share_a_store_keep_their_own_deadlines() {
    let folder = Folder::new("deadlines");
    let store = FileStore::open(folder.store()).unwrap();
    store.set("k", b"v").unwrap();
    let holder = File::open(folder.store()).unwrap();
    rustix::fs::flock(&holder, rustix::fs::FlockOperation::LockExclusive).unwrap();
    std::thread::scope(|scope| {
        let patient = scope.spawn(|| store.add("n", 1));
        let error = store.wait_by(&["none"], Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(!patient.is_finished());
        rustix::fs::flock(&holder, rustix::fs::FlockOperation::Unlock).unwrap();
        assert_eq!(patient.join().unwrap().unwrap(), 1);
    });
}

#[test]
fn a_lock_that_is_not_given_back_ends_by_the_deadline() {
    let folder = Folder::new("lock");
    let path = folder.store();
    let store = FileStore::open(&path).unwrap();
    let holder = File::open(&path).unwrap();
    rustix::fs::flock(&holder, rustix::fs::FlockOperation::LockExclusive).unwrap();
    store.set_timeout(Duration::from_millis(50));
    let error = store.set("key", b"value").unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("another process holds it"), "{error}");
    // Who only looks is not disturbed while nothing is new.
    assert!(!store.check(&["key"]).unwrap());
    drop(holder);
    store.set_timeout(Duration::from_secs(30));
    store.set("key", b"value").unwrap();
    assert_eq!(store.get_by("key", Deadline::after(Duration::ZERO)).unwrap(), b"value");
}

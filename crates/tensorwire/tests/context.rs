//! Contexts and their configuration.
#![allow(clippy::unwrap_used, clippy::panic)]

mod ranks;

use std::time::Duration;

use tensorwire::device::Handle;
use tensorwire::{Config, Context, DeviceId, Error};

fn config(vars: &[(&str, &str)]) -> tensorwire::Result<Config> {
    Config::from_vars(vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

#[test]
fn every_variable_is_read() {
    let read = config(&[
        ("TENSORWIRE_TIMEOUT", "1.5"),
        ("TENSORWIRE_HOST", "left"),
        ("TENSORWIRE_SOCKET_DIR", "/run/x"),
        ("TENSORWIRE_ADDRESS", "10.0.0.1"),
        ("TENSORWIRE_HEARTBEAT", "7"),
        ("TENSORWIRE_STRICT", "yes"),
        ("TENSORWIRE_NICS", "mlx5_0, mlx5_1,"),
        ("TENSORWIRE_LOG", "debug"),
        ("TENSORWIRE_SEAL", "control"),
        ("TENSORWIRE_LINK", "ucx"),
        ("TENSORWIRE_KEY", "at least thirty-two characters of words"),
    ])
    .unwrap();
    assert_eq!(read.timeout, Duration::from_millis(1500));
    assert_eq!(read.heartbeat, Duration::from_secs(7));
    assert_eq!(read.seal, tensorwire::config::Seal::Control);
    assert_eq!(read.link, tensorwire::config::LinkKind::Ucx);
    assert_eq!(read.host.as_deref(), Some("left"));
    assert_eq!(read.address.as_deref(), Some("10.0.0.1"));
    assert!(read.strict);
    assert_eq!(read.nics, ["mlx5_0", "mlx5_1"]);
    let settings = read.settings();
    assert!(settings.len() <= 15, "law 10");
    assert!(settings.iter().all(|setting| setting.set && !setting.doc.is_empty()));
    assert!(Config::default().settings().iter().all(|setting| !setting.set));
    // Empty means unset.
    assert_eq!(config(&[("TENSORWIRE_TIMEOUT", ""), ("TENSORWIRE_HOST", "")]).unwrap(), Config::default());
}

#[test]
fn nonsense_is_refused() {
    for (name, value) in [
        ("TENSORWIRE_TIMEOUT", "0"),
        ("TENSORWIRE_TIMEOUT", "-1"),
        ("TENSORWIRE_TIMEOUT", "soon"),
        ("TENSORWIRE_TIMEOUT", "inf"),
        ("TENSORWIRE_TIMEOUT", "NaN"),
        ("TENSORWIRE_TIMEOUT", "1e300"),
        ("TENSORWIRE_HEARTBEAT", "0"),
        ("TENSORWIRE_HEARTBEAT", "0.1"),
        ("TENSORWIRE_STRICT", "2"),
        ("TENSORWIRE_KEY", "too short"),
        ("TENSORWIRE_SEAL", "some"),
        ("TENSORWIRE_LINK", "rdma"),
        // Without a key nothing is sealed.
        ("TENSORWIRE_SEAL", "all"),
        ("TENSORWIRE_STRIKT", "1"),
        ("TENSORWIRE_", "1"),
    ] {
        let error = config(&[(name, value)]).unwrap_err();
        assert!(matches!(&error, Error::Misuse(text) if text.contains(name)), "{error}");
    }
}

/// UCX does not seal: a job with a key says that its tensors may go open, or stays with TCP.
#[test]
fn a_key_and_ucx() {
    let key = ("TENSORWIRE_KEY", "at least thirty-two characters of words");
    let error = config(&[key, ("TENSORWIRE_LINK", "ucx")]).unwrap_err().to_string();
    assert!(error.contains("UCX does not seal") && error.contains("TENSORWIRE_SEAL=control"), "{error}");
    config(&[key, ("TENSORWIRE_LINK", "auto")]).unwrap();
    config(&[key, ("TENSORWIRE_LINK", "ucx"), ("TENSORWIRE_SEAL", "control")]).unwrap();
}

#[test]
fn memory_that_arrives_twice_is_mapped_once() {
    let context = ranks::context();
    let region = context.host().alloc(4096).unwrap();
    region.write(0, b"hello").unwrap();
    let one = context.import(region.export().unwrap()).unwrap();
    let two = context.import(region.export().unwrap()).unwrap();
    assert_eq!(one.addr(), two.addr());
    assert_eq!(context.mapped(), (1, one.len()));
    let mut bytes = [0; 5];
    two.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    drop((one, two));
    assert_eq!(context.mapped(), (0, 0));
    // Mapped anew after that.
    assert_eq!(context.import(region.export().unwrap()).unwrap().len(), region.len());
}

#[test]
fn a_cached_mapping_does_not_excuse_a_false_promise() {
    let context = ranks::context();
    let region = context.host().alloc(4096).unwrap();
    let _first = context.import(region.export().unwrap()).unwrap();
    let Handle::Memfd { fd, len } = region.export().unwrap() else { panic!("not a memfd") };
    assert!(context.import(Handle::Memfd { fd, len: len * 2 }).is_err());
    let Handle::Memfd { fd, len } = region.export().unwrap() else { panic!("not a memfd") };
    assert!(context.import(Handle::Memfd { fd, len: len / 2 }).is_err());
    assert_eq!(context.mapped().0, 1);
}

#[test]
fn contexts_are_separate_and_know_the_host() {
    let (a, b) = (ranks::context(), ranks::context());
    assert_ne!(a.identity(), b.identity());
    assert_eq!(a.all_devices()[0].id(), DeviceId::Host);
    assert!(a.device(&DeviceId::Host).is_ok());
    // A GPU that is not there, or no driver at all: either way it is said.
    let gpu = DeviceId::Gpu([1; 16]);
    let error = a.device(&gpu).unwrap_err().to_string();
    assert!(error.contains(&gpu.to_string()) && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
}

/// A context that is dropped takes its thread and descriptors with it.
#[test]
fn a_context_leaves_nothing() {
    if ranks::Rank::of_this_process().is_none() {
        return ranks::Ranks::start("a_context_leaves_nothing", 1).ranks.remove(0).expect_success();
    }
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let usage = || (count("/proc/self/fd"), count("/proc/self/task"));
    drop(Context::new(Config::default()).unwrap());
    let before = usage();
    for _ in 0..50 {
        drop(Context::new(Config::default()).unwrap());
    }
    assert_eq!(usage(), before);
}

#[test]
fn a_socket_directory_that_is_not_there_is_named() {
    let mut config = Config::default();
    config.socket_dir = Some("/nowhere/at/all".into());
    let error = Context::new(config).unwrap_err();
    assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
}

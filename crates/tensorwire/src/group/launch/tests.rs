use proptest::prelude::*;

use super::*;

fn read(vars: &[(&str, &str)]) -> Result<Launch> {
    let vars: BTreeMap<&str, &str> = vars.iter().copied().collect();
    Launch::read(&|name| vars.get(name).map(|value| (*value).to_owned()))
}

fn refused(vars: &[(&str, &str)], part: &str) {
    let error = read(vars).expect_err(part);
    assert!(matches!(&error, Error::Misuse(text) if text.contains(part)), "{part:?} is not in: {error}");
}

const TORCH: [(&str, &str); 4] =
    [("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "head"), ("MASTER_PORT", "29500")];

#[test]
fn torchrun() {
    let launch = read(&TORCH).unwrap();
    assert_eq!((launch.rank, launch.world, launch.host.as_str(), launch.port), (3, 8, "head", 29500));
    assert!(!launch.served && launch.attempt.is_empty());
    let elastic = [
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RUN_ID", "job"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
    ];
    let launch = read(&[&TORCH[..], &elastic].concat()).unwrap();
    assert!(launch.served);
    assert_eq!(launch.attempt, "job.2");
}

#[test]
fn torchrun_wins_over_the_scheduler_it_runs_in() {
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_JOB_NODELIST", "n1")];
    assert_eq!(read(&[&TORCH[..], &slurm].concat()).unwrap().launcher, "torchrun");
}

#[test]
fn half_set_and_contradictory_variables() {
    refused(&[], "tensorwire run");
    for missing in 0..TORCH.len() {
        let mut rest = TORCH.to_vec();
        let (name, _) = rest.remove(missing);
        refused(&rest, &format!("{name} is not set"));
    }
    let with = |name: &'static str, value: &'static str| [&TORCH[..], &[(name, value)]].concat();
    refused(&with("RANK", "-1"), "RANK=-1");
    refused(&with("RANK", "one"), "RANK=one: a number from 0 is needed");
    refused(&with("WORLD_SIZE", "1e3"), "WORLD_SIZE=1e3");
    refused(&with("MASTER_PORT", "abc"), "MASTER_PORT=abc: a port from 1 to 65535 is needed");
    refused(&with("MASTER_PORT", "0"), "MASTER_PORT=0");
    refused(&with("MASTER_PORT", "65536"), "MASTER_PORT=65536");
    let local = |rank, world| [&TORCH[..], &[("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)]].concat();
    refused(&local("2", "2"), "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2");
    refused(&local("0", "9"), "contradict");
    refused(&local("x", "2"), "LOCAL_RANK=x");
    refused(&[("SLURM_PROCID", "0")], "SLURM_NTASKS is not set");
    refused(&[("PMI_RANK", "0")], "PMI_SIZE is not set");
}

#[test]
fn schedulers() {
    let slurm = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "16"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_JOB_NODELIST", "gpu[03-05,9],login1"),
    ];
    let launch = read(&slurm).unwrap();
    assert_eq!((launch.launcher, launch.rank, launch.world), ("Slurm", 5, 16));
    assert_eq!(launch.host, "gpu03");
    assert!((20_000..32_000).contains(&launch.port));
    // All ranks of a job get the same port, and another job another one.
    assert_eq!(read(&[&slurm[..], &[("SLURM_PROCID", "6")]].concat()).unwrap().port, launch.port);
    assert_ne!(read(&[&slurm[..], &[("SLURM_JOB_ID", "78")]].concat()).unwrap().port, launch.port);
    let named = [&slurm[..], &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "4000")]].concat();
    let launch = read(&named).unwrap();
    assert_eq!((launch.host.as_str(), launch.port), ("10.0.0.1", 4000));

    let ompi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    assert_eq!(read(&ompi).unwrap().host, "127.0.0.1");
    let apart = [&ompi[..], &[("OMPI_COMM_WORLD_SIZE", "4")]].concat();
    refused(&apart, "set MASTER_ADDR");
    assert_eq!(read(&[&apart[..], &[("MASTER_ADDR", "h")]].concat()).unwrap().host, "h");
    refused(&[&ompi[..], &[("OMPI_COMM_WORLD_LOCAL_RANK", "2")]].concat(), "Open MPI's variables contradict");

    let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2")];
    assert_eq!((read(&pmi).unwrap().launcher, read(&pmi).unwrap().host.as_str()), ("PMI", "127.0.0.1"));
}

#[test]
fn lists_of_nodes() {
    for (list, first) in [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("n[08,10-12]", "n08"),
        ("a,n[1-4]", "a"),
        ("rack2-n[3-4]-ib,x", "rack2-n3-ib"),
        ("n[", "n"),
        ("", ""),
    ] {
        assert_eq!(first_of_nodelist(list), first, "{list}");
    }
}

#[test]
fn addresses() {
    let tcp = |host: &str, port| StorePlace::Tcp(host.into(), port);
    let parse = |text: &str| Url::parse(text).unwrap();
    assert_eq!(parse("tcp://head:29500").place, tcp("head", 29500));
    assert_eq!(parse("tcp://[::1]:7").place, tcp("::1", 7));
    assert_eq!(parse("file:///tmp/a b").place, StorePlace::File("/tmp/a b".into()));
    let url = parse("tcp://h:1?rank=2&world_size=3");
    assert_eq!((url.number("rank").unwrap(), url.number("world_size").unwrap()), (Some(2), Some(3)));
    for wrong in [
        "",
        "head:29500",
        "tcp://",
        "tcp://head",
        "tcp://:1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://h:x",
        "http://h:1",
        "file://relative",
        "file://",
        "tcp://h:1?x=2",
        "tcp://h:1?rank",
    ] {
        let error = Url::parse(wrong).unwrap_err();
        assert!(error.to_string().contains("use tcp://HOST:PORT or file:///PATH"), "{error}");
    }
    assert!(parse("tcp://h:1?rank=-2").number("rank").is_err());
    assert!(agree("rank", Some(1), Some(2)).is_err());
    assert!(agree("rank", None, None).is_err());
    assert_eq!(agree("rank", Some(1), Some(1)).unwrap(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn no_text_panics(text in ".*", list in "[a-z0-9\\[\\],-]*") {
        let _ = Url::parse(&text);
        let _ = Url::parse(&format!("tcp://{text}"));
        let _ = first_of_nodelist(&list);
        let _ = read(&[("RANK", &text), ("WORLD_SIZE", &text), ("MASTER_ADDR", &text), ("MASTER_PORT", &text)]);
    }
}

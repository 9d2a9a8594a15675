//! Puts a machine together from sysfs and from those who can be asked about GPUs.

use std::sync::Arc;
use std::time::Duration;

use super::model::{Gpu, Machine};
use super::pci::PciPath;
use super::sysfs::{PciPlace, Sysfs};
use crate::device::gpu::{Access, Answers, Gpu as Facts, Probe, show_uuid};
use crate::device::{self, Deadline, DeviceId};

/// Somebody who can be asked about GPUs, or why not.
#[derive(Debug)]
pub struct Source {
    /// Who.
    pub name: &'static str,
    /// How.
    pub probe: device::Result<Arc<dyn Probe>>,
}

/// One source that answers.
struct Asked {
    source: usize,
    answers: Answers,
}

/// A GPU while it is put together: its place, and what each source says of it.
struct Found {
    place: PciPlace,
    facts: Vec<(usize, Facts)>,
}

/// This machine, or the one that `sysfs` stands for. Earlier sources are believed before later ones; one that cannot
/// be asked leaves a note with the reason. With `check`, bytes are sent between every two GPUs that are said to reach
/// each other, and each pair may take that long.
pub fn gather(
    name: impl Into<String>,
    sysfs: &Sysfs,
    sources: &[Source],
    check: Option<Duration>,
) -> Machine {
    let mut notes = Vec::new();
    let mut asked = Vec::new();
    let mut found: Vec<Found> =
        sysfs.gpus().into_iter().map(|place| Found { place, facts: Vec::new() }).collect();
    for (source, Source { name, probe }) in sources.iter().enumerate() {
        let answers = probe.clone().map(Answers::new);
        let gpus = answers.as_ref().map_err(Clone::clone).and_then(|answers| answers.gpus());
        match gpus {
            Ok(gpus) => gpus.iter().for_each(|gpu| place(&mut found, source, gpu)),
            Err(error) => notes.push(format!("{name}: {error}")),
        }
        asked.extend(answers.ok().map(|answers| Asked { source, answers }));
    }
    for gpu in found.iter().filter(|gpu| gpu.facts.is_empty()) {
        let address = gpu.place.pci.address().unwrap_or("?");
        notes.push(format!("no driver answers for the GPU at {address}, so it cannot be used"));
    }
    let mut peers = Vec::with_capacity(found.len());
    let mut unchecked = 0;
    for from in &found {
        let (row, tried): (Vec<Access>, Vec<bool>) =
            found.iter().map(|to| peer(&asked, from, to, check)).unzip();
        unchecked += tried.iter().filter(|tried| !**tried).count();
        peers.push(row);
    }
    if unchecked > 0 {
        notes.push(format!(
            "{unchecked} pairs of GPUs were not checked: nobody who was asked can copy between them"
        ));
    }
    Machine {
        name: name.into(),
        nodes: sysfs.nodes(),
        gpus: found.iter().map(|gpu| gpu.finish(&asked)).collect(),
        nics: sysfs.nics(),
        peers,
        notes,
    }
}

/// Finds what is known of a GPU already: by its name, or by its place. Parts of a GPU share a place.
fn place(found: &mut Vec<Found>, source: usize, gpu: &Facts) {
    let same = found.iter().position(|found| found.facts.iter().any(|(_, facts)| facts.id == gpu.id));
    let near = || {
        found.iter().position(|found| {
            found.place.pci.address() == Some(&gpu.pci) && found.facts.iter().all(|(by, _)| *by != source)
        })
    };
    match same.or_else(near) {
        Some(index) => found[index].facts.push((source, gpu.clone())),
        None => {
            // Not in sysfs, or the second part at one place.
            let place =
                found.iter().map(|found| &found.place).find(|place| place.pci.address() == Some(&gpu.pci));
            let unknown = || PciPlace { pci: PciPath::parse(&gpu.pci), numa: None };
            let place = place.cloned().unwrap_or_else(unknown);
            found.push(Found { place, facts: vec![(source, gpu.clone())] });
        }
    }
}

/// The answer, and whether it was checked as far as that was wanted.
fn peer(asked: &[Asked], from: &Found, to: &Found, check: Option<Duration>) -> (Access, bool) {
    if std::ptr::eq(from, to) {
        return (Access::Yes, true);
    }
    let ask = |question: &dyn Fn(&Answers, usize, usize) -> device::Result<Access>| {
        asked.iter().fold(Access::Unknown, |access, one| {
            access.or_ask(|| match (from.number(one), to.number(one)) {
                (Some(from), Some(to)) => question(&one.answers, from, to).unwrap_or_default(),
                _ => Access::Unknown,
            })
        })
    };
    let told = ask(&|answers, from, to| answers.peer(from, to).cloned());
    let Some(patience) = check.filter(|_| told.reason().is_none()) else { return (told, true) };
    match ask(&|answers, from, to| answers.check_peer(from, to, Deadline::after(patience))) {
        Access::Unknown => (told, false),
        seen => (seen, true),
    }
}

impl Found {
    /// Its number among the GPUs of a source.
    fn number(&self, asked: &Asked) -> Option<usize> {
        let (_, facts) = self.facts.iter().find(|(source, _)| *source == asked.source)?;
        asked.answers.index(&facts.id).ok()
    }

    fn finish(&self, asked: &[Asked]) -> Gpu {
        let all = || self.facts.iter().map(|(_, facts)| facts);
        let ask = |question: fn(&Answers, usize) -> device::Result<&Access>| {
            asked.iter().fold(Access::Unknown, |access, one| {
                access.or_ask(|| {
                    let answer = self.number(one).and_then(|number| question(&one.answers, number).ok());
                    answer.cloned().unwrap_or_default()
                })
            })
        };
        let name = all().map(|facts| facts.name.clone()).find(|name| !name.is_empty());
        let uuid = all().find_map(|facts| match &facts.id {
            DeviceId::Gpu(uuid) => Some(show_uuid(uuid)),
            _ => None,
        });
        Gpu {
            name: name.unwrap_or_else(|| "NVIDIA GPU without a driver".into()),
            uuid,
            ordinal: all().find_map(|facts| facts.ordinal),
            pci: self.place.pci.clone(),
            numa: self.place.numa,
            memory: all().map(|facts| facts.memory).find(|memory| *memory > 0).unwrap_or(0),
            capability: all().find_map(|facts| facts.capability),
            links: all().map(|facts| facts.links.clone()).find(|links| !links.is_empty()).unwrap_or_default(),
            fabric: all().find_map(|facts| facts.fabric.clone()),
            fabric_access: ask(Answers::fabric),
            multicast: ask(Answers::multicast),
        }
    }
}

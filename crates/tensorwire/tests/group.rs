//! Groups: forming, barriers, sub-groups; each body as threads and as processes.
#![allow(clippy::unwrap_used)]

mod ranks;

use tensorwire::Group;

fn members(group: &Group) {
    assert_eq!(group.members().len(), group.world());
    assert_eq!(group.members()[group.rank()].pid, std::process::id());
    assert_eq!(group.hosts(), [(0..group.world()).collect::<Vec<_>>()]);
}

on_ranks!(a_world_of_one, 1, |group| {
    members(group);
    group.barrier().unwrap();
});

on_ranks!(four_ranks_meet, 4, |group| {
    members(group);
    for _ in 0..100 {
        group.barrier().unwrap();
    }
});

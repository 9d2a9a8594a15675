//! Ranks that called different things. The rank that fails the group for it writes into its note who called what. Every
//! rank makes its error of that note, and so all say the same. Each adds what it called itself.

use std::cmp::Reverse;

use crate::error::{Error, PeerFaultKind};
use crate::shm::control::{Control, Desk, NOTE, Note};
use crate::shm::header::Header;
use crate::shm::kind::Kind;
use crate::shm::member::Member;

/// What is known of a rank in the operation in which ranks differ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) rank: usize,
    /// What it came for; nothing if it has not come.
    pub(crate) call: Option<Header>,
    /// What it came for one operation before and one operation later, where that is known.
    pub(crate) before: Option<Header>,
    pub(crate) after: Option<Header>,
    /// Whether it has closed the group.
    pub(crate) left: bool,
}

/// Ranks that came for the same.
struct Party {
    call: Header,
    ranks: Vec<usize>,
}

/// Bytes of a note for its sentence: the list of ranks before it has a quarter.
const ROOM: usize = NOTE - NOTE / 4 - 8;
/// Bytes of the list of ranks in front of a call.
const LIST: usize = 24;

/// The note of a rank that has found that not all ranks came for the same: the minority, and who called what. Nobody is
/// the minority if no call has more ranks than each other one, or if ranks that have not come could change that.
pub(crate) fn note(number: u32, seen: &[Seen]) -> String {
    let parties = parties(seen);
    // Those who have not come may be of either side.
    let late = seen.iter().filter(|seen| seen.call.is_none() && !seen.left).count();
    let minority = match &parties[..] {
        [most, next, ..] if most.ranks.len() > next.ranks.len() + late => sorted(&parties[1..]),
        _ => Vec::new(),
    };
    Note::write(&minority, &sentence(number, &parties, seen))
}

/// The error that such a note means.
pub(crate) fn error(note: &str, members: &[Member]) -> Error {
    let Note { ranks, text } = Note::read(note);
    let who = match (&ranks[..], members) {
        ([rank], members) => members.get(*rank).map_or_else(|| list(&ranks), ToString::to_string),
        ([], [one, other]) => format!("{one} and {other}"),
        ([], _) => "the ranks".into(),
        _ => list(&ranks),
    };
    let text = format!("{text}; all ranks must call the same operations in the same order");
    Error::peer(PeerFaultKind::Mismatch, who, ranks.first().copied(), text).about(ranks)
}

/// What this rank itself called there, as its progress lines say: "called barrier". `rest` is what they cannot say, of the
/// operation of that number.
pub(crate) fn own_call(control: &Control, note: &str, rest: Option<&(u32, String)>) -> String {
    let Some(number) = number(note) else { return "called something else".into() };
    let Some(call) = control.header(control.me(), number) else {
        return format!("had not come to #{number}");
    };
    let inside = control.flag(control.map().desk(control.me()) + Desk::WHERE);
    let last = inside.map_or(number, |flag| flag.load().wrapping_sub(1) / 2);
    let rest = rest.filter(|(of, _)| *of == number).map_or("", |(_, rest)| rest);
    match control.header(control.me(), last).filter(|_| last != number) {
        Some(next) => format!("called {call}{rest}, and then {} #{last}", next.kind),
        None => format!("called {call}{rest}"),
    }
}

/// Ranks in words: "rank 3", "ranks 1, 2, 3", "ranks 0-6, 8", "ranks 0, 2, 4 and 60 more".
pub(crate) fn list(ranks: &[usize]) -> String {
    let mut text = if ranks.len() == 1 { "rank" } else { "ranks" }.to_owned();
    let mut rest = ranks;
    while let [first, ..] = rest {
        let run = (0..rest.len()).take_while(|&step| Some(rest[step]) == first.checked_add(step)).count();
        let (run, next) =
            if run > 3 { (run, format!("{first}-{}", rest[run - 1])) } else { (1, first.to_string()) };
        if text.len() > LIST {
            return format!("{text} and {} more", rest.len());
        }
        text += if rest.len() == ranks.len() { " " } else { ", " };
        text += &next;
        rest = &rest[run..];
    }
    text
}

/// The ranks by what they came for, the largest party first.
fn parties(seen: &[Seen]) -> Vec<Party> {
    let mut parties: Vec<Party> = Vec::new();
    for (rank, call) in seen.iter().filter_map(|seen| Some((seen.rank, seen.call?))) {
        // Some ranks may have their tensors on GPUs, and others on the host.
        let same = |party: &&mut Party| match call.kind {
            Kind::Keys => party.call == call,
            _ => party.call == Header { queued: party.call.queued, ..call },
        };
        match parties.iter_mut().find(same) {
            Some(party) => party.ranks.push(rank),
            None => parties.push(Party { call, ranks: vec![rank] }),
        }
    }
    parties.sort_by_key(|party| Reverse(party.ranks.len()));
    parties
}

/// All ranks of some parties.
fn sorted(parties: &[Party]) -> Vec<usize> {
    let mut ranks: Vec<usize> = parties.iter().flat_map(|party| party.ranks.iter().copied()).collect();
    ranks.sort_unstable();
    ranks
}

/// "in all_reduce #5, ranks 1, 2, 3: 999 float32; rank 0: 1000 float32"
fn sentence(number: u32, parties: &[Party], seen: &[Seen]) -> String {
    let kind = parties.first().map(|party| party.call.kind);
    let kind = kind.filter(|kind| parties.iter().all(|party| party.call.kind == *kind));
    let mut text = format!("in {} #{number}, ", kind.map_or("operation", Kind::name));
    let views = views(parties, kind.is_some());
    for (index, (party, view)) in parties.iter().zip(&views).enumerate() {
        if index > 1 && text.len() > ROOM / 2 {
            text += &format!("{}: other calls; ", list(&sorted(&parties[index..])));
            break;
        }
        text += &format!("{}: {view}; ", list(&party.ranks));
    }
    let absent = |left: bool| -> Vec<usize> {
        let absent = seen.iter().filter(|seen| seen.call.is_none() && seen.left == left);
        absent.map(|seen| seen.rank).collect()
    };
    for (left, what) in [(false, "not come yet"), (true, "closed the group")] {
        let ranks = absent(left);
        if !ranks.is_empty() {
            let verb = if ranks.len() == 1 { "has" } else { "have" };
            text += &format!("{} {verb} {what}; ", list(&ranks));
        }
    }
    text.truncate(text.len() - 2);
    let hint = out_of_step(number, parties, seen).unwrap_or_default();
    if text.len() + hint.len() < ROOM { text + &hint } else { text }
}

/// What each party called: all of it, or where the kind is the same, what is not the same.
fn views(parties: &[Party], same_kind: bool) -> Vec<String> {
    let Some(first) = parties.first().map(|party| party.call) else { return Vec::new() };
    if !same_kind {
        return parties.iter().map(|party| party.call.to_string()).collect();
    }
    let differ =
        |is_same: fn(&Header, &Header) -> bool| parties.iter().any(|party| !is_same(&party.call, &first));
    let size = differ(|one, other| (one.count, one.dtype) == (other.count, other.dtype));
    let op = differ(|one, other| one.op == other.op);
    let root = differ(|one, other| one.root == other.root);
    let path = differ(|one, other| one.path == other.path);
    let place = differ(|one, other| one.queued == other.queued);
    let view = |(index, party): (usize, &Party)| {
        let call = party.call;
        let mut parts = Vec::new();
        if size {
            parts.push(call.size());
        }
        if let Some(op) = call.op.filter(|_| op) {
            parts.push(op.to_string());
        }
        if root {
            parts.push(call.root());
        }
        if path {
            parts.push(call.path.map_or("no path asked for".into(), |path| format!("through {path}")));
        }
        if place {
            parts.push(call.place().into());
        }
        // What is left is the number that stands for the rest.
        if parts.is_empty() {
            parts.push(call.rest(index == 0));
        }
        parts.join(", ")
    };
    parties.iter().enumerate().map(view).collect()
}

/// Ranks that called too much or too little show by what they called before or after.
fn out_of_step(number: u32, parties: &[Party], seen: &[Seen]) -> Option<String> {
    let same = |one: Header, other: Header| one.numbered(0) == other.numbered(0);
    let [one, other] = parties else { return None };
    for (party, later) in [(one, other), (other, one)] {
        let is_later = |seen: &&Seen| {
            later.ranks.contains(&seen.rank) && seen.after.is_some_and(|next| same(next, party.call))
        };
        let ranks: Vec<usize> = seen.iter().filter(is_later).map(|seen| seen.rank).collect();
        if !ranks.is_empty() {
            let (kind, next) = (party.call.kind, number.wrapping_add(1));
            return Some(format!("; {} called that {kind} as #{next}", list(&ranks)));
        }
    }
    let again =
        |party: &&Party| seen.iter().all(|seen| seen.before.is_some_and(|before| same(before, party.call)));
    let party = parties.iter().find(again)?;
    Some(format!("; {} called the same as in #{}", list(&party.ranks), number.wrapping_sub(1)))
}

/// The operation that a note is about.
fn number(note: &str) -> Option<u32> {
    let (_, rest) = note.split_once('#')?;
    rest.split_once(',')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use tensorwire_device::{Dtype, ReduceOp};

    use super::*;

    fn call(kind: Kind, count: u64) -> Header {
        let typed = kind != Kind::Barrier;
        Header {
            number: 5,
            kind,
            dtype: typed.then_some(Dtype::F32),
            op: matches!(kind, Kind::AllReduce | Kind::Reduce).then_some(ReduceOp::Sum),
            path: None,
            queued: false,
            root: 0,
            count,
            rest: 1,
        }
    }

    fn seen(calls: &[Option<Header>]) -> Vec<Seen> {
        let one = |(rank, call): (usize, &Option<Header>)| Seen {
            rank,
            call: *call,
            before: None,
            after: None,
            left: false,
        };
        calls.iter().enumerate().map(one).collect()
    }

    /// The minority, and the sentence behind "in all_reduce #5, ".
    fn told(seen: &[Seen]) -> (Vec<usize>, String) {
        let Note { ranks, text } = Note::read(&note(5, seen));
        assert_eq!(number(&note(5, seen)), Some(5));
        (ranks, text.split_once("#5, ").unwrap().1.to_owned())
    }

    #[test]
    fn ranks_are_grouped_by_what_they_called() {
        let (one, other) = (Some(call(Kind::AllReduce, 999)), Some(call(Kind::AllReduce, 1000)));
        let text = |ranks: &str| format!("{ranks}: 999 float32; rank 0: 1000 float32");
        assert_eq!(told(&seen(&[other, one, one, one])), (vec![0], text("ranks 1, 2, 3")));
        let many: Vec<_> = (0..64).map(|rank| if rank == 0 { other } else { one }).collect();
        assert_eq!(told(&seen(&many)), (vec![0], text("ranks 1-63")));
        let tie = "rank 0: 1000 float32; rank 1: 999 float32";
        assert_eq!(told(&seen(&[other, one])), (vec![], tie.into()));
        let missing = (vec![], format!("{tie}; rank 2 has not come yet"));
        assert_eq!(told(&seen(&[other, one, None])), missing);
        let mut left = seen(&[other, one, None, None]);
        left[2..].iter_mut().for_each(|seen| seen.left = true);
        assert_eq!(told(&left), (vec![], format!("{tie}; ranks 2, 3 have closed the group")));
    }

    #[test]
    fn who_has_not_come_may_be_of_either_side() {
        let (wrong, right) = (Some(call(Kind::Barrier, 0)), Some(call(Kind::AllReduce, 1000)));
        let mut calls = vec![wrong, wrong, right, None, None];
        assert_eq!(told(&seen(&calls)).0, [0; 0]);
        calls[3] = wrong;
        assert_eq!(told(&seen(&calls)).0, [2]);
    }

    #[test]
    fn only_what_differs_is_told() {
        let base = call(Kind::Reduce, 7);
        let pairs = [
            (Header { op: Some(ReduceOp::Max), ..base }, "SUM", "MAX"),
            (Header { root: 2, ..base }, "to rank 0", "to rank 2"),
            (Header { root: 2, count: 8, ..base }, "7 float32, to rank 0", "8 float32, to rank 2"),
            (Header { dtype: Some(Dtype::I64), ..base }, "7 float32", "7 int64"),
            (Header { rest: 9, ..base }, "some sizes of parts", "other sizes of parts"),
            (call(Kind::Barrier, 0), "reduce of 7 float32 (SUM) to rank 0", "barrier"),
        ];
        for (other, one, two) in pairs {
            let text = told(&seen(&[Some(base), Some(other)])).1;
            assert_eq!(text, format!("rank 0: {one}; rank 1: {two}"));
        }
    }

    #[test]
    fn a_note_has_room_for_any_number_of_ranks_and_calls() {
        for world in [3, 8, 64, 1000] {
            let own: Vec<_> =
                (0..world).map(|rank| Some(call(Kind::ReduceScatter, u64::MAX - rank))).collect();
            let text = told(&seen(&own)).1;
            assert!(text.starts_with("rank 0: 18446744073709551615 float32; rank 1: "), "{text}");
            assert!(text.len() < ROOM, "{text}");
            let turns: Vec<_> = (0..world).map(|rank| Some(call(Kind::AllReduce, rank % 2))).collect();
            let note = note(5, &seen(&turns));
            assert!(note.len() < NOTE && note.contains(": 0 float32; rank"), "{note}");
        }
        let own: Vec<_> =
            (0..64).map(|rank| Some(Header { root: rank, ..call(Kind::Broadcast, 3) })).collect();
        let text = told(&seen(&own)).1;
        assert!(text.ends_with("-63: other calls"), "{text}");
    }

    #[test]
    fn ranks_out_of_step_are_seen_by_what_came_before_and_after() {
        let (all, barrier) = (call(Kind::AllReduce, 7), call(Kind::Barrier, 0));
        let mut ahead = seen(&[Some(barrier), Some(all), Some(barrier)]);
        ahead[1].after = Some(barrier.numbered(6));
        let text = "ranks 0, 2: barrier; rank 1: all_reduce of 7 float32 (SUM); ";
        assert_eq!(told(&ahead), (vec![1], format!("{text}rank 1 called that barrier as #6")));
        let mut again = seen(&[Some(barrier), Some(all), Some(barrier)]);
        again.iter_mut().for_each(|seen| seen.before = Some(all.numbered(4)));
        assert_eq!(told(&again), (vec![1], format!("{text}rank 1 called the same as in #4")));
    }
}

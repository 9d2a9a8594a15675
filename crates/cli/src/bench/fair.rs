//! What makes two libraries comparable: the same kind of caller, the same cores, the same memory. Where they differ,
//! a caveat stands beside their ratio.

use super::OURS;
use super::order::TensorMemory;
use super::peers::Peer;
use super::row::Row;

/// A library that is measured, and how it is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Side {
    pub(super) library: &'static str,
    /// Whether its ranks are Python programs that call it through torch.
    pub(super) torch: bool,
    /// Whether each rank has a core.
    pub(super) bound: bool,
}

impl Side {
    pub(super) fn is_ours(self) -> bool {
        self.library == OURS
    }

    /// As JSON lines call its caller.
    pub(super) fn through(self) -> &'static str {
        if self.torch { "torch" } else { "native" }
    }

    /// What calls it, in words.
    pub(super) fn caller(self) -> &'static str {
        match (self.torch, self.is_ours()) {
            (true, _) => "Python, through torch",
            (false, false) if Peer::is_name_of_mpi(self.library) => "C",
            (false, _) => "Rust",
        }
    }
}

/// Which of ours a peer is compared with: the one that is called as the peer is, or else the only one.
pub(super) fn opponent(sides: &[Side], peer: Side) -> Option<Side> {
    let ours = || sides.iter().copied().filter(|side| side.is_ours());
    ours().find(|side| side.torch == peer.torch).or_else(|| ours().next())
}

/// What one must know to read the ratio of these two.
pub(super) fn caveats(ours: Side, peer: Side, memory: TensorMemory) -> Vec<String> {
    let name = peer.library;
    let is_gloo = name == Peer::Gloo.name();
    let mut caveats = Vec::new();
    if ours.torch != peer.torch {
        let (slow, fast) = if peer.torch { (peer, ours) } else { (ours, peer) };
        let (slow, fast, caller) = (slow.library, fast.library, fast.caller());
        caveats.push(format!(
            "{slow} is called from Python, {fast} from {caller}. Of small sizes the ratio is mostly Python. Without \
             --through both are called alike."
        ));
    }
    if peer.bound && is_gloo {
        caveats.push(format!(
            "Each rank of {name} is bound to one core, where its threads hold each other up. Without --bind it has \
             all cores."
        ));
    }
    if ours.bound != peer.bound {
        let (bound, free) = if ours.bound { (OURS, name) } else { (name, OURS) };
        caveats.push(format!("Each rank of {bound} is bound to a core; those of {free} are not."));
    }
    if memory == TensorMemory::Shared {
        caveats.push(format!("Tensors of {OURS} are in memory of the group, those of {name} are private."));
    }
    if memory == TensorMemory::Pool && !ours.torch {
        caveats.push(format!("Tensors of {OURS} are in memory of its pool, those of {name} in torch's."));
    }
    caveats
}

/// Sets the ratios of the peers' rows, and what must be known beside them.
pub(super) fn compare(found: &mut [(Side, Option<Row>)], memory: TensorMemory) {
    let sides: Vec<Side> = found.iter().map(|(side, _)| *side).collect();
    let times: Vec<Option<f64>> =
        found.iter().map(|(_, row)| row.as_ref().map(|row| row.median_us)).collect();
    for (side, row) in found.iter_mut().filter(|(side, _)| !side.is_ours()) {
        let (Some(row), Some(ours)) = (row, opponent(&sides, *side)) else { continue };
        let base = sides.iter().position(|side| *side == ours).and_then(|index| times[index]);
        row.ratio = base.map(|base| row.median_us / base).filter(|ratio| ratio.is_finite());
        row.caveats = caveats(ours, *side, memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(library: &'static str, torch: bool, bound: bool) -> Side {
        Side { library, torch, bound }
    }

    #[test]
    fn a_peer_is_compared_with_what_is_called_as_it_is() {
        let (rust, python) = (side(OURS, false, true), side(OURS, true, false));
        let (gloo, mpi) = (side("gloo", true, false), side("mpi", false, true));
        let all = [rust, python, gloo, mpi];
        assert_eq!((opponent(&all, gloo), opponent(&all, mpi)), (Some(python), Some(rust)));
        assert_eq!(opponent(&[rust, gloo], gloo), Some(rust));
        assert_eq!(opponent(&[python, mpi], mpi), Some(python));
    }

    #[test]
    fn whatever_differs_is_said_and_nothing_else() {
        let said = |ours, peer, memory| caveats(ours, peer, memory).join("\n");
        let private = TensorMemory::Private;
        let (rust, python) = (side(OURS, false, true), side(OURS, true, false));
        assert_eq!(said(python, side("gloo", true, false), private), "");
        assert_eq!(said(rust, side("mpi", false, true), private), "");
        let raw = said(rust, side("gloo", true, true), private);
        assert!(raw.contains("gloo is called from Python, tensorwire from Rust"), "{raw}");
        assert!(raw.contains("Each rank of gloo is bound to one core"), "{raw}");
        let other = said(python, side("mpi", false, true), private);
        assert!(other.contains("tensorwire is called from Python, mpi from C"), "{other}");
        assert!(other.contains("rank of mpi is bound to a core; those of tensorwire are not"), "{other}");
        let ours = said(side(OURS, true, true), side("gloo", true, false), TensorMemory::Shared);
        assert!(
            ours.starts_with("Each rank of tensorwire is bound to a core; those of gloo are not."),
            "{ours}"
        );
        assert!(ours.contains("memory of the group"), "{ours}");
        let gpu = said(side(OURS, false, false), side("gloo", true, false), TensorMemory::Pool);
        assert!(gpu.starts_with("gloo is called from Python, tensorwire from Rust. Of small"), "{gpu}");
        assert!(gpu.contains("memory of its pool"), "{gpu}");
        assert_eq!(said(python, side("gloo", true, false), TensorMemory::Pool), "");
    }
}

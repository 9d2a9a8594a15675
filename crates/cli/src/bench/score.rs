//! What a run says in all: in how many rows we are ahead of a peer, level with it, or behind.

use serde::Serialize;

use super::fair::{self, Side};
use super::peers::Peer;
use super::row::Row;
use super::sizes;
use crate::printer::{WIDTH, wrap};
use crate::units::times;

/// Within this of 1 a ratio is noise.
const LEVEL: f64 = 0.05;
/// From this ratio on we are well ahead.
const WELL: f64 = 1.1;

/// The rows of one peer, or of the best of some.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Score {
    /// The peer.
    pub(super) summary: &'static str,
    pub(super) rows: usize,
    pub(super) ahead: usize,
    pub(super) ahead_by_a_tenth: usize,
    pub(super) level: usize,
    pub(super) behind: usize,
    #[serde(skip)]
    losses: Vec<String>,
}

impl Score {
    /// One for each peer, or one for the best of the libraries of MPI.
    pub(super) fn all(sides: &[Side], rows: &[Row], best: bool) -> Vec<Self> {
        let peers = sides.iter().copied().filter(|side| !side.is_ours());
        let counted = peers.filter(|side| !(best && Peer::is_name_of_mpi(side.library)));
        let each = counted.map(|side| {
            let of = |row: &&Row| row.peer == side.library && row.through == side.through();
            Self::new(side.library, rows.iter().filter(of))
        });
        let of_best = best.then(|| Self::new(Peer::Best.name(), rows.iter().filter(|row| row.best)));
        each.chain(of_best).filter(|score| score.rows > 0).collect()
    }

    fn new<'a>(summary: &'static str, rows: impl Iterator<Item = &'a Row>) -> Self {
        let mut score =
            Self { summary, rows: 0, ahead: 0, ahead_by_a_tenth: 0, level: 0, behind: 0, losses: Vec::new() };
        for row in rows {
            let Some(ratio) = row.ratio else { continue };
            score.rows += 1;
            score.ahead_by_a_tenth += usize::from(ratio >= WELL);
            if ratio > 1.0 + LEVEL {
                score.ahead += 1;
            } else if ratio >= 1.0 - LEVEL {
                score.level += 1;
            } else {
                score.behind += 1;
                let size =
                    if row.bytes == 0 { String::new() } else { format!(" {}", sizes::show(row.bytes)) };
                let by = if summary == row.peer { String::new() } else { format!(" {}", row.peer) };
                score.losses.push(format!("{}{size} ({}x{by})", row.op, times(ratio)));
            }
        }
        score
    }

    /// As lines for people.
    pub(super) fn lines(&self) -> Vec<String> {
        let Self { summary, rows, ahead, ahead_by_a_tenth, level, behind, losses } = self;
        let losses = if losses.is_empty() { String::new() } else { format!(": {}", losses.join(", ")) };
        let text = format!(
            "{summary}: of {rows} rows {} is ahead in {ahead} ({ahead_by_a_tenth} by a tenth or more), level \
             within 5% in {level}, behind in {behind}{losses}",
            super::OURS
        );
        wrap(&text, WIDTH)
    }
}

/// Marks the fastest library of MPI in one case.
pub(super) fn mark_best(found: &mut [(Side, Option<Row>)]) {
    let rows = found.iter_mut().filter(|(side, _)| Peer::is_name_of_mpi(side.library));
    let best = rows.filter_map(|(_, row)| row.as_mut()).min_by(|a, b| a.median_us.total_cmp(&b.median_us));
    best.into_iter().for_each(|row| row.best = true);
}

/// The sides that share the column of the best.
pub(super) fn are_one(peers: &[Side], ours: Side, all: &[Side]) -> Vec<Side> {
    let of = |side: &Side| Peer::is_name_of_mpi(side.library) && fair::opponent(all, *side) == Some(ours);
    peers.iter().copied().filter(of).collect()
}

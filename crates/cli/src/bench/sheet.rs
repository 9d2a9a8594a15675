//! What a terminal shows of one of our crews: a table for each operation, and the caveats below it.

use super::fair::{Side, caveats, opponent};
use super::op::Op;
use super::order::TensorMemory;
use super::peers::Peer;
use super::row::Row;
use super::score;
use super::table::Table;
use crate::printer::{Printer, Tone, WIDTH, wrap};

/// The tables of one of ours beside the peers that are compared with it.
#[derive(Debug)]
pub(super) struct Sheet {
    ours: Side,
    /// What follows the operation in headings: there is another sheet.
    suffix: String,
    /// Those that share a column, or have one each.
    peers: Vec<Vec<Side>>,
    table: Table,
    caveats: Vec<String>,
}

impl Sheet {
    /// One for each of ours. With `best` the libraries of MPI share a column.
    pub(super) fn all(sides: &[Side], memory: TensorMemory, floor: bool, best: bool) -> Vec<Self> {
        let ours: Vec<Side> = sides.iter().copied().filter(|side| side.is_ours()).collect();
        let sheet = |side: &Side| {
            let of_this = |peer: &Side| !peer.is_ours() && opponent(sides, *peer) == Some(*side);
            let peers: Vec<Side> = sides.iter().copied().filter(of_this).collect();
            let mut all: Vec<String> = peers.iter().flat_map(|peer| caveats(*side, *peer, memory)).collect();
            all.dedup();
            let together = if best { score::are_one(&peers, *side, sides) } else { Vec::new() };
            let alone = peers.iter().filter(|peer| !together.contains(peer));
            let mut columns: Vec<(&'static str, Vec<Side>)> =
                alone.map(|peer| (peer.library, vec![*peer])).collect();
            if !together.is_empty() {
                columns.push((Peer::Best.name(), together));
            }
            let (names, peers) = columns.into_iter().unzip();
            Self {
                ours: *side,
                suffix: if ours.len() > 1 { format!(", from {}", side.caller()) } else { String::new() },
                table: Table::new(names, floor),
                peers,
                caveats: all,
            }
        };
        ours.iter().map(sheet).collect()
    }

    /// The lines above the figures of an operation.
    pub(super) fn head(&self, op: Op, printer: &Printer) -> [String; 3] {
        let title = printer.tint(Tone::Heading, &format!("{op}{}", self.suffix));
        [String::new(), title, printer.tint(Tone::Quiet, &self.table.head())]
    }

    /// The line of a size; nothing where ours was not measured.
    pub(super) fn row(&self, found: &[(Side, Option<Row>)], printer: &Printer) -> Option<String> {
        let of = |side: Side| found.iter().find(|(other, _)| *other == side).and_then(|(_, row)| row.clone());
        let ours = of(self.ours)?;
        let fastest = |sides: &Vec<Side>| {
            let rows = sides.iter().filter_map(|side| of(*side));
            rows.min_by(|a, b| a.median_us.total_cmp(&b.median_us))
        };
        let peers: Vec<Option<Row>> = self.peers.iter().map(fastest).collect();
        let line = self.table.row(&ours, &peers);
        Some(if ours.wrong > 0 { printer.tint(Tone::Bad, &line) } else { line })
    }

    /// The lines below the figures of an operation.
    pub(super) fn foot(&self, printer: &Printer) -> Vec<String> {
        below(&self.caveats, printer)
    }
}

/// Caveats as lines below a table with ratios.
pub(super) fn below(caveats: &[String], printer: &Printer) -> Vec<String> {
    let (first, next) = ("  ratio: ", "         ");
    let said = caveats.iter().flat_map(|caveat| {
        let lines = wrap(caveat, WIDTH - first.len()).into_iter().enumerate();
        lines.map(|(index, line)| format!("{}{line}", if index == 0 { first } else { next }))
    });
    said.map(|line| printer.tint(Tone::Warning, &line)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::OURS;
    use super::*;

    #[test]
    fn each_peer_is_in_the_table_of_its_opponent() {
        let side = |library, torch, bound| Side { library, torch, bound };
        let sides = [
            side(OURS, false, true),
            side(OURS, true, false),
            side("gloo", true, false),
            side("mpi", false, true),
        ];
        let sheets = Sheet::all(&sides, TensorMemory::Private, false, false);
        let heads: Vec<String> =
            sheets.iter().map(|sheet| sheet.head(Op::AllReduce, &Printer::new()).join("\n")).collect();
        assert!(
            heads[0].contains("all-reduce, from Rust") && heads[0].ends_with("mpi us   ratio"),
            "{heads:#?}"
        );
        assert!(heads[1].contains("from Python, through torch"), "{heads:#?}");
        assert!(heads[1].ends_with("gloo us   ratio"), "{heads:#?}");
        assert!(sheets.iter().all(|sheet| sheet.foot(&Printer::new()).is_empty()));
        // What is not fair is said below the ratio, in lines that fit.
        let sheets = Sheet::all(&[sides[0], side("gloo", true, true)], TensorMemory::Private, false, false);
        let foot = sheets[0].foot(&Printer::new());
        assert!(foot.len() > 1 && foot.iter().all(|line| line.chars().count() <= WIDTH), "{foot:#?}");
        assert!(foot[0].starts_with("  ratio: gloo is called from Python"), "{foot:#?}");
    }
}

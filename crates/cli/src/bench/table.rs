//! The table: one line for each size, in the order of nccl-tests' columns.

use super::peers::Peer;
use super::row::Row;
use super::sizes;
use crate::latency::figure;
use crate::units::times;

/// The columns of a table, which fits a terminal: one or two peers have their times in it, more their ratios alone.
#[derive(Debug)]
pub(super) struct Table {
    peers: Vec<&'static str>,
    /// Whether there is a column for what our time cannot be below.
    floor: bool,
}

impl Table {
    pub(super) fn new(peers: Vec<&'static str>, floor: bool) -> Self {
        Self { peers, floor }
    }

    /// What the columns are.
    pub(super) fn head(&self) -> String {
        let ours = ["time us", "p99 us", "algbw", "busbw", "wrong", "path"].map(str::to_owned);
        let floor = self.floor.then(|| "floor".to_owned());
        // A long name needs all of its column.
        let named = |peer: &str| if peer.len() > 4 { peer.to_owned() } else { format!("{peer} us") };
        let peers = self.peers.iter().flat_map(|peer| match self.has_times() {
            true => vec![named(peer), "ratio".to_owned()],
            false => vec![(*peer).to_owned()],
        });
        let by = self.says_who().then(|| "by".to_owned());
        self.line("size", ours.into_iter().chain(floor).chain(peers).chain(by))
    }

    /// One line: ours, and the medians of the peers, each with how many times ours it is.
    pub(super) fn row(&self, ours: &Row, peers: &[Option<Row>]) -> String {
        let bandwidth = |rate: f64| if ours.bytes == 0 { "-".to_owned() } else { figure(rate) };
        let cells = [
            figure(ours.median_us),
            figure(ours.p99_us),
            bandwidth(ours.algbw_gbs),
            bandwidth(ours.busbw_gbs),
            ours.wrong.to_string(),
            ours.path.clone(),
        ];
        let none = || "-".to_owned();
        let theirs = peers.iter().flat_map(|row| {
            let time = row.as_ref().map_or_else(none, |row| figure(row.median_us));
            let ratio = row.as_ref().and_then(|row| row.ratio);
            let ratio = ratio.map_or_else(none, |ratio| format!("{}x", times(ratio)));
            if self.has_times() { vec![time, ratio] } else { vec![ratio] }
        });
        let by =
            self.says_who().then(|| peers.iter().flatten().next().map_or_else(none, |row| row.peer.into()));
        let floor = || ours.floor_us.map_or_else(|| "-".to_owned(), figure);
        let cells = cells.into_iter().chain(self.floor.then(floor));
        let size = if ours.bytes == 0 { "-".to_owned() } else { sizes::show(ours.bytes) };
        self.line(&size, cells.chain(theirs).chain(by))
    }

    /// Whether there is room for the times of the peers.
    fn has_times(&self) -> bool {
        self.peers.len() + usize::from(self.floor) <= 2
    }

    /// Whether there is room for the name of the best peer.
    fn says_who(&self) -> bool {
        self.peers == [Peer::Best.name()] && !self.floor
    }

    /// Two spaces between columns, or one where that would be too wide.
    fn line(&self, size: &str, cells: impl Iterator<Item = String>) -> String {
        let gap = if self.peers.len() + usize::from(self.floor) < 2 { "  " } else { " " };
        // Times of a second and more need eight digits only without p99 beside peers; 7 hold ten seconds.
        let ours = [7, 7, 5, 5, 5, 8].into_iter().chain(self.floor.then_some(7));
        let theirs: &[usize] = match (self.has_times(), self.says_who()) {
            (_, true) => &[7, 6, 5],
            (true, false) => &[7, 6],
            (false, false) => &[6],
        };
        let widths = ours.chain(theirs.iter().copied().cycle());
        let cells = cells.zip(widths).map(|(cell, width)| format!("{cell:>width$}"));
        let all: Vec<String> = std::iter::once(format!("{size:>7}")).chain(cells).collect();
        all.join(gap).trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(peer: &'static str, median_us: f64) -> Row {
        Row {
            op: "all-reduce",
            ranks: 8,
            bytes: 512 << 20,
            dtype: "float32",
            device: "host",
            memory: "private",
            path: "one-shot".into(),
            median_us,
            p99_us: median_us * 2.0,
            algbw_gbs: 123.456,
            busbw_gbs: 0.123,
            wrong: 0,
            peer,
            through: "native",
            bound: true,
            ratio: Some(median_us / 423_456.0),
            best: peer == "mpich",
            floor_us: Some(123_456.0),
            sparse: None,
            keys: None,
            hosts: None,
            caveats: Vec::new(),
        }
    }

    #[test]
    fn lines_fit_a_terminal_and_their_columns() {
        for (peers, floor) in [
            (vec![], false),
            (vec!["gloo"], false),
            (vec!["gloo", "mpi"], false),
            (vec!["socket", "gloo"], false),
            (vec![], true),
            (vec!["gloo"], true),
            (vec!["best"], false),
            (vec!["gloo", "best"], false),
            (vec!["impi", "mpich", "mpi"], false),
            (vec!["impi", "mpich", "mpi"], true),
        ] {
            let table = Table::new(peers.clone(), floor);
            let theirs: Vec<Option<Row>> = peers.iter().map(|peer| Some(row(peer, 1_234_567.0))).collect();
            let lines = [table.head(), table.row(&row("tensorwire", 423_456.0), &theirs)];
            assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
            assert_eq!(lines[0].chars().count(), lines[1].chars().count(), "{lines:#?}");
        }
    }

    #[test]
    fn the_best_is_named_and_no_peer_is_cut_off() {
        let best = Table::new(vec!["best"], false);
        assert!(best.head().ends_with("best us   ratio     by"), "{}", best.head());
        let line = best.row(&row("tensorwire", 1.0), &[Some(row("mpich", 2.0))]);
        assert!(line.ends_with("mpich"), "{line}");
        let three = Table::new(vec!["impi", "mpich", "mpi"], false);
        assert!(three.head().ends_with("impi  mpich    mpi"), "{}", three.head());
    }

    #[test]
    fn a_peer_that_is_not_there_is_a_dash() {
        let table = Table::new(vec!["mpi"], false);
        assert!(table.row(&row("tensorwire", 1.0), &[None]).ends_with("-       -"));
    }
}

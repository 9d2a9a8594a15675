//! Square tables that may be wider than a terminal: they are cut into blocks of columns.

use crate::printer::WIDTH;

/// The lines of a table with names for rows and columns. Too many columns make several blocks, with a break after
/// `first` of them where there is one, so that GPUs and NICs are not mixed.
pub(super) fn blocks(
    rows: &[String],
    columns: &[String],
    first: usize,
    cells: &[Vec<String>],
) -> Vec<String> {
    let label = longest(rows) + 2;
    let width = cells.iter().map(|row| longest(row)).chain([longest(columns)]).max().unwrap_or(0) + 2;
    let fitting = (WIDTH.saturating_sub(label) / width.max(1)).max(1);
    let mut cuts: Vec<(usize, usize)> = Vec::new();
    let all = columns.len();
    let groups = if all <= fitting || first == 0 || first >= all {
        vec![(0, all)]
    } else {
        vec![(0, first), (first, all)]
    };
    for (start, end) in groups {
        // Blocks of about the same size look better than a last one with one column.
        let blocks = (end - start).div_ceil(fitting).max(1);
        let size = (end - start).div_ceil(blocks).max(1);
        cuts.extend((start..end).step_by(size).map(|from| (from, (from + size).min(end))));
    }
    let mut lines = Vec::new();
    for (number, (from, to)) in cuts.into_iter().enumerate() {
        if number > 0 {
            lines.push(String::new());
        }
        let line = |name: &str, row: &[String]| {
            let cells: String =
                row.get(from..to).unwrap_or_default().iter().map(|cell| format!("{cell:>width$}")).collect();
            format!("{name:<label$}{cells}").trim_end().to_owned()
        };
        lines.push(line("", columns));
        lines.extend(rows.iter().zip(cells).map(|(name, row)| line(name, row)));
    }
    lines
}

fn longest(cells: &[String]) -> usize {
    cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(word: &str, count: usize) -> Vec<String> {
        (0..count).map(|index| format!("{word}{index}")).collect()
    }

    fn table(gpus: usize, nics: usize) -> Vec<String> {
        let all = [names("GPU", gpus), names("NIC", nics)].concat();
        let cells = vec![vec!["NODE".to_owned(); all.len()]; all.len()];
        blocks(&all, &all, gpus, &cells)
    }

    #[test]
    fn few_columns_are_one_block() {
        let lines = table(2, 1);
        assert_eq!(lines[0], "        GPU0  GPU1  NIC0");
        assert_eq!(lines[1], "GPU0    NODE  NODE  NODE");
        assert_eq!(lines.len(), 4);
    }

    #[test]
    fn many_are_cut_between_gpus_and_nics() {
        let lines = table(8, 9);
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH));
        let heads: Vec<&str> =
            lines.iter().filter(|line| line.starts_with(' ')).map(|line| line.trim()).collect();
        assert_eq!(heads.len(), 2, "{heads:?}");
        assert!(heads[0].ends_with("GPU7") && heads[1].starts_with("NIC0"), "{heads:?}");
        // Sixteen GPUs are two blocks of eight.
        let lines = table(16, 0);
        let heads: Vec<&str> =
            lines.iter().filter(|line| line.starts_with(' ')).map(|line| line.trim()).collect();
        assert!(heads[0].ends_with("GPU7") && heads[1].starts_with("GPU8"), "{heads:?}");
    }

    #[test]
    fn nothing_is_no_trouble() {
        assert_eq!(blocks(&[], &[], 0, &[]), Vec::<String>::new());
        // A row that is too short, and a cell that is wider than everything.
        let lines = blocks(&names("a", 2), &names("b", 2), 1, &[vec!["x".repeat(100)]]);
        assert!(!lines.is_empty());
    }
}

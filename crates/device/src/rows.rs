//! Which rows of several inputs make each row of a result.

use std::io::ErrorKind;

use crate::error::{Error, Result};

/// A list of rows for each row of a result, see [`Queue::reduce_rows`](crate::Queue::reduce_rows). A row that it names is
/// one that the inputs have: it is made for inputs of so many rows, and refuses others.
#[derive(Debug, Clone, Default)]
pub struct RowPlan {
    /// How many rows each input has.
    inputs: Vec<u32>,
    /// Of each row of the result: how many rows, of all before it and its own, make them.
    ends: Vec<u32>,
    /// Input and row.
    sources: Vec<(u32, u32)>,
}

impl RowPlan {
    /// No rows yet, of inputs that have so many. Takes the memory for a plan that names each of them once.
    pub fn new(inputs: &[usize]) -> Result<Self> {
        let few = |&rows: &usize| u32::try_from(rows).map_err(|_| too_many(rows));
        let counts = inputs.iter().map(few).collect::<Result<_>>()?;
        let all = inputs.iter().fold(0usize, |all, rows| all.saturating_add(*rows));
        let mut plan = Self { inputs: counts, ends: Vec::new(), sources: Vec::new() };
        let short = |_| Error::io(format!("planning {all} rows"), ErrorKind::OutOfMemory);
        plan.ends.try_reserve_exact(all).map_err(short)?;
        plan.sources.try_reserve_exact(all).map_err(short)?;
        Ok(plan)
    }

    /// Adds a row of the result, made of these rows of inputs, in this order. Refuses one that is made of nothing.
    pub fn push(&mut self, from: impl IntoIterator<Item = (usize, usize)>) -> Result<()> {
        let before = self.sources.len();
        for (input, row) in from {
            match (self.inputs.get(input), u32::try_from(row)) {
                (Some(&rows), Ok(row)) if row < rows => self.sources.push((input as u32, row)),
                _ => {
                    self.sources.truncate(before);
                    return Err(Error::misuse(format!("there is no row {row} in input {input}")));
                }
            }
        }
        if self.sources.len() == before {
            return Err(Error::misuse("a row that is made of no others"));
        }
        let end = u32::try_from(self.sources.len()).map_err(|_| too_many(self.sources.len()))?;
        self.ends.push(end);
        Ok(())
    }

    /// Rows of the result.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the result has no rows.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// How many rows each input has.
    pub(crate) fn inputs(&self) -> &[u32] {
        &self.inputs
    }

    /// The rows that make each row of the result, as input and row.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &[(u32, u32)]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let from = start as usize..end as usize;
            start = end;
            self.sources.get(from).unwrap_or_default()
        })
    }
}

fn too_many(rows: usize) -> Error {
    Error::Unsupported {
        what: format!("a reduction of {rows} rows at once"),
        need: format!("at most {} rows", u32::MAX),
        have: "more".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_only_rows_that_are_there() {
        let mut plan = RowPlan::new(&[2, 0, 1]).unwrap();
        plan.push([(0, 1), (2, 0)]).unwrap();
        for bad in [(0, 2), (1, 0), (3, 0), (2, usize::MAX)] {
            assert!(plan.push([(0, 0), bad]).is_err(), "{bad:?}");
        }
        assert!(plan.push([]).is_err());
        plan.push([(0, 0)]).unwrap();
        let rows: Vec<_> = plan.rows().map(<[_]>::to_vec).collect();
        assert_eq!(rows, [vec![(0, 1), (2, 0)], vec![(0, 0)]]);
        assert_eq!((plan.len(), plan.is_empty(), plan.inputs()), (2, false, &[2u32, 0, 1][..]));
        assert!(RowPlan::new(&[usize::MAX]).is_err());
    }
}

//! Which rows of several inputs make each row of a result.

use std::io::ErrorKind;

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::span::View;

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

    /// Takes the memory for so many more rows of the result, each made of one.
    pub fn reserve(&mut self, rows: usize) -> Result<()> {
        let short = |_| Error::io(format!("planning {rows} rows"), ErrorKind::OutOfMemory);
        self.ends.try_reserve_exact(rows).map_err(short)?;
        self.sources.try_reserve_exact(rows).map_err(short)
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

    /// The bytes of a row, where inputs and output are such as the plan is for; nothing where there is nothing to do.
    pub(crate) fn row(
        &self,
        (op, dtype, of): (ReduceOp, Dtype, usize),
        inputs: &[View<'_>],
        output: View<'_>,
    ) -> Result<Option<usize>> {
        op.check(dtype)?;
        let Some(bytes) = output.len().checked_div(self.len()) else { return Ok(None) };
        let fits = |(view, &rows): (&View<'_>, &u32)| Some(view.len()) == bytes.checked_mul(rows as usize);
        let whole = bytes * self.len() == output.len() && bytes % dtype.size() == 0 && of != 0;
        if !whole || inputs.len() != self.inputs.len() || !inputs.iter().zip(&self.inputs).all(fits) {
            return Err(Error::misuse(format!("{op} of {dtype} by rows that do not fit their spans")));
        }
        if inputs.iter().any(|input| input.touches(output)) {
            return Err(Error::misuse(format!("{op} by rows into a span that overlaps another one")));
        }
        Ok(Some(bytes).filter(|&bytes| bytes != 0))
    }

    /// Of each row of the result, where the list of its sources ends in [`sources`](Self::sources).
    pub(crate) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// All rows that make others, as input and row.
    pub(crate) fn sources(&self) -> &[(u32, u32)] {
        &self.sources
    }

    /// How many rows each input has.
    #[cfg(test)]
    fn inputs(&self) -> &[u32] {
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

//! stub
use crate::exit::{Failure, Status};
use crate::printer::Printer;
/// stub
#[derive(clap::Args)]
pub(crate) struct Args {}
pub(crate) fn execute(_args: Args, _printer: &Printer) -> Result<Status, Failure> {
    Ok(Status::Success)
}
pub(crate) const RANK: &str = "__bench";
/// stub
#[derive(clap::Args)]
pub(crate) struct RankArgs {}
pub(crate) fn execute_rank(_args: RankArgs) -> Result<Status, Failure> {
    Ok(Status::Success)
}

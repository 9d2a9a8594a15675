//! stub
use crate::exit::{Failure, Status};
use crate::printer::Printer;
/// stub
#[derive(clap::Args)]
pub(crate) struct Args {}
pub(crate) fn execute(_args: Args, _printer: &Printer) -> Result<Status, Failure> {
    Ok(Status::Success)
}

//! Flags.
/// A flag.
#[derive(Debug)]
pub struct Flag;
/// An abort word.
#[derive(Debug)]
pub struct Abort;

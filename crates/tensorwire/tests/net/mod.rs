//! What tests of links between hosts share: hosts that are network namespaces, a TCP proxy that hurts what goes through it, and
//! the ports that a process listens at. A file that uses it also has `mod ranks` and
//! `mod messages`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

pub mod flow;
pub mod namespaces;
pub mod ports;
pub mod proxy;

//! The control region of a group on one host, and what it holds: the ranks, their progress lines, the records of
//! their operations, their last words, and the cores they run on. All modules that read or write this region use the
//! types of this folder.

pub(crate) mod control;
pub(crate) mod cores;
pub(crate) mod decided;
pub(crate) mod header;
pub(crate) mod kind;
pub(crate) mod member;
pub(crate) mod mismatch;
pub(crate) mod process;
pub(crate) mod record;
pub(crate) mod sentence;
pub(crate) mod standing;
pub(crate) mod traffic;
pub(crate) mod view;
pub(crate) mod words;

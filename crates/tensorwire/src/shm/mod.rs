//! The control region of a group on one host, and what it holds: who the ranks are, their progress lines, the records of
//! their operations, and the cores they run on. Whoever looks at a group from any side reads it here.

pub(crate) mod control;
pub(crate) mod cores;
pub(crate) mod kind;
pub(crate) mod member;
pub(crate) mod record;

//! What a forked child must not do.

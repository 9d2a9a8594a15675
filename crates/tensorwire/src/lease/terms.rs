//! On what terms memory is granted, and what a process has granted.

use std::time::Duration;

/// What a process has granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Grants that are not over, and their bytes.
    pub granted: (u64, u64),
    /// Those of them that somebody has redeemed and not released.
    pub redeemed: (u64, u64),
    /// Those that their owner has dropped, and that wait for holders, or for somebody to redeem them.
    pub waiting: (u64, u64),
    /// Grants that expired before they were redeemed, since the start.
    pub expired: (u64, u64),
    /// Grants for which memory was copied because it could not be shared, since the start, and their bytes.
    pub copied: (u64, u64),
    /// Processes that redeem grants of this one.
    pub holders: usize,
}

/// Terms of a grant: `Terms::default().uses(3)`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terms {
    /// How many redemptions are expected: until so many have taken place, the token keeps the memory, also when its owner
    /// has dropped the grant. As long as the memory is there, more are possible.
    pub uses: u16,
    /// How long the token can be redeemed. [`Duration::MAX`] means: as long as its maker lives.
    pub lifetime: Duration,
    /// Bytes that travel with the token, at most [`super::MAX_NOTE`].
    pub note: Vec<u8>,
    /// Whether memory that cannot be shared is copied into memory that can, instead of an error. It is then the copy that is
    /// lent: neither side sees what the other writes later. [`super::Lease::is_copy`] and [`Stats::copied`] tell.
    pub copy: bool,
}

impl Terms {
    /// With so many redemptions.
    #[must_use]
    pub fn uses(mut self, uses: u16) -> Self {
        self.uses = uses;
        self
    }

    /// With a token that can be redeemed for so long.
    #[must_use]
    pub fn lifetime(mut self, lifetime: Duration) -> Self {
        self.lifetime = lifetime;
        self
    }

    /// With bytes that travel with the token.
    #[must_use]
    pub fn note(mut self, note: impl Into<Vec<u8>>) -> Self {
        self.note = note.into();
        self
    }

    /// With a copy of memory that cannot be shared, or without.
    #[must_use]
    pub fn copy(mut self, copy: bool) -> Self {
        self.copy = copy;
        self
    }
}

impl Default for Terms {
    fn default() -> Self {
        Self { uses: 1, lifetime: LIFETIME, note: Vec::new(), copy: false }
    }
}

/// How long a token can be redeemed unless told otherwise.
const LIFETIME: Duration = Duration::from_secs(600);

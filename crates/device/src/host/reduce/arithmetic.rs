//! The processor's arithmetic as Rust takes it for granted.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;

/// For as long as this lives, the thread rounds to the nearest and takes subnormal numbers as they are.
///
/// A program may have told its thread to take them for zero (`torch.set_flush_denormal`). What a reduction gives must not
/// depend on whose thread does it.
pub(super) struct Arithmetic {
    /// What to put back.
    before: Option<Control>,
}

/// The control word of floating-point arithmetic.
#[cfg(not(target_arch = "aarch64"))]
type Control = u32;
#[cfg(target_arch = "aarch64")]
type Control = u64;

impl Arithmetic {
    #[inline(always)]
    pub(super) fn as_usual() -> Self {
        let now = control();
        // Bits that only tell what has happened do not matter.
        if now & !HAPPENED == USUAL {
            return Self { before: None };
        }
        set_control(USUAL);
        Self { before: Some(now) }
    }
}

impl Drop for Arithmetic {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            set_control(before);
        }
    }
}

#[cfg(target_arch = "x86_64")]
const USUAL: Control = 0x1f80;
#[cfg(target_arch = "x86_64")]
const HAPPENED: Control = 0x3f;
#[cfg(not(target_arch = "x86_64"))]
const USUAL: Control = 0;
#[cfg(not(target_arch = "x86_64"))]
const HAPPENED: Control = 0;

#[inline(always)]
pub(super) fn control() -> Control {
    let mut now = USUAL;
    // SAFETY: stores the control word in `now`.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack, preserves_flags));
    }
    // SAFETY: reads a register.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mrs {}, fpcr", out(reg) now, options(nomem, nostack, preserves_flags));
    }
    now
}

#[inline(always)]
pub(super) fn set_control(control: Control) {
    // SAFETY: loads the control word that Rust counts on, or the one that the thread came with, which it gets back before
    // any other code runs.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack, preserves_flags));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("msr fpcr, {}", in(reg) control, options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = control;
}

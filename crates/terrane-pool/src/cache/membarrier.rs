//! An asymmetric pair of barriers: the frequent side is free, and the rare side pays for both.
//!
//! The owner of a magazine stores "I am inside" and then loads the gate. A sweeper stores "closed"
//! in the gate and then loads whether the owner is inside. At least one of them must see the
//! other's store, so neither load may be reordered before the store of its side. Usually, each side
//! needs a locked instruction. The owner's side is the pool's hit path. On an AMD EPYC of family
//! 26, a locked instruction takes 5.0 ns, and a plain store 0.6 ns. Linux's `membarrier` lets the
//! sweeper run a barrier on every core that runs a thread of this process. Then [`light`] must only
//! stop the compiler from reordering.
//!
//! If the kernel refuses `membarrier` (older than 4.14, or a sandbox), both sides are full
//! barriers. A sandbox may start after the first pool. The first refusal then switches the process
//! to full barriers permanently, and is reported.

/// The barrier of the frequent side.
#[cfg(not(loom))]
#[inline]
pub(crate) fn light() {
    use std::sync::atomic::{Ordering, compiler_fence, fence};
    if linux::MODE.is_asymmetric() {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The barrier of the rare side: a few microseconds.
#[cfg(not(loom))]
pub(crate) fn heavy() {
    use std::sync::atomic::{Ordering, fence};
    fence(Ordering::SeqCst);
    linux::MODE.barrier_everywhere(linux::expedited);
    fence(Ordering::SeqCst);
}

/// Reports, once, that the kernel has begun to refuse `membarrier`. Subscribers are foreign code,
/// so the caller must hold no lock.
#[cfg(not(loom))]
pub(crate) fn report() {
    if linux::MODE.take_report() {
        tracing::warn!(
            "the kernel has begun to refuse `membarrier`; each allocation and each release of a \
             pool's block runs a full barrier from now on, some 10 ns"
        );
    }
}

/// Detects whether the kernel supports it. Every pool calls this before its first hit.
#[cfg(not(loom))]
pub(crate) fn prepare() {
    linux::MODE.prepare(linux::register);
}

// The model checker supports only symmetric fences. They forbid every reordering that the
// asymmetric pair forbids. So an algorithm that is correct with the pair is correct with symmetric
// fences.
#[cfg(loom)]
pub(crate) fn light() {
    loom::sync::atomic::fence(loom::sync::atomic::Ordering::SeqCst);
}
#[cfg(loom)]
pub(crate) fn heavy() {
    light();
}
#[cfg(loom)]
pub(crate) fn prepare() {}
#[cfg(loom)]
pub(crate) fn report() {}

#[cfg(not(loom))]
mod linux {
    use std::ffi::c_long;
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
    use std::time::Duration;

    /// Both sides run full barriers.
    const SYMMETRIC: u8 = 0;
    /// The light side runs full barriers from now on, but some threads may not have read this mode
    /// yet.
    const SWITCHING: u8 = 1;
    /// The light side only stops the compiler from reordering.
    const ASYMMETRIC: u8 = 2;

    /// After this time, every store has left its core's buffer, and every core reads the new mode.
    const COLLECT_INTERVAL: Duration = Duration::from_millis(10);

    /// The barriers that the two sides run.
    pub(super) struct Mode {
        mode: AtomicU8,
        /// Whether a switch of the mode is not yet reported.
        unreported: AtomicBool,
        prepared: Once,
    }

    /// The mode of the process.
    pub(super) static MODE: Mode = Mode::new();

    impl Mode {
        pub(super) const fn new() -> Self {
            let (mode, unreported) = (AtomicU8::new(SYMMETRIC), AtomicBool::new(false));
            Self { mode, unreported, prepared: Once::new() }
        }

        #[inline]
        pub(super) fn is_asymmetric(&self) -> bool {
            self.mode.load(Ordering::Relaxed) == ASYMMETRIC
        }

        /// Registers this process through `register`, before its first pool exists.
        pub(super) fn prepare(&self, register: impl FnOnce() -> bool) {
            self.prepared.call_once(|| {
                if register() {
                    self.mode.store(ASYMMETRIC, Ordering::SeqCst);
                }
            });
        }

        /// Runs a barrier on all cores through `expedited`, unless both sides already run full
        /// barriers. A refusal switches to full barriers.
        pub(super) fn barrier_everywhere(&self, expedited: impl FnOnce() -> bool) {
            if self.mode.load(Ordering::SeqCst) == SYMMETRIC || expedited() {
                return;
            }
            self.mode.store(SWITCHING, Ordering::SeqCst);
            std::thread::sleep(COLLECT_INTERVAL);
            if self.mode.swap(SYMMETRIC, Ordering::SeqCst) != SYMMETRIC {
                self.unreported.store(true, Ordering::SeqCst);
            }
        }

        /// Returns whether a switch is not yet reported, and marks it as reported.
        pub(super) fn take_report(&self) -> bool {
            self.unreported.load(Ordering::Relaxed)
                && self.unreported.swap(false, Ordering::Relaxed)
        }
    }

    /// Registers with the kernel that this process runs barriers on all its cores.
    pub(super) fn register() -> bool {
        membarrier(REGISTER_PRIVATE_EXPEDITED)
    }

    /// Runs a barrier on every core that runs a thread of this process. Returns whether the kernel
    /// did so.
    pub(super) fn expedited() -> bool {
        membarrier(PRIVATE_EXPEDITED)
    }

    // `include/uapi/linux/membarrier.h`.
    const PRIVATE_EXPEDITED: c_long = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: c_long = 1 << 4;

    /// Makes the system call `membarrier(command, 0, 0)`. Returns whether it succeeded.
    ///
    /// Declared here, because one call of three integers does not justify a dependency on bindings
    /// to the whole C library.
    #[cfg(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64"),
        not(miri)
    ))]
    fn membarrier(command: c_long) -> bool {
        const NUMBER: c_long = if cfg!(target_arch = "x86_64") { 324 } else { 283 };
        const NOTHING: c_long = 0;
        // SAFETY: the C library of Linux declares it so.
        unsafe extern "C" {
            fn syscall(number: c_long, ...) -> c_long;
        }
        // SAFETY: the call takes three integers and accesses no memory of this process, except for
        // `errno`.
        unsafe { syscall(NUMBER, command, NOTHING, NOTHING) == 0 }
    }

    #[cfg(not(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64"),
        not(miri)
    )))]
    fn membarrier(_command: c_long) -> bool {
        false
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::linux::Mode;

    #[test]
    fn a_late_refusal_switches_over_once_and_is_reported_once() {
        let mode = Mode::new();
        mode.prepare(|| true);
        assert!(mode.is_asymmetric());
        mode.barrier_everywhere(|| true);
        assert!(mode.is_asymmetric() && !mode.take_report());
        mode.barrier_everywhere(|| false);
        assert!(!mode.is_asymmetric());
        // Another sweep neither calls the kernel nor sleeps.
        mode.barrier_everywhere(|| unreachable!("the kernel was called again"));
        assert!(mode.take_report());
        assert!(!mode.take_report());
    }

    #[test]
    fn where_the_kernel_refuses_at_once_nothing_is_reported() {
        let mode = Mode::new();
        mode.prepare(|| false);
        mode.barrier_everywhere(|| unreachable!("the kernel was called again"));
        assert!(!mode.is_asymmetric() && !mode.take_report());
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn the_kernel_offers_it() {
        super::prepare();
        super::heavy();
        if !super::linux::MODE.is_asymmetric() {
            eprintln!("skipped: the_kernel_offers_it: membarrier is refused here");
            return;
        }
        // The call cannot fail in a registered process.
        assert!((0..100).all(|_| super::linux::expedited()));
    }
}

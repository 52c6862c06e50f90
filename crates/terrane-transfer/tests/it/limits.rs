//! Limits that a test sets in its own process, and processor times.

use std::time::Duration;

/// Limits the size of the files that this process writes, and ignores the signal of that limit.
pub fn limit_file_size(bytes: u64) {
    // SAFETY: ignoring a signal accesses no memory.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structure outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
}

/// The processor time of this thread, without that of others.
pub fn thread_time() -> Duration {
    processor_time(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The processor time of all threads of this process.
pub fn process_time() -> Duration {
    processor_time(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn processor_time(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure outlives the call, which writes it.
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

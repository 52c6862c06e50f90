//! The queue when the kernel refuses.

use std::io::Write;
use std::os::unix::fs::FileExt;

use terrane_core::{Capability, CapabilityStatus, OsError, Reason};
use terrane_storage::{
    IoBackend, IoBuffer, IoCompletion, IoFailure, IoFailureReason, IoFile, IoQueue, IoQueueOptions,
    IoRequest, StorageError,
};
use terrane_testkit::mounted::tmpfs;
use terrane_testkit::process::{forbid, in_child, in_fork};

use crate::support::{
    assert_leaks_nothing, buffer, count, drain, ignore_limit_signal, limit_file_size, queues,
    skipped, target,
};

#[test]
fn a_file_that_is_truncated_during_use() {
    for mut queue in queues("a_file_that_is_truncated_during_use", 4) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 8192], 0).unwrap();
        file.set_len(5000).unwrap();
        let mut bytes = vec![0_u8; 8192];
        let pieces = [buffer(&mut bytes)];
        // SAFETY: the buffer and the file outlive the drain.
        unsafe { queue.submit(&IoRequest::read(1, target(&file), count(0), &pieces)) }.unwrap();
        let failure = drain(&mut queue).remove(0).outcome.unwrap_err();
        assert_eq!(failure.reason, IoFailureReason::EndOfFile);
        assert_eq!((failure.offset, failure.missing()), (count(5000), count(3192)));
    }
}

#[test]
fn a_bad_descriptor_is_a_typed_failure() {
    for mut queue in queues("a_bad_descriptor_is_a_typed_failure", 4) {
        let mut bytes = [0_u8; 64];
        let pieces = [buffer(&mut bytes)];
        let file = IoFile { descriptor: -1, ..target(&tempfile::tempfile().unwrap()) };
        // SAFETY: the buffer outlives the drain; no file has this descriptor, now or later.
        unsafe { queue.submit(&IoRequest::write(1, file, count(0), &pieces)) }.unwrap();
        let failure = drain(&mut queue).remove(0).outcome.unwrap_err();
        let IoFailureReason::Os(error) = failure.reason else { panic!("{failure:?}") };
        assert_eq!(error.code, libc::EBADF);
    }
}

/// Writes 1 MiB to a file with room for less. Returns the failure.
fn write_too_much(queue: &mut IoQueue, file: &std::fs::File) -> IoFailure {
    let mut bytes = vec![6_u8; 1 << 20];
    let pieces: Vec<IoBuffer> = bytes.chunks_mut(10_000).map(buffer).collect();
    // SAFETY: the buffers and the file outlive the drain.
    unsafe { queue.submit(&IoRequest::write(1, target(file), count(0), &pieces)) }.unwrap();
    drain(queue).remove(0).outcome.unwrap_err()
}

#[test]
fn a_limit_on_file_sizes() {
    in_child("queue_faults::a_limit_on_file_sizes", || {
        ignore_limit_signal();
        limit_file_size(100_000);
        for mut queue in queues("a_limit_on_file_sizes", 4) {
            let file = tempfile::tempfile().unwrap();
            let failure = write_too_much(&mut queue, &file);
            let IoFailureReason::Os(error) = failure.reason else { panic!("{failure:?}") };
            assert_eq!(error.code, libc::EFBIG);
            assert_eq!((failure.offset, failure.transferred), (count(100_000), count(100_000)));
            assert!(failure.is_exhaustion());
        }
    });
}

#[test]
fn a_full_disk() {
    in_child("queue_faults::a_full_disk", || {
        let directory = tempfile::tempdir().unwrap();
        let _mounted = match tmpfs(directory.path(), 256 << 10) {
            Ok(mounted) => mounted,
            Err(error) => return skipped("a_full_disk", error),
        };
        for mut queue in queues("a_full_disk", 4) {
            let file = tempfile::tempfile_in(directory.path()).unwrap();
            let failure = write_too_much(&mut queue, &file);
            let IoFailureReason::Os(error) = failure.reason else { panic!("{failure:?}") };
            assert_eq!(error.code, libc::ENOSPC);
            let path = failure.path.as_deref();
            assert!(path.is_some_and(|path| path.starts_with(directory.path())), "{failure}");
            assert!(failure.transferred > count(100_000), "{failure:?}");
            assert!(failure.transferred <= count(256 << 10), "{failure:?}");
            assert_eq!(failure.offset, failure.transferred);
        }
    });
}

#[test]
fn dropped_queues_leak_nothing() {
    in_child("queue_faults::dropped_queues_leak_nothing", || {
        // Not in each round: AddressSanitizer keeps freed memory for a while.
        let mut bytes = vec![6_u8; 1 << 20];
        let pieces = [buffer(&mut bytes)];
        assert_leaks_nothing("a queue", || {
            for mut queue in queues("dropped_queues_leak_nothing", 8) {
                let file = tempfile::tempfile().unwrap();
                for token in 0..8 {
                    let request = IoRequest::write(token, target(&file), count(0), &pieces);
                    // SAFETY: buffers and file outlive the drop of the queue below.
                    unsafe { queue.submit(&request) }.unwrap();
                }
                queue.wait(None, &mut Vec::new()).unwrap();
                drop(queue);
            }
        });
    });
}

#[test]
fn threads_serve_if_io_uring_is_forbidden() {
    in_child("queue_faults::threads_serve_if_io_uring_is_forbidden", || {
        if let Err(error) = forbid(&[libc::SYS_io_uring_setup], libc::EPERM) {
            return skipped("threads_serve_if_io_uring_is_forbidden", error);
        }
        let mut queue = IoQueue::new(&IoQueueOptions::default()).unwrap();
        let refused = OsError::new("io_uring_setup", libc::EPERM);
        assert_eq!(
            queue.capabilities().status(&Capability::IoUring),
            Some(&CapabilityStatus::Refused(Reason::Os(refused)))
        );
        let file = tempfile::tempfile().unwrap();
        let mut bytes = [8_u8; 4096];
        let pieces = [buffer(&mut bytes)];
        // SAFETY: the buffer and the file outlive the drain.
        unsafe { queue.submit(&IoRequest::write(1, target(&file), count(0), &pieces)) }.unwrap();
        assert_eq!(drain(&mut queue)[0].outcome, Ok(()));

        let options = IoQueueOptions { backend: IoBackend::IoUring, ..IoQueueOptions::default() };
        let error = IoQueue::new(&options).unwrap_err();
        assert!(matches!(error, StorageError::Capability(_)), "{error:?}");
    });
}

#[test]
fn threads_serve_if_io_uring_may_be_created_but_not_entered() {
    in_child("queue_faults::threads_serve_if_io_uring_may_be_created_but_not_entered", || {
        if let Err(error) = forbid(&[libc::SYS_io_uring_enter], libc::EPERM) {
            return skipped("threads_serve_if_io_uring_may_be_created_but_not_entered", error);
        }
        let queue = IoQueue::new(&IoQueueOptions::default()).unwrap();
        assert!(matches!(
            queue.capabilities().status(&Capability::IoUring),
            Some(CapabilityStatus::Refused(_))
        ));
    });
}

/// Runs `body` in a process that may no longer enter io_uring. Its queue has reads of an empty pipe
/// that the kernel has accepted, and one write that the kernel has not accepted.
fn in_a_late_sandbox(test: &str, body: impl FnOnce(IoQueue, std::io::PipeWriter, &std::fs::File)) {
    in_child(&format!("queue_faults::{test}"), || {
        let options = IoQueueOptions { backend: IoBackend::IoUring, ..IoQueueOptions::default() };
        let mut queue = match IoQueue::new(&options) {
            Ok(queue) => queue,
            Err(error) => return skipped(test, error),
        };
        let (reader, writer) = std::io::pipe().unwrap();
        let file = tempfile::tempfile().unwrap();
        let pipe = IoFile { descriptor: std::os::fd::AsRawFd::as_raw_fd(&reader), ..target(&file) };
        // Both outlive the queue, whatever the body does.
        let (taken, untaken) = (Box::leak(Box::new([0_u8; 4])), Box::leak(Box::new([1_u8; 4096])));
        let pieces = [buffer(taken)];
        // SAFETY: the buffer is never freed, and the pipe outlives the queue.
        unsafe { queue.submit(&IoRequest::read(1, pipe, count(0), &pieces)) }.unwrap();
        queue.flush().unwrap();
        if let Err(error) = forbid(&[libc::SYS_io_uring_enter], libc::EPERM) {
            drop(writer);
            return skipped(test, error);
        }
        let pieces = [buffer(untaken)];
        // SAFETY: the buffer is never freed, and the file outlives the queue.
        unsafe { queue.submit(&IoRequest::write(2, target(&file), count(0), &pieces)) }.unwrap();
        body(queue, writer, &file);
    });
}

#[test]
fn a_late_sandbox_ends_requests_that_the_kernel_has_not_accepted() {
    in_a_late_sandbox(
        "a_late_sandbox_ends_requests_that_the_kernel_has_not_accepted",
        |mut queue, writer, file| {
            let refusal = OsError::new("io_uring_enter", libc::EPERM);
            let mut completions = Vec::new();
            let error = queue.wait(None, &mut completions).unwrap_err();
            assert!(
                matches!(error, StorageError::Queue { source } if source == refusal),
                "{error:?}"
            );
            assert_eq!(completions.len(), 1, "{completions:?}");
            let IoCompletion { token, outcome } = completions.remove(0);
            assert_eq!((token, outcome.unwrap_err().reason), (2, IoFailureReason::Os(refusal)));

            // The queue accepts no more requests, and keeps those in the kernel.
            let request = IoRequest::sync_data(3, target(file));
            // SAFETY: there are no buffers, and the file outlives the queue.
            unsafe { queue.submit(&request) }.unwrap_err();
            queue.cancel(1).unwrap_err();
            queue.flush().unwrap_err();
            assert_eq!(queue.poll(&mut completions).unwrap(), 0);
            assert_eq!(queue.in_flight(), 1);
            queue.waker().wake();
            assert_eq!(queue.wait(None, &mut completions).unwrap(), 0, "the waker ends a wait");
            (&writer).write_all(&[7; 4]).unwrap();
            assert_eq!(drain(&mut queue), [IoCompletion { token: 1, outcome: Ok(()) }]);
            assert_eq!(file.metadata().unwrap().len(), 0, "the kernel took nothing later");
        },
    );
}

#[test]
fn dropping_a_queue_in_a_late_sandbox_returns() {
    let test = "dropping_a_queue_in_a_late_sandbox_returns";
    in_a_late_sandbox(test, |queue, writer, file| {
        (&writer).write_all(&[7; 4]).unwrap();
        drop(queue);
        assert_eq!(file.metadata().unwrap().len(), 0, "the kernel took nothing later");
    });
}

#[test]
fn a_forked_process_leaves_the_queue_to_its_parent() {
    in_child("queue_faults::a_forked_process_leaves_the_queue_to_its_parent", || {
        for queue in queues("a_forked_process_leaves_the_queue_to_its_parent", 4) {
            let file = tempfile::tempfile().unwrap();
            let mut bytes = [8_u8; 4096];
            let pieces = [buffer(&mut bytes)];
            let request = IoRequest::write(1, target(&file), count(0), &pieces);
            let mut queue = Some(queue);
            // SAFETY: the buffer and the file outlive the drain, in both processes.
            unsafe { queue.as_mut().unwrap().submit(&request) }.unwrap();
            in_fork(|| {
                let mut queue = queue.take().unwrap();
                let mut done = Vec::new();
                // SAFETY: as above.
                let submitted = unsafe { queue.submit(&request) };
                for result in [
                    submitted,
                    queue.flush(),
                    queue.wait(None, &mut done).map(drop),
                    queue.poll(&mut done).map(drop),
                    queue.cancel(1),
                ] {
                    assert!(matches!(result, Err(StorageError::Forked(_))), "{result:?}");
                }
                queue.waker().wake();
                drop(queue);
            });
            assert_eq!(drain(&mut queue.unwrap())[0].outcome, Ok(()));
        }
    });
}

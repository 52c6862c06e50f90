//! The guarantees of the queue, on both backends.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Capability, CapabilityStatus};
use terrane_storage::{
    IoBackend, IoBuffer, IoFailureReason, IoOperation, IoQueue, IoQueueOptions, IoRequest,
    StorageError,
};

use crate::support::{buffer, count, drain, queues, target, uses_io_uring};

#[test]
fn written_bytes_are_read_back_in_order() {
    for mut queue in queues("written_bytes_are_read_back_in_order", 8) {
        let file = tempfile::tempfile().unwrap();
        let mut out: Vec<u8> = (0..100_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let mut back = vec![0_u8; out.len()];
        let pieces: Vec<IoBuffer> = out.chunks_mut(777).map(buffer).collect();
        // SAFETY: the buffers and the file outlive the drain.
        unsafe { queue.submit(&IoRequest::write(1, target(&file), count(5), &pieces)) }.unwrap();
        assert_eq!(drain(&mut queue)[0].outcome, Ok(()));
        let pieces: Vec<IoBuffer> = back.chunks_mut(1234).map(buffer).collect();
        // SAFETY: the buffers and the file outlive the drain.
        unsafe { queue.submit(&IoRequest::read(2, target(&file), count(5), &pieces)) }.unwrap();
        assert_eq!(drain(&mut queue)[0].outcome, Ok(()));
        assert_eq!(out, back);
        assert_eq!(file.metadata().unwrap().len(), 100_005);
    }
}

#[test]
fn more_buffers_than_one_call_takes() {
    for mut queue in queues("more_buffers_than_one_call_takes", 1) {
        let file = tempfile::tempfile().unwrap();
        let mut out: Vec<u8> = (0..20_000_u32).map(|n| n.to_le_bytes()[1] ^ 0x5a).collect();
        let pieces: Vec<IoBuffer> = out.chunks_mut(7).map(buffer).collect();
        assert!(pieces.len() > 2 * 1024);
        // SAFETY: the buffers and the file outlive the drain.
        unsafe { queue.submit(&IoRequest::write(1, target(&file), count(0), &pieces)) }.unwrap();
        assert_eq!(drain(&mut queue)[0].outcome, Ok(()));
        let mut back = vec![0; out.len()];
        file.read_exact_at(&mut back, 0).unwrap();
        assert_eq!(out, back);
    }
}

#[test]
fn a_full_queue_refuses_and_loses_nothing() {
    for mut queue in queues("a_full_queue_refuses_and_loses_nothing", 3) {
        let file = tempfile::tempfile().unwrap();
        let mut bytes = [7_u8; 64];
        let pieces = [buffer(&mut bytes)];
        for token in 0..3 {
            let request = IoRequest::write(token, target(&file), count(64 * token), &pieces);
            // SAFETY: the buffer and the file outlive the drain.
            unsafe { queue.submit(&request) }.unwrap();
        }
        assert!(!queue.has_room());
        let request = IoRequest::write(3, target(&file), count(0), &pieces);
        // SAFETY: the buffer and the file outlive the drain.
        let refused = unsafe { queue.submit(&request) };
        assert!(matches!(refused, Err(StorageError::QueueFull { depth: 3 })));
        let mut tokens: Vec<u64> = drain(&mut queue).iter().map(|c| c.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2]);
        assert!(queue.has_room());
    }
}

#[test]
fn empty_requests_and_syncs_complete() {
    for mut queue in queues("empty_requests_and_syncs_complete", 4) {
        let file = tempfile::tempfile().unwrap();
        let requests = [
            IoRequest::read(0, target(&file), count(99), &[]),
            IoRequest::sync_data(1, target(&file)),
            IoRequest::sync_all(2, target(&file)),
        ];
        for request in &requests {
            // SAFETY: there are no buffers, and the file outlives the drain.
            unsafe { queue.submit(request) }.unwrap();
        }
        let completions = drain(&mut queue);
        assert_eq!(completions.len(), 3);
        assert!(completions.iter().all(|c| c.outcome.is_ok()), "{completions:?}");
    }
}

#[test]
fn the_end_of_the_file_is_an_error_with_its_offset() {
    for mut queue in queues("the_end_of_the_file_is_an_error_with_its_offset", 4) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[9; 1000]).unwrap();
        let mut bytes = [0_u8; 600];
        let (left, right) = bytes.split_at_mut(100);
        let pieces = [buffer(left), buffer(right)];
        // SAFETY: the buffers and the file outlive the drain.
        unsafe { queue.submit(&IoRequest::read(1, target(&file), count(700), &pieces)) }.unwrap();
        let failure = drain(&mut queue).remove(0).outcome.unwrap_err();
        assert_eq!(failure.reason, IoFailureReason::EndOfFile);
        assert_eq!(failure.file, target(&file).identity);
        assert_eq!(failure.operation, IoOperation::Read);
        assert_eq!(failure.offset, count(1000));
        assert_eq!(failure.length, count(600));
        assert_eq!(failure.missing(), count(300));
        assert_eq!(bytes[..300], [9; 300], "the bytes before the end were read");
        assert_eq!(bytes[300..], [0; 300]);
    }
}

#[test]
fn a_deadline_that_has_passed_touches_nothing() {
    for mut queue in queues("a_deadline_that_has_passed_touches_nothing", 4) {
        let file = tempfile::tempfile().unwrap();
        let mut bytes = [1_u8; 512];
        let pieces = [buffer(&mut bytes)];
        let request = IoRequest::write(1, target(&file), count(0), &pieces).by(Instant::now());
        // SAFETY: the buffer and the file outlive the drain.
        unsafe { queue.submit(&request) }.unwrap();
        let failure = drain(&mut queue).remove(0).outcome.unwrap_err();
        assert_eq!(failure.reason, IoFailureReason::DeadlineExceeded);
        assert_eq!(file.metadata().unwrap().len(), 0);
    }
}

/// A pipe stands for a device that does not answer.
#[test]
fn a_deadline_cancels_a_request_that_waits_in_the_kernel() {
    for mut queue in queues("a_deadline_cancels_a_request_that_waits_in_the_kernel", 4) {
        if !uses_io_uring(&queue) {
            // A blocked thread cannot be cancelled, and `preadv` refuses pipes.
            continue;
        }
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&reader);
        let file = terrane_storage::IoFile { descriptor, ..target(&tempfile::tempfile().unwrap()) };
        let mut bytes = [0_u8; 16];
        let pieces = [buffer(&mut bytes)];
        let request = IoRequest::read(2, file, count(0), &pieces);
        // SAFETY: the buffer and the pipe outlive the drain.
        unsafe { queue.submit(&request) }.unwrap();
        let mut completions = Vec::new();
        let begin = Instant::now();
        assert_eq!(queue.wait(Some(begin), &mut completions).unwrap(), 0, "nothing is ready");
        let request = IoRequest { token: 1, ..request }.by(begin + Duration::from_millis(30));
        // SAFETY: as above.
        unsafe { queue.submit(&request) }.unwrap();
        queue.wait(None, &mut completions).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(30));
        assert_eq!(completions[0].token, 1);
        let failure = completions.remove(0).outcome.unwrap_err();
        assert_eq!(failure.reason, IoFailureReason::DeadlineExceeded);

        queue.cancel(2).unwrap();
        let failure = drain(&mut queue).remove(0).outcome.unwrap_err();
        assert_eq!(failure.reason, IoFailureReason::Cancelled);
        // A byte that is written now reaches a new reader, because no request remains.
        writer.write_all(&[5; 16]).unwrap();
        let mut seen = [0_u8; 16];
        reader.read_exact(&mut seen).unwrap();
        assert_eq!((bytes, seen), ([0; 16], [5; 16]));
    }
}

/// One worker is busy with the first requests when the last ones are cancelled. On a busy machine
/// it may have executed all of them before; then the test tries again.
#[test]
fn cancelled_requests_never_reach_a_busy_worker() {
    assert!((0..100).any(|_| cancel_behind_a_busy_worker() > 0), "nothing was ever cancelled");
}

fn with_one_worker() -> IoQueue {
    let options = IoQueueOptions {
        depth: 32,
        backend: IoBackend::Threads,
        threads: 1,
        ..IoQueueOptions::default()
    };
    IoQueue::new(&options).unwrap()
}

/// Cancels the last 8 of 32 requests. Returns the number of those that were cancelled in time.
fn cancel_behind_a_busy_worker() -> u64 {
    let mut queue = with_one_worker();
    let file = tempfile::tempfile().unwrap();
    let mut bytes = vec![2_u8; 4 << 20];
    let pieces = [buffer(&mut bytes)];
    for number in 0..32 {
        let token = if number < 24 { 1 } else { 2 };
        let request = IoRequest::write(token, target(&file), count(number << 22), &pieces);
        // SAFETY: the buffer, which is only read, and the file outlive the drain.
        unsafe { queue.submit(&request) }.unwrap();
    }
    queue.cancel(2).unwrap();
    let completions = drain(&mut queue);
    assert_eq!(completions.len(), 32);
    let (mut cancelled, mut written) = (0, 0);
    for completion in completions {
        match completion.outcome {
            Ok(()) => written += 4 << 20,
            Err(failure) => {
                assert_eq!((completion.token, failure.reason), (2, IoFailureReason::Cancelled));
                written += failure.transferred.get();
                cancelled += 1;
            }
        }
    }
    assert_eq!(file.metadata().unwrap().len(), written, "cancelled requests wrote nothing");
    cancelled
}

/// Workers that hang in system calls take no further request. Deadlines and cancellations of the
/// others hold all the same.
#[test]
fn a_request_that_no_worker_has_taken_ends_at_its_deadline_or_cancellation() {
    for is_cancelled in [false, true] {
        // The test's thread can be late once, but hardly always.
        let is_early = || end_behind_a_busy_worker(is_cancelled) < 23;
        assert!((0..100).any(|_| is_early()), "it waited for the worker: {is_cancelled}");
    }
}

/// Ends the last of 24 requests before a worker takes it, by a deadline or a cancellation. Returns
/// its place among the completions.
fn end_behind_a_busy_worker(is_cancelled: bool) -> usize {
    let mut queue = with_one_worker();
    let file = tempfile::tempfile().unwrap();
    let mut bytes = vec![2_u8; 4 << 20];
    let pieces = [buffer(&mut bytes)];
    for token in 0..24 {
        let mut request = IoRequest::write(token, target(&file), count(token << 22), &pieces);
        if token == 23 && !is_cancelled {
            request = request.by(Instant::now() + Duration::from_millis(1));
        }
        // SAFETY: the buffer, which is only read, and the file outlive the drain.
        unsafe { queue.submit(&request) }.unwrap();
    }
    if is_cancelled {
        queue.cancel(23).unwrap();
    }
    let completions = drain(&mut queue);
    assert_eq!(completions.len(), 24);
    completions.iter().position(|completion| completion.token == 23).unwrap()
}

#[test]
fn dropping_the_queue_ends_the_requests_in_flight() {
    for queue in queues("dropping_the_queue_ends_the_requests_in_flight", 16) {
        let mut queue = queue;
        let file = tempfile::tempfile().unwrap();
        let mut blocks = vec![vec![3_u8; 1 << 20]; 16];
        for (token, block) in (0..).zip(&mut blocks) {
            let pieces = [buffer(block)];
            let request = IoRequest::write(token, target(&file), count(token << 20), &pieces);
            // SAFETY: the buffers and the file outlive the queue, which is dropped below.
            unsafe { queue.submit(&request) }.unwrap();
        }
        queue.flush().unwrap();
        drop(queue);
        // All transferred bytes came from the blocks before they change here.
        for block in &mut blocks {
            block.fill(4);
        }
        let mut written = Vec::new();
        (&file).read_to_end(&mut written).unwrap();
        assert!(written.iter().all(|&byte| byte == 3 || byte == 0));
    }
}

#[test]
fn a_waker_ends_a_wait() {
    for mut queue in queues("a_waker_ends_a_wait", 4) {
        let waker = queue.waker();
        if uses_io_uring(&queue) {
            let (reader, _writer) = std::io::pipe().unwrap();
            let descriptor = std::os::fd::AsRawFd::as_raw_fd(&reader);
            let file =
                terrane_storage::IoFile { descriptor, ..target(&tempfile::tempfile().unwrap()) };
            let mut bytes = [0_u8; 16];
            let pieces = [buffer(&mut bytes)];
            // SAFETY: the buffer and the pipe outlive the drop of the queue below.
            unsafe { queue.submit(&IoRequest::read(1, file, count(0), &pieces)) }.unwrap();
            for _ in 0..3 {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(5));
                        waker.wake();
                    });
                    let appended = queue.wait(None, &mut Vec::new()).unwrap();
                    assert_eq!(appended, 0);
                });
            }
            drop(queue);
            assert_eq!(bytes, [0; 16]);
        } else {
            let file = tempfile::tempfile().unwrap();
            // SAFETY: there are no buffers, and the file outlives the drain.
            unsafe { queue.submit(&IoRequest::sync_all(1, target(&file))) }.unwrap();
            waker.wake();
            waker.wake();
            assert_eq!(drain(&mut queue).len(), 1);
            drop(queue);
        }
        waker.wake();
    }
}

/// An engine creates its queue where it can return errors, and moves it to its thread.
#[test]
fn queues_can_move_between_threads() {
    for mut queue in queues("queues_can_move_between_threads", 2) {
        let completions = std::thread::scope(|scope| {
            let work = scope.spawn(move || {
                let file = tempfile::tempfile().unwrap();
                // SAFETY: there are no buffers, and the file outlives the drain.
                unsafe { queue.submit(&IoRequest::sync_data(1, target(&file))) }.unwrap();
                drain(&mut queue)
            });
            work.join().unwrap()
        });
        assert_eq!(completions[0].outcome, Ok(()));
    }
}

#[test]
fn the_report_has_the_backend_in_use() {
    let options = IoQueueOptions { backend: IoBackend::Threads, ..IoQueueOptions::default() };
    let queue = IoQueue::new(&options).unwrap();
    assert_eq!(
        queue.capabilities().status(&Capability::IoUring),
        Some(&CapabilityStatus::NotTried)
    );
    for depth in [0, IoQueueOptions::MAX_DEPTH + 1] {
        let options = IoQueueOptions { depth, ..IoQueueOptions::default() };
        assert!(matches!(IoQueue::new(&options), Err(StorageError::QueueDepth { .. })));
    }
}

#[test]
fn offsets_beyond_the_maximum_of_files_are_refused() {
    for mut queue in queues("offsets_beyond_the_maximum_of_files_are_refused", 2) {
        let file = tempfile::tempfile().unwrap();
        let mut bytes = [0_u8; 16];
        let pieces = [buffer(&mut bytes)];
        let request = IoRequest::read(1, target(&file), ByteCount::new(u64::MAX >> 1), &pieces);
        // SAFETY: the buffer and the file outlive the call, which returns an error.
        let refused = unsafe { queue.submit(&request) };
        assert!(matches!(refused, Err(StorageError::OffsetOutOfRange { .. })));
        assert_eq!(queue.in_flight(), 0);
    }
}

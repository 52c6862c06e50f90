//! The state of one request between submission and completion: the remaining bytes, and the
//! handling of each system call's result. Both backends share it.

use std::time::Instant;

use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, OsError};

use super::request::{IoFailure, IoFailureReason, IoFile, IoOperation, IoRequest};
use crate::error::StorageError;
use crate::sys;

/// The maximum number of bytes of one system call. It is below the kernel's limit of 2 GiB − 4 KiB.
/// It is a power of two, so the rest of an aligned request stays aligned.
pub(super) const MAX_STEP: usize = 1 << 30;

/// The maximum number of buffers of one system call: the kernel's `UIO_MAXIOV`.
pub(super) const MAX_VECTORS: usize = 1024;

/// The maximum number of consecutive `EAGAIN` results before the request fails with it.
const MAX_RETRIES: u32 = 64;

/// The reason why a request must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopReason {
    Deadline,
    Caller,
}

impl StopReason {
    const fn reason(self) -> IoFailureReason {
        match self {
            Self::Deadline => IoFailureReason::DeadlineExceeded,
            Self::Caller => IoFailureReason::Cancelled,
        }
    }
}

/// The arguments of one system call of a transfer.
#[derive(Debug)]
pub(super) enum IoStep<'a> {
    /// One buffer: address and length, at most [`MAX_STEP`].
    Single(libc::iovec, u64),
    /// Several buffers: at most [`MAX_VECTORS`], and at most [`MAX_STEP`] bytes except in the last
    /// call of a huge request.
    Vectored(&'a [libc::iovec], u64),
    /// No buffers: a sync.
    Sync,
}

/// The state of a request after a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StepOutcome {
    Again,
    Finished(Result<(), IoFailure>),
}

/// A request in progress.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) token: u64,
    pub(super) file: IoFile,
    pub(super) operation: IoOperation,
    pub(super) deadline: Option<Instant>,
    /// Set when the request must end early. The request is in flight until the kernel reports its
    /// end.
    pub(super) stop: Option<StopReason>,
    /// The index of the registered buffer that contains all bytes.
    pub(super) registered: Option<u16>,
    offset: u64,
    total: u64,
    done: u64,
    retries: u32,
    vectors: Vectors,
    /// The index of the first vector with bytes left. All vectors before it are done.
    first: usize,
}

/// The buffers of a request in the format of system calls.
#[derive(Debug, Default)]
pub(super) struct Vectors(Vec<libc::iovec>);

// SAFETY: these are addresses that only the kernel dereferences. The submitter of the request
// guarantees that they stay valid, whichever thread makes the call.
unsafe impl Send for Vectors {}

impl Transfer {
    /// Creates a transfer from `request`. It reuses the capacity of `vectors`.
    pub(super) fn new(request: &IoRequest<'_>, mut vectors: Vectors) -> Result<Self, StorageError> {
        let is_sync = matches!(request.operation, IoOperation::SyncData | IoOperation::SyncAll);
        let buffers = if is_sync { &[][..] } else { request.buffers };
        let total = buffers.iter().map(|b| b.length).collect::<Result<ByteCount, _>>()?;
        let end = request.offset.checked_add(total)?;
        if i64::try_from(end.get()).is_err() {
            return Err(StorageError::OffsetOutOfRange { offset: request.offset, length: total });
        }
        vectors.0.clear();
        vectors.0.extend(buffers.iter().filter(|b| !b.length.is_zero()).map(|b| libc::iovec {
            iov_base: b.address.as_ptr().cast(),
            iov_len: b.length.to_usize(),
        }));
        Ok(Self {
            token: request.token,
            file: request.file,
            operation: request.operation,
            deadline: request.deadline,
            stop: None,
            registered: None,
            offset: request.offset.get(),
            total: total.get(),
            done: 0,
            retries: 0,
            vectors,
            first: 0,
        })
    }

    /// Whether the transfer needs no system call.
    pub(super) fn is_empty(&self) -> bool {
        self.total == 0 && matches!(self.operation, IoOperation::Read | IoOperation::Write)
    }

    /// The address and the length of each buffer.
    pub(super) fn ranges(&self) -> impl ExactSizeIterator<Item = (usize, usize)> {
        self.vectors.0.iter().map(|vector| (vector.iov_base.addr(), vector.iov_len))
    }

    /// Returns the list of vectors for reuse.
    pub(super) fn into_vectors(self) -> Vectors {
        self.vectors
    }

    /// The next system call, of at most `max_bytes` bytes. `max_bytes` is at most [`MAX_STEP`].
    pub(super) fn step(&self, max_bytes: usize) -> IoStep<'_> {
        let remaining = self.vectors.0.get(self.first..).unwrap_or(&[]);
        let position = self.offset + self.done;
        let Some(&head) = remaining.first() else { return IoStep::Sync };
        let mut room = max_bytes;
        let fits = |vector: &&libc::iovec| match room.checked_sub(vector.iov_len) {
            Some(rest) => {
                room = rest;
                true
            }
            None => false,
        };
        let fitting = remaining.iter().take(MAX_VECTORS).take_while(fits).count();
        match remaining.get(..fitting) {
            Some(several @ [_, _, ..]) => IoStep::Vectored(several, position),
            _ => IoStep::Single(
                libc::iovec { iov_len: head.iov_len.min(max_bytes), ..head },
                position,
            ),
        }
    }

    /// Processes the result of a system call: the number of transferred bytes, or its `errno`.
    pub(super) fn advance(&mut self, answer: Result<usize, i32>) -> StepOutcome {
        match answer {
            Ok(0) if self.done < self.total => {
                StepOutcome::Finished(Err(self.failure(match self.operation {
                    IoOperation::Read => IoFailureReason::EndOfFile,
                    _ => IoFailureReason::NoProgress,
                })))
            }
            Ok(bytes) => {
                self.retries = 0;
                self.consume(bytes);
                if self.done >= self.total {
                    StepOutcome::Finished(Ok(()))
                } else {
                    self.again_unless_stopped()
                }
            }
            Err(libc::EINTR) => self.again_unless_stopped(),
            // The kernel may refuse a request because of its registered buffer.
            Err(libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP) if self.registered.is_some() => {
                self.registered = None;
                self.again_unless_stopped()
            }
            Err(libc::EAGAIN) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                self.again_unless_stopped()
            }
            Err(code) => StepOutcome::Finished(Err(self.failure(self.reason(code)))),
        }
    }

    /// The failure of a request that ends at this point.
    pub(super) fn failure(&self, reason: IoFailureReason) -> IoFailure {
        IoFailure {
            file: self.file.identity,
            path: sys::file::path(self.file.descriptor),
            operation: self.operation,
            offset: ByteCount::new(self.offset + self.done),
            length: ByteCount::new(self.total),
            transferred: ByteCount::new(self.done),
            reason,
        }
    }

    /// The failure of a request that was stopped.
    pub(super) fn stopped(&self, stop: StopReason) -> IoFailure {
        self.failure(stop.reason())
    }

    /// Another step, unless the request must stop.
    fn again_unless_stopped(&self) -> StepOutcome {
        match self.stop {
            Some(stop) => StepOutcome::Finished(Err(self.stopped(stop))),
            None => StepOutcome::Again,
        }
    }

    fn reason(&self, code: i32) -> IoFailureReason {
        match (code, self.stop) {
            (libc::ECANCELED, Some(stop)) => stop.reason(),
            // A direct read up to an unaligned end of file returns the available bytes. A further
            // read from that unaligned offset is then refused.
            (libc::EINVAL, _) if self.done > 0 && self.is_read_past_end() => {
                IoFailureReason::EndOfFile
            }
            _ => IoFailureReason::Os(OsError::new(self.operation.call(), code)),
        }
    }

    fn is_read_past_end(&self) -> bool {
        self.operation == IoOperation::Read
            && sys::file::length(self.file.descriptor)
                .is_ok_and(|length| length <= self.offset + self.done)
    }

    /// Advances by `bytes` bytes.
    fn consume(&mut self, bytes: usize) {
        let mut remaining = bytes;
        while remaining > 0 {
            let Some(vector) = self.vectors.0.get_mut(self.first) else { break };
            let advanced = remaining.min(vector.iov_len);
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(advanced).cast();
            vector.iov_len -= advanced;
            remaining -= advanced;
            self.done += to_u64(advanced);
            if vector.iov_len == 0 {
                self.first += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;
    use terrane_core::{FileIdentity, HostAddress};

    use crate::queue::IoBuffer;

    const FILE: IoFile =
        IoFile { descriptor: -1, identity: FileIdentity { file_system: 1, inode: 2 } };

    fn buffers(lengths: &[u64]) -> Vec<IoBuffer> {
        let address = HostAddress::new(NonNull::<u64>::dangling());
        lengths.iter().map(|&l| IoBuffer { address, length: ByteCount::new(l) }).collect()
    }

    fn transfer(operation: IoOperation, lengths: &[u64]) -> Transfer {
        let buffers = buffers(lengths);
        let request =
            IoRequest { operation, ..IoRequest::read(7, FILE, ByteCount::new(100), &buffers) };
        Transfer::new(&request, Vectors::default()).unwrap()
    }

    fn shape(step: &IoStep<'_>) -> (Vec<usize>, u64) {
        match step {
            IoStep::Single(vector, at) => (vec![vector.iov_len], *at),
            IoStep::Vectored(vectors, at) => (vectors.iter().map(|v| v.iov_len).collect(), *at),
            IoStep::Sync => (Vec::new(), 0),
        }
    }

    #[test]
    fn short_answers_are_continued_where_they_stopped() {
        let mut transfer = transfer(IoOperation::Read, &[10, 0, 20, 30]);
        assert_eq!(shape(&transfer.step(MAX_STEP)), (vec![10, 20, 30], 100));
        assert_eq!(transfer.advance(Ok(15)), StepOutcome::Again);
        assert_eq!(shape(&transfer.step(MAX_STEP)), (vec![15, 30], 115));
        assert_eq!(transfer.advance(Err(libc::EINTR)), StepOutcome::Again);
        assert_eq!(transfer.advance(Ok(15)), StepOutcome::Again);
        assert_eq!(shape(&transfer.step(MAX_STEP)), (vec![30], 130));
        assert_eq!(transfer.advance(Ok(30)), StepOutcome::Finished(Ok(())));
    }

    #[test]
    fn long_lists_and_large_buffers_are_split() {
        let many = transfer(IoOperation::Write, &vec![512; MAX_VECTORS + 3]);
        assert_eq!(shape(&many.step(MAX_STEP)).0.len(), MAX_VECTORS);
        let large = transfer(IoOperation::Write, &[5 << 30, 512]);
        assert_eq!(shape(&large.step(MAX_STEP)), (vec![MAX_STEP], 100));
        let mixed = transfer(IoOperation::Write, &[512, 512, 5 << 30]);
        assert_eq!(shape(&mixed.step(MAX_STEP)), (vec![512, 512], 100));
    }

    #[test]
    fn no_progress_is_an_error_with_its_place() {
        let mut read = transfer(IoOperation::Read, &[64]);
        assert_eq!(read.advance(Ok(24)), StepOutcome::Again);
        let StepOutcome::Finished(Err(failure)) = read.advance(Ok(0)) else { panic!("not an end") };
        assert_eq!(failure.reason, IoFailureReason::EndOfFile);
        assert_eq!(failure.offset, ByteCount::new(124));
        assert_eq!(failure.missing(), ByteCount::new(40));

        let mut write = transfer(IoOperation::Write, &[64]);
        let StepOutcome::Finished(Err(failure)) = write.advance(Ok(0)) else {
            panic!("not an end")
        };
        assert_eq!(failure.reason, IoFailureReason::NoProgress);
    }

    #[test]
    fn endless_eagain_is_an_error_in_the_end() {
        let mut read = transfer(IoOperation::Read, &[64]);
        let answers = (0..=MAX_RETRIES).map(|_| read.advance(Err(libc::EAGAIN)));
        let last = answers.last().unwrap();
        assert!(matches!(
            last,
            StepOutcome::Finished(Err(IoFailure {
                reason: IoFailureReason::Os(OsError { code: libc::EAGAIN, .. }),
                ..
            }))
        ));
    }

    #[test]
    fn a_request_that_a_registered_buffer_cannot_serve_is_repeated_without_it() {
        for code in [libc::EFAULT, libc::EINVAL, libc::EOPNOTSUPP] {
            let mut read = transfer(IoOperation::Read, &[64]);
            read.registered = Some(3);
            assert_eq!(read.advance(Ok(24)), StepOutcome::Again);
            assert_eq!((read.advance(Err(code)), read.registered), (StepOutcome::Again, None));
            assert!(matches!(read.advance(Err(code)), StepOutcome::Finished(Err(_))));
        }
    }

    #[test]
    fn a_stop_is_reported_as_its_cause_and_only_if_bytes_are_missing() {
        let mut read = transfer(IoOperation::Read, &[64]);
        read.stop = Some(StopReason::Deadline);
        let StepOutcome::Finished(Err(failure)) = read.advance(Err(libc::ECANCELED)) else {
            panic!("not an end")
        };
        assert_eq!(failure.reason, IoFailureReason::DeadlineExceeded);
        assert_eq!(read.advance(Ok(64)), StepOutcome::Finished(Ok(())));
    }

    #[test]
    fn offsets_beyond_the_kernels_are_refused() {
        let buffers = buffers(&[u64::MAX, 1]);
        let request = IoRequest::read(1, FILE, ByteCount::ZERO, &buffers);
        assert!(Transfer::new(&request, Vectors::default()).is_err());
        let request = IoRequest::read(1, FILE, ByteCount::new(i64::MAX as u64), &buffers[1..]);
        assert!(matches!(
            Transfer::new(&request, Vectors::default()),
            Err(StorageError::OffsetOutOfRange { .. })
        ));
    }
}

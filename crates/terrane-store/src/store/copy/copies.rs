//! Copies of host memory on the thread of a job's task.

use std::iter::Copied;
use std::ptr;
use std::slice::Iter;

use terrane_core::ByteCount;
use terrane_storage::IoBuffer;

use crate::store::job::control::JobControl;
use crate::store::job::executor::yield_now;
use crate::store::job::result::BlockResult;

/// The most bytes that are copied at once on the thread of a caller or of the store: 20
/// microseconds or less.
pub(crate) const COPY_BYTES_AT_ONCE: u64 = 256 << 10;

/// Copies that the task of a job does itself. It yields to other tasks after each
/// [`COPY_BYTES_AT_ONCE`] bytes.
pub(crate) struct YieldingCopies<'a> {
    control: &'a JobControl,
    /// The bytes to copy before the next yield.
    left: u64,
    /// Set once the job was found stopped: the result of all later blocks.
    stopped: Option<BlockResult>,
}

impl<'a> YieldingCopies<'a> {
    pub(crate) const fn new(control: &'a JobControl) -> Self {
        Self { control, left: COPY_BYTES_AT_ONCE, stopped: None }
    }

    /// Copies the bytes of `from` to `to`, until one of them has no more. Fails if the job is
    /// stopped before the end. `to` may then be written in part.
    ///
    /// # Safety
    ///
    /// As for [`copy`], until the future has ended or dropped.
    #[expect(unsafe_code, reason = "the memory is named by addresses")]
    pub(crate) async unsafe fn copy(
        &mut self,
        from: &[IoBuffer],
        to: &[IoBuffer],
    ) -> Result<(), BlockResult> {
        let mut ends = CopyEnds::new(from, to);
        while !ends.is_done() {
            if self.left == 0 {
                self.yield_to_tasks().await?;
            }
            // SAFETY: the caller keeps the contract of the call.
            self.left -= unsafe { ends.copy(self.left) };
        }
        Ok(())
    }

    /// Lets other tasks run. Fails if the job is stopped by then.
    async fn yield_to_tasks(&mut self) -> Result<(), BlockResult> {
        if self.stopped.is_none() {
            yield_now().await;
            self.stopped = self.control.stopped();
        }
        if let Some(stopped) = &self.stopped {
            return Err(stopped.clone());
        }
        self.left = COPY_BYTES_AT_ONCE;
        Ok(())
    }
}

/// Copies the bytes of `from` to `to`, until one of them has no more.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes. No other code writes `from`, or uses `to`, during
/// the call.
#[expect(unsafe_code, reason = "the memory is named by addresses")]
pub(crate) unsafe fn copy(from: &[IoBuffer], to: &[IoBuffer]) {
    let mut ends = CopyEnds::new(from, to);
    while !ends.is_done() {
        // SAFETY: the caller keeps the contract of the call.
        unsafe { ends.copy(u64::MAX) };
    }
}

/// The bytes of a copy that are left, at both ends.
struct CopyEnds<'a> {
    sources: Copied<Iter<'a, IoBuffer>>,
    destinations: Copied<Iter<'a, IoBuffer>>,
    source: Option<IoBuffer>,
    destination: Option<IoBuffer>,
}

impl<'a> CopyEnds<'a> {
    fn new(from: &'a [IoBuffer], to: &'a [IoBuffer]) -> Self {
        let (mut sources, mut destinations) = (from.iter().copied(), to.iter().copied());
        let (source, destination) = (sources.next(), destinations.next());
        Self { sources, destinations, source, destination }
    }

    const fn is_done(&self) -> bool {
        self.source.is_none() || self.destination.is_none()
    }

    /// Copies the next bytes, at most `most`, from one span to one span. Returns their number.
    ///
    /// # Safety
    ///
    /// As for [`copy`].
    #[expect(unsafe_code, reason = "the memory is named by addresses")]
    unsafe fn copy(&mut self, most: u64) -> u64 {
        let (Some(read), Some(write)) = (self.source, self.destination) else { return 0 };
        let bytes = read.length.min(write.length).min(ByteCount::new(most));
        // SAFETY: both are valid for so many bytes, as the caller promises. `ptr::copy` allows an
        // overlap.
        unsafe { ptr::copy(read.address.as_ptr(), write.address.as_ptr(), bytes.to_usize()) };
        self.source = rest(read, bytes).or_else(|| self.sources.next());
        self.destination = rest(write, bytes).or_else(|| self.destinations.next());
        bytes.get()
    }
}

/// The part of a span behind its first bytes; `None` if there is no such part.
fn rest(span: IoBuffer, bytes: ByteCount) -> Option<IoBuffer> {
    let length = span.length.checked_sub(bytes).filter(|length| !length.is_zero())?;
    let address = span.address.checked_add(bytes)?;
    Some(IoBuffer { address, length })
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};
    use std::time::Instant;

    use terrane_core::HostAddress;

    use super::*;
    use crate::store::job::Job;
    use crate::store::job::blocks::{Blocks, Spans};
    use crate::store::job::options::JobOptions;
    use crate::store::job::request::{Keys, Payload, PayloadUse};
    use crate::store::job::task::{JobTask, begin};
    use crate::store::open::builder::BlockGroup;
    use crate::store::shared::JobOrigin;
    use crate::store::{Store, get, put};

    /// The task yields twice in it.
    const BLOCK: usize = 512 << 10;
    const KEYS: [&str; 4] = ["a", "b", "c", "d"];

    /// A future that the test polls itself.
    type Polled<'a> = Pin<&'a mut dyn Future<Output = Vec<BlockResult>>>;

    fn store() -> Store {
        let group = BlockGroup::new("kv", 512 << 10);
        Store::builder().group(group).host(ByteCount::mib(4)).open().unwrap().0
    }

    fn payload(store: &Store, memory: &mut [u8], usage: PayloadUse) -> Arc<Payload> {
        let mut spans = Spans::new();
        for block in memory.chunks_mut(BLOCK) {
            spans.add(NonNull::from(&mut *block).cast(), block.len());
        }
        // SAFETY: the memory outlives the task, and nothing else uses it until then.
        #[expect(unsafe_code, reason = "the memory is named by addresses")]
        let blocks = unsafe { Blocks::spans(spans) };
        Arc::new(Payload::new(store.core(), 0, (KEYS.len(), blocks), usage).unwrap())
    }

    /// Runs a put or get, and cancels it after so many polls. Returns the number of polls and the results.
    fn run(
        store: &Store,
        (memory, usage): (&mut [u8], PayloadUse),
        most: usize,
    ) -> (usize, Vec<BlockResult>) {
        let core = store.core();
        let payload = payload(store, memory, usage);
        let keys = Keys::new(core, 0, &KEYS).unwrap();
        let (job, task, end) =
            begin(core, JobOrigin::Caller, JobOptions::new(), KEYS.len()).unwrap();
        let polled = match usage {
            PayloadUse::Source => {
                let in_flight = core.removed_keys.begin_put();
                poll(pin!(put::run(&task, &keys, payload, in_flight)), &job, most)
            }
            PayloadUse::Destination => poll(pin!(get::run(&task, &keys, &payload)), &job, most),
        };
        drop::<JobTask>(task);
        end.finish(Vec::new());
        polled
    }

    fn poll(mut task: Polled<'_>, job: &Job, most: usize) -> (usize, Vec<BlockResult>) {
        let mut context = Context::from_waker(Waker::noop());
        for polls in 1.. {
            if let Poll::Ready(results) = task.as_mut().poll(&mut context) {
                return (polls, results);
            }
            if polls == most {
                job.cancel();
            }
        }
        unreachable!("it is polled to its end")
    }

    #[test]
    fn a_large_put_and_get_yield_to_other_tasks() {
        let store = store();
        let (mut source, mut destination) = (vec![7; 4 * BLOCK], vec![0; 4 * BLOCK]);
        for (memory, usage) in
            [(&mut source, PayloadUse::Source), (&mut destination, PayloadUse::Destination)]
        {
            let (polls, results) = run(&store, (memory, usage), usize::MAX);
            // The task moves to the store's thread, and copies eight times 256 KiB.
            assert_eq!((polls, results.iter().all(BlockResult::is_ok)), (9, true), "{results:?}");
        }
        assert!(source == destination);
        assert_eq!(store.close(Instant::now()).left, 0);
    }

    #[test]
    fn a_job_that_is_cancelled_at_a_yield_keeps_the_blocks_that_are_done() {
        use BlockResult::{Cancelled, Done};
        for polls in [3, 4] {
            let store = store();
            let mut source = vec![7; 4 * BLOCK];
            let (_, results) = run(&store, (&mut source, PayloadUse::Source), polls);
            assert!(
                matches!(results[..], [Done { .. }, Cancelled, Cancelled, Cancelled]),
                "{results:?}"
            );
            let group = store.snapshot().tiers[0].groups[0];
            assert_eq!((store.prefix(0, &KEYS), group.blocks, group.in_use), (1, 1, 0));
            assert!(run(&store, (&mut source, PayloadUse::Source), usize::MAX).0 > polls);
            let mut destination = vec![0; 4 * BLOCK];
            let (_, results) = run(&store, (&mut destination, PayloadUse::Destination), polls);
            assert!(
                matches!(results[..], [Done { .. }, Cancelled, Cancelled, Cancelled]),
                "{results:?}"
            );
            assert!(destination[..BLOCK] == source[..BLOCK]);
            assert!(destination[2 * BLOCK..].iter().all(|&byte| byte == 0));
            assert_eq!(store.close(Instant::now()).left, 0);
        }
    }

    #[test]
    #[expect(unsafe_code, reason = "the memory is named by addresses")]
    fn spans_of_other_lengths_are_copied_in_order() {
        let from: Vec<u8> = (0..30).collect();
        let mut to = [0xff_u8; 40];
        let span = |bytes: &[u8]| IoBuffer {
            address: HostAddress::new(NonNull::from(bytes).cast::<u8>()),
            length: ByteCount::from_usize(bytes.len()),
        };
        let sources = [span(&from[..7]), span(&from[7..9]), span(&from[9..])];
        let base = NonNull::from(&mut to[..]).cast::<u8>();
        let at = |offset: u64, bytes: u64| IoBuffer {
            address: HostAddress::new(base).checked_add(ByteCount::new(offset)).unwrap(),
            length: ByteCount::new(bytes),
        };
        let destinations = [at(0, 1), at(5, 20), at(28, 9)];
        // SAFETY: `from` and `to` are live, and all spans are within them.
        unsafe { copy(&sources, &destinations) };
        assert_eq!(to[0], 0);
        assert_eq!(to[5..25], from[1..21]);
        assert_eq!(to[28..37], from[21..]);
        assert!([&to[1..5], &to[25..28], &to[37..]].concat().iter().all(|&byte| byte == 0xff));
    }
}

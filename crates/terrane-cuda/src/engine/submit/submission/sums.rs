//! The submission of a job's checksums: beside the copy, on a separate stream.

use terrane_transfer::Side;

use crate::engine::resources::job_streams::JobStreams;
use crate::engine::shared::Shared;
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;
use crate::runtime::event::Event;
use crate::runtime::stream::Stream;

/// The stream of a job's checksums: a separate one, if the job has it. Otherwise the sums of a
/// source follow the first chunk on the first stream. Those of a destination follow each chunk on
/// its stream, `at`.
fn stream_of(streams: &JobStreams, side: Side, at: usize) -> Option<&Stream> {
    let own = streams.sums_stream();
    let at = if side == Side::Source { 0 } else { at };
    own.or(streams.get(at)).map(|stream| &**stream)
}

impl Submission {
    /// Whether no memory must be allocated for checksums.
    pub(crate) fn has_room_for_sums(&mut self, shared: &Shared) -> bool {
        self.sums.as_mut().is_none_or(|sums| sums.has_room(&shared.lists))
    }

    /// Submits the sums of the pairs that a chunk has completed. They follow the chunk, so that the
    /// copy does not wait for them. `at` is the stream with the last work of the chunk, and `event`
    /// is recorded behind that work. After the last chunk, the stream waits for all sums. Returns
    /// whether it does.
    ///
    /// # Errors
    ///
    /// The driver's, [`CudaError::NoMemoryForChecksums`].
    #[inline(never)]
    pub(super) fn continue_sums(
        &mut self,
        shared: &Shared,
        at: usize,
        event: &Event,
    ) -> Result<bool, CudaError> {
        let is_last = self.is_submitted();
        self.begin_sums(shared, at)?;
        let Some(sums) = &mut self.sums else { return Ok(false) };
        let stream = stream_of(&self.streams, sums.side(), at);
        let (Some(stream), Some(copies)) = (stream, self.streams.get(at)) else {
            return Ok(false);
        };
        let is_apart = stream.raw() != copies.raw();
        if sums.side() == Side::Destination {
            let all = self.job.plan().bytes().get();
            let complete = sums.complete(if is_last { all } else { self.submitted }, all);
            if let Some(kernels) = self.kernels.as_ref().filter(|_| sums.is_behind(complete)) {
                if is_apart {
                    stream.wait_for(event)?;
                }
                let limits = sums.limits();
                let ctas = if is_last { limits.alone } else { limits.beside };
                // SAFETY: the stream reaches this after the copies of these pairs. The job keeps the
                // destination alive until then, and its claims exclude other users.
                unsafe { sums.sum(kernels, stream, complete, ctas) }?;
            }
            if is_last {
                sums.fetch(stream)?;
            }
        }
        match sums.fetched().filter(|_| is_last) {
            Some(fetched) if is_apart => copies.wait_for(fetched).map(|()| true),
            fetched => Ok(fetched.is_some()),
        }
    }

    /// Submits the tables, and the sums of a source on the device, unless both are submitted
    /// already.
    fn begin_sums(&mut self, shared: &Shared, at: usize) -> Result<(), CudaError> {
        let Some(sums) = self.sums.as_mut().filter(|sums| !sums.has_begun()) else {
            return Ok(());
        };
        // A job that begins again keeps its stream. Another job's stream is no substitute, because
        // it may wait. A job that waits for its order takes no second stream: half of all streams
        // must remain for jobs that need not wait.
        if !sums.has_stream {
            // A caller's thread submits a whole job, and creates no stream for the sums.
            let idle = match self.is_whole {
                _ if sums.waits => None,
                true => shared.streams.take_ready(),
                false => shared.streams.take_idle()?,
            };
            self.streams.set_sums_stream(idle);
            sums.has_stream = true;
        }
        let Some(stream) = stream_of(&self.streams, sums.side(), at) else { return Ok(()) };
        let [source, destination] = &*self.ends;
        let mapping = if sums.side() == Side::Source { source } else { destination };
        sums.begin(shared, self.job.plan(), mapping, stream)?;
        if sums.side() == Side::Destination {
            return Ok(());
        }
        let ctas = sums.limits().beside;
        let all = sums.complete(u64::MAX, 0);
        let Some(kernels) = &self.kernels else { return Ok(()) };
        // SAFETY: the job's order is satisfied before the stream reaches this, because a job that
        // waits on the device has one stream. The job keeps the source alive until the stream has
        // passed this, and its claims exclude writers.
        unsafe { sums.sum(kernels, stream, all, ctas) }?;
        sums.fetch(stream)
    }
}

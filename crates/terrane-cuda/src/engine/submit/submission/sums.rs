//! When the checksums of a job are submitted: beside the copy, on a stream of their own.

use terrane_transfer::Side;
use terrane_transfer::calibration::Direction;

use crate::engine::shared::Shared;
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;
use crate::runtime::event::Event;

impl Submission {
    /// Whether no memory must be allocated for checksums.
    pub(crate) fn has_room_for_sums(&mut self, shared: &Shared) -> bool {
        self.sums.as_mut().is_none_or(|sums| sums.has_room(&shared.lists))
    }

    /// Submits the sums of what a chunk has completed, after the chunk itself, so that the copy does
    /// not wait for that. `at` is the stream that carries the last work of the chunk. After the last
    /// chunk, that stream waits for all sums.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub(super) fn continue_sums(&mut self, shared: &Shared, at: usize) -> Result<(), CudaError> {
        let is_last = self.is_submitted();
        self.begin_sums(shared)?;
        let Some(sums) = &mut self.sums else { return Ok(()) };
        let (Some(stream), Some(copies)) = (self.streams.of_sums(), self.streams.get(at)) else {
            return Ok(());
        };
        if sums.side() == Side::Destination {
            let all = self.job.plan().bytes().get();
            let complete = sums.complete(if is_last { all } else { self.submitted }, all);
            if let Some(kernels) = self.kernels.as_ref().filter(|_| sums.is_behind(complete)) {
                stream.wait_for(&Event::asked_behind(copies)?)?;
                let few = shared.options.pack_ctas.get();
                let ctas = if is_last { shared.sum_ctas() } else { few };
                // SAFETY: the stream reaches this after the copies of these pairs. The job keeps the
                // destination alive until then, and its claims exclude other users.
                unsafe { sums.sum(kernels, stream, complete, ctas) }?;
            }
            if is_last {
                sums.fetch(stream)?;
            }
        }
        match sums.fetched().filter(|_| is_last) {
            Some(fetched) => copies.wait_for(fetched),
            None => Ok(()),
        }
    }

    /// Submits the tables, and the sums of a source on the device, unless they are submitted.
    fn begin_sums(&mut self, shared: &Shared) -> Result<(), CudaError> {
        let Some(sums) = self.sums.as_mut().filter(|sums| !sums.has_begun()) else {
            return Ok(());
        };
        // A job that begins again keeps its stream. No other job's stream will do: it may wait.
        if !sums.has_stream {
            // A caller's thread submits a whole job, and creates no stream for it.
            let idle = match self.is_whole {
                true => shared.streams.take_ready(),
                false => shared.streams.take_idle()?,
            };
            self.streams.put_of_sums(idle);
            sums.has_stream = true;
        }
        let Some(stream) = self.streams.of_sums() else { return Ok(()) };
        let [source, destination] = &self.ends;
        let mapping = if sums.side() == Side::Source { source } else { destination };
        sums.begin(&shared.lists, self.job.plan(), mapping, stream)?;
        if sums.side() == Side::Destination {
            return Ok(());
        }
        if let Some(order) = &sums.order {
            stream.wait_for(order)?;
        }
        let ctas = match self.direction {
            // More would take multiprocessors from others, while the wire is no faster.
            Direction::ToHost => shared.options.pack_ctas.get(),
            _ => shared.sum_ctas(),
        };
        let all = sums.complete(u64::MAX, 0);
        let Some(kernels) = &self.kernels else { return Ok(()) };
        // SAFETY: the job's order is satisfied before the stream reaches this. The job keeps the
        // source alive until the stream has passed it, and its claims exclude writers.
        unsafe { sums.sum(kernels, stream, all, ctas) }?;
        sums.fetch(stream)
    }
}

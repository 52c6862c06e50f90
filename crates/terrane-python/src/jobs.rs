//! The options of jobs, from Python's keyword arguments.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use terrane_store::{CompletionQueue as NativeQueue, JobOptions, JobOutcome};

use crate::errors;
use crate::memory::Blocks;
use crate::numbers::deadline;
use crate::outcome::priority;
use crate::queue::CompletionQueue;

/// The options of a job, and its queue.
pub(crate) struct Submission {
    pub(crate) options: JobOptions,
    /// The queue of this job alone, if the caller passed none.
    pub(crate) own: Option<NativeQueue<JobOutcome>>,
}

/// The options of a job, from Python's keyword arguments.
struct Choices<'py> {
    group: u16,
    priority: String,
    timeout: Option<f64>,
    queue: Option<Bound<'py, CompletionQueue>>,
    tag: u64,
    durable: bool,
    stream: Option<i64>,
    layer_by_layer: bool,
}

/// The caller's blocks of a job.
#[derive(Clone, Copy)]
pub(crate) enum JobBlocks<'a> {
    None,
    Source(&'a Blocks),
    Destination(&'a Blocks),
}

/// Parses the options, with defaults, from keyword arguments.
fn choices<'py>(keywords: Option<&Bound<'py, PyDict>>) -> PyResult<Choices<'py>> {
    let mut all = Choices {
        group: 0,
        priority: String::from("normal"),
        timeout: None,
        queue: None,
        tag: 0,
        durable: false,
        stream: None,
        layer_by_layer: false,
    };
    for (name, value) in keywords.into_iter().flatten() {
        match name.extract::<String>()?.as_str() {
            "group" => all.group = value.extract()?,
            "priority" => all.priority = value.extract()?,
            "timeout" => all.timeout = value.extract()?,
            "queue" => all.queue = value.extract()?,
            "tag" => all.tag = value.extract()?,
            "durable" => all.durable = value.extract()?,
            "stream" => all.stream = value.extract()?,
            "layer_by_layer" => all.layer_by_layer = value.extract()?,
            other => {
                return Err(PyTypeError::new_err(format!(
                    "a job has no option {other:?}; there are group, priority, timeout, queue, tag, durable, stream and layer_by_layer"
                )));
            }
        }
    }
    Ok(all)
}

/// The options of a job on these blocks, or of a job without blocks.
pub(crate) fn submission(
    py: Python<'_>,
    keywords: Option<&Bound<'_, PyDict>>,
    blocks: JobBlocks<'_>,
) -> PyResult<Submission> {
    let choices = choices(keywords)?;
    if choices.layer_by_layer && !matches!(blocks, JobBlocks::Destination(_)) {
        return Err(PyTypeError::new_err(
            "only a get copies layer by layer; leave out layer_by_layer=",
        ));
    }
    let blocks = match blocks {
        JobBlocks::None => None,
        JobBlocks::Source(blocks) | JobBlocks::Destination(blocks) => Some(blocks),
    };
    if blocks.is_none() && choices.stream.is_some() {
        return Err(PyTypeError::new_err(
            "a job without blocks of the caller follows no stream; leave out stream=",
        ));
    }
    let mut options = JobOptions::new()
        .group(choices.group)
        .priority(priority(&choices.priority)?)
        .durable(choices.durable);
    if let Some(deadline) = deadline(choices.timeout)? {
        options = options.deadline(deadline);
    }
    if choices.layer_by_layer {
        options = options.layer_by_layer();
    }
    if let Some(order) =
        blocks.map(|blocks| blocks.order(py, choices.stream)).transpose()?.flatten()
    {
        options = options.device_order(order);
    }
    if let Some(queue) = choices.queue {
        let options = options.queue(queue.get().native()?, choices.tag);
        return Ok(Submission { options, own: None });
    }
    let own = NativeQueue::new(1).map_err(|error| errors::queue(&error))?;
    Ok(Submission { options: options.queue(&own, choices.tag), own: Some(own) })
}

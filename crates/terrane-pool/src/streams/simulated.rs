//! The simulated streams of the testkit, compiled against this build. Those of the testkit itself
//! implement the traits of the library that other crates use, and not the traits of a test build.

use super::fence::{Fence, FenceError, FenceSource, StreamId};

#[path = "../../../terrane-testkit/src/simulated/streams.rs"]
mod streams;

pub(crate) use streams::SimulatedStreams;

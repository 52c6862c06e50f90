//! Device memory that is allocated and freed in the order of a stream: a pool's hit, compared with
//! the driver's stream-ordered allocation.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::{ByteCount, RegionRequest};
use terrane_cuda::{CudaStreams, Stream};
use terrane_pool::{Fence, FenceError, FenceSource, Pool, PoolOptions};

use crate::setup::{Setup, interleaved};

/// The minimum speedup of a hit over the driver's two calls.
const LEAST_TIMES: f64 = 10.0;

/// The number of pairs of allocation and release in one measured call.
const PAIRS: u32 = 1000;

/// Counts the fences that it creates. Each of them has an event.
#[derive(Debug)]
struct Counted {
    streams: CudaStreams,
    made: AtomicU64,
}

impl FenceSource for Counted {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        self.made.fetch_add(1, Ordering::Relaxed);
        FenceSource::create(&self.streams)
    }
}

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    for bytes in [ByteCount::kib(64), ByteCount::mib(2), ByteCount::mib(64)] {
        let case = format!("pool hit on a stream, {bytes}");
        let eventless = format!("{case}, hits that made no event");
        if !reporter.wants(&case) && !reporter.wants(&eventless) {
            continue;
        }
        let streams = CudaStreams::new(&setup.context);
        let stream = streams.add(Stream::new(&setup.context)?)?;
        let fences = Arc::new(Counted { streams, made: AtomicU64::new(0) });
        let pool = Pool::with_fences(
            setup.device.clone(),
            PoolOptions::default(),
            Arc::clone(&fences) as _,
        )?;
        let request = RegionRequest::new(bytes);
        setup.bindings.keep_default_pool()?;
        // The first allocation is a miss.
        drop(pool.allocate_on(stream, &request)?);
        let before = fences.made.load(Ordering::Relaxed);
        let spreads = interleaved(
            settings,
            &mut [
                &mut || {
                    for _ in 0..PAIRS {
                        drop(pool.allocate_on(stream, &request)?);
                    }
                    Ok(())
                },
                &mut || {
                    for _ in 0..PAIRS {
                        setup.bindings.allocate_and_free(&setup.stream, bytes)?;
                    }
                    Ok(())
                },
                &mut || Ok(setup.stream.synchronize()?),
            ],
        )?;
        let [terrane, driver, _] = spreads.as_slice() else { return Ok(()) };
        let nanoseconds = |spread: Spread| spread.scaled(1e9 / f64::from(PAIRS));
        let lower = Direction::LowerIsBetter;
        let measured = Measurement::new(case, nanoseconds(*terrane), "ns", lower)
            .with_baseline("cuMemAllocAsync and cuMemFreeAsync", nanoseconds(*driver).median)
            .at_least(LEAST_TIMES);
        reporter.report(&measured)?;
        let hits = f64::from(PAIRS) * f64::from(settings.warm_up + settings.repeats.max(1));
        let made = fences.made.load(Ordering::Relaxed) - before;
        let share = Spread::single((hits - made as f64) / hits * 100.0);
        let measured = Measurement::new(eventless, share, "%", Direction::HigherIsBetter);
        reporter.report(&measured.within(100.0))?;
    }
    Ok(())
}

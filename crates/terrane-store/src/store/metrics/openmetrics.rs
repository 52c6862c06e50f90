//! The numbers of a store as OpenMetrics text.

use std::fmt::{Result, Write};

use terrane_core::convert::to_u64;
use terrane_core::metrics::{HistogramSnapshot, OpenMetrics, Unit};

use crate::store::metrics::snapshot::{GroupSnapshot, Misses, StoreSnapshot, TierSnapshot};

type TierCounter = (&'static str, Unit, &'static str, fn(&TierSnapshot) -> u64);

pub(super) const TIER_COUNTERS: [TierCounter; 8] = [
    ("terrane_store_tier_hits", Unit::None, "Keys that gets found in the tier.", |tier| tier.hits),
    ("terrane_store_tier_stored", Unit::None, "Blocks stored in the tier.", |tier| tier.stored),
    ("terrane_store_tier_evictions", Unit::None, "Blocks evicted from the tier.", |tier| {
        tier.evictions
    }),
    ("terrane_store_tier_read", Unit::Bytes, "Bytes read from the tier.", |tier| tier.read_bytes),
    ("terrane_store_tier_written", Unit::Bytes, "Bytes written to the tier.", |tier| {
        tier.written_bytes
    }),
    ("terrane_store_tier_read_failures", Unit::None, "Blocks that could not be read.", |tier| {
        tier.read_failures
    }),
    (
        "terrane_store_tier_write_failures",
        Unit::None,
        "Blocks that could not be written.",
        |tier| tier.write_failures,
    ),
    ("terrane_store_tier_requests", Unit::None, "Requests to the device.", |tier| tier.requests),
];

type TierTimes = (&'static str, &'static str, fn(&TierSnapshot) -> &HistogramSnapshot);

pub(super) const TIER_TIMES: [TierTimes; 2] = [
    ("terrane_store_get_duration", "Time until a get had a block, by its tier.", |tier| {
        &tier.get_times
    }),
    ("terrane_store_put_duration", "Time until the tier had the block of a put.", |tier| {
        &tier.put_times
    }),
];

type GroupGauge = (&'static str, &'static str, fn(&GroupSnapshot) -> usize);

pub(super) const GROUP_GAUGES: [GroupGauge; 7] = [
    ("terrane_store_tier_slots", "Slots of the group.", |group| group.slots),
    ("terrane_store_tier_blocks", "Blocks in the tier.", |group| group.blocks),
    ("terrane_store_tier_free", "Slots without a block.", |group| group.free),
    ("terrane_store_tier_in_use", "Slots that jobs fill or keep.", |group| group.in_use),
    ("terrane_store_tier_quarantined", "Slots that damage blocks.", |group| group.quarantined),
    ("terrane_store_tier_pinned", "Blocks that leases pin.", |group| group.pinned),
    ("terrane_store_tier_dirty", "Blocks that were not written to a slower tier.", |group| {
        group.dirty
    }),
];

type JobNumber = (&'static str, &'static str, fn(&StoreSnapshot) -> u64);

pub(super) const JOB_COUNTERS: [JobNumber; 6] = [
    ("terrane_store_jobs", "Jobs that ended.", |store| store.ended_jobs),
    ("terrane_store_jobs_refused", "Jobs that were refused.", |store| store.refused_jobs),
    ("terrane_store_already_stored", "Keys that puts found stored.", |store| store.already_stored),
    ("terrane_store_timed_out", "Blocks of jobs that timed out.", |store| store.timed_out),
    ("terrane_store_cancelled", "Blocks of cancelled jobs.", |store| store.cancelled),
    ("terrane_store_failed", "Blocks of jobs that failed.", |store| store.failed),
];

pub(super) const JOB_GAUGES: [JobNumber; 2] = [
    ("terrane_store_jobs_running", "Jobs that run.", |store| to_u64(store.running_jobs)),
    ("terrane_store_jobs_waiting_for_room", "Jobs that wait.", |store| {
        to_u64(store.jobs_waiting_for_room)
    }),
];

/// The misses, by the value of their label `reason`.
pub(super) const fn misses(misses: &Misses) -> [(&'static str, u64); 5] {
    [
        ("absent", misses.absent),
        ("writing", misses.writing),
        ("corrupt", misses.corrupt),
        ("evicted", misses.evicted),
        ("wrong_length", misses.wrong_length),
    ]
}

impl StoreSnapshot {
    /// Writes the numbers as OpenMetrics text.
    ///
    /// # Errors
    ///
    /// Returns the error of `out`.
    pub fn write_openmetrics(&self, out: &mut impl Write) -> Result {
        let mut metrics = OpenMetrics::new(out);
        self.write_families(&mut metrics)?;
        metrics.finish()
    }

    /// Writes the numbers without the end mark, for a text that has those of other parts too.
    ///
    /// # Errors
    ///
    /// Returns the error of the writer.
    pub fn write_families(&self, out: &mut OpenMetrics<'_, impl Write>) -> Result {
        let tiers = &self.tiers;
        for (name, unit, help, value) in TIER_COUNTERS {
            let mut family = out.counter(name, unit, help)?;
            tiers
                .iter()
                .try_for_each(|tier| family.sample(&[("tier", &tier.name)], value(tier)))?;
        }
        let help = "Bytes of all slots of the tier.";
        let mut family = out.gauge("terrane_store_tier_capacity", Unit::Bytes, help)?;
        for tier in tiers {
            family.sample(&[("tier", &tier.name)], tier.capacity.get())?;
        }
        for (name, help, value) in TIER_TIMES {
            let mut family = out.histogram(name, Unit::Seconds, help)?;
            for tier in tiers {
                family.distribution(&[("tier", &tier.name)], value(tier))?;
            }
        }
        let help = "Blocks that wait for the device or are in it.";
        let mut family = out.gauge("terrane_store_tier_queued", Unit::None, help)?;
        for tier in tiers.iter().filter(|tier| tier.is_disk) {
            for (direction, count) in [("read", tier.reads_queued), ("write", tier.writes_queued)] {
                family.sample(&[("tier", &tier.name), ("direction", direction)], count)?;
            }
        }
        for (name, help, value) in GROUP_GAUGES {
            let mut family = out.gauge(name, Unit::None, help)?;
            for tier in tiers {
                for (number, group) in tier.groups.iter().enumerate() {
                    let labels = [("tier", tier.name.as_str()), ("group", &number.to_string())];
                    family.sample(&labels, to_u64(value(group)))?;
                }
            }
        }
        write_jobs(self, out)
    }
}

fn write_jobs(snapshot: &StoreSnapshot, out: &mut OpenMetrics<'_, impl Write>) -> Result {
    let help = "Keys that gets did not find, by the reason.";
    let mut family = out.counter("terrane_store_misses", Unit::None, help)?;
    for (reason, count) in misses(&snapshot.misses) {
        family.sample(&[("reason", reason)], count)?;
    }
    for (name, help, value) in JOB_COUNTERS {
        out.counter(name, Unit::None, help)?.sample(&[], value(snapshot))?;
    }
    let help = "The time of all ended jobs together.";
    let family = out.counter("terrane_store_job", Unit::Seconds, help);
    family?.sample(&[], snapshot.job_times.sum())?;
    let help = "Time from the submission of a job to its end.";
    out.histogram("terrane_store_job_duration", Unit::Seconds, help)?
        .distribution(&[], &snapshot.job_times)?;
    for (name, help, value) in JOB_GAUGES {
        out.gauge(name, Unit::None, help)?.sample(&[], value(snapshot))?;
    }
    match &snapshot.transfers {
        Some(transfers) => transfers.write_families(out),
        None => Ok(()),
    }
}

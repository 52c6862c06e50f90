//! The numbers of a store as OpenMetrics text.

use std::fmt::{Result, Write};

use crate::store::snapshot::{GroupSnapshot, StoreSnapshot, TierSnapshot};

pub(crate) fn write(snapshot: &StoreSnapshot, out: &mut impl Write) -> Result {
    let tiers = &snapshot.tiers;
    tier_counter(out, tiers, ("hits", "Keys that gets found in the tier."), |tier| tier.hits)?;
    tier_counter(out, tiers, ("stored", "Blocks stored in the tier."), |tier| tier.stored)?;
    tier_counter(out, tiers, ("evictions", "Blocks evicted from the tier."), |tier| {
        tier.evictions
    })?;
    tier_counter(out, tiers, ("read_bytes", "Bytes read from the tier."), |tier| tier.read_bytes)?;
    tier_counter(out, tiers, ("written_bytes", "Bytes written to the tier."), |tier| {
        tier.written_bytes
    })?;
    gauge(out, "tier_capacity_bytes", "Bytes of all slots of the tier.")?;
    for tier in tiers {
        writeln!(
            out,
            "terrane_store_tier_capacity_bytes{{tier=\"{}\"}} {}",
            Label(&tier.name),
            tier.capacity.get()
        )?;
    }
    group_gauge(out, tiers, ("slots", "Slots of the group."), |group| group.slots)?;
    group_gauge(out, tiers, ("blocks", "Blocks in the tier."), |group| group.blocks)?;
    group_gauge(out, tiers, ("free", "Slots without a block."), |group| group.free)?;
    group_gauge(out, tiers, ("pinned", "Blocks that leases pin."), |group| group.pinned)?;
    group_gauge(out, tiers, ("dirty", "Blocks that no slower tier has."), |group| group.dirty)?;
    let misses = &snapshot.misses;
    counter(out, "misses", "Keys that gets did not find, by the reason.")?;
    for (reason, count) in [
        ("absent", misses.absent),
        ("writing", misses.writing),
        ("corrupt", misses.corrupt),
        ("evicted", misses.evicted),
        ("wrong_length", misses.wrong_length),
    ] {
        writeln!(out, "terrane_store_misses_total{{reason=\"{reason}\"}} {count}")?;
    }
    for (name, help, count) in [
        ("jobs", "Jobs that ended.", snapshot.ended_jobs),
        ("jobs_refused", "Jobs that were refused.", snapshot.refused_jobs),
        ("already_stored", "Keys that puts found in the store.", snapshot.already_stored),
        ("timed_out", "Blocks of jobs that timed out.", snapshot.timed_out),
        ("cancelled", "Blocks of jobs that were cancelled.", snapshot.cancelled),
        ("failed", "Blocks of jobs that failed.", snapshot.failed),
    ] {
        counter(out, name, help)?;
        writeln!(out, "terrane_store_{name}_total {count}")?;
    }
    counter(out, "job_seconds", "The time of all ended jobs together.")?;
    writeln!(out, "terrane_store_job_seconds_total {}", snapshot.job_time.as_secs_f64())?;
    gauge(out, "jobs_running", "Jobs that run.")?;
    writeln!(out, "terrane_store_jobs_running {}", snapshot.running_jobs)?;
    gauge(out, "jobs_waiting_for_room", "Jobs that wait for slots.")?;
    writeln!(out, "terrane_store_jobs_waiting_for_room {}", snapshot.jobs_waiting_for_room)?;
    writeln!(out, "# EOF")
}

fn counter(out: &mut impl Write, name: &str, help: &str) -> Result {
    writeln!(out, "# TYPE terrane_store_{name} counter")?;
    writeln!(out, "# HELP terrane_store_{name} {help}")
}

fn gauge(out: &mut impl Write, name: &str, help: &str) -> Result {
    writeln!(out, "# TYPE terrane_store_{name} gauge")?;
    writeln!(out, "# HELP terrane_store_{name} {help}")
}

fn tier_counter(
    out: &mut impl Write,
    tiers: &[TierSnapshot],
    (name, help): (&str, &str),
    count: impl Fn(&TierSnapshot) -> u64,
) -> Result {
    counter(out, &format!("tier_{name}"), help)?;
    tiers.iter().try_for_each(|tier| {
        let (label, count) = (Label(&tier.name), count(tier));
        writeln!(out, "terrane_store_tier_{name}_total{{tier=\"{label}\"}} {count}")
    })
}

fn group_gauge(
    out: &mut impl Write,
    tiers: &[TierSnapshot],
    (name, help): (&str, &str),
    count: impl Fn(&GroupSnapshot) -> usize,
) -> Result {
    gauge(out, &format!("tier_{name}"), help)?;
    for tier in tiers {
        for (number, group) in tier.groups.iter().enumerate() {
            let (label, count) = (Label(&tier.name), count(group));
            writeln!(
                out,
                "terrane_store_tier_{name}{{tier=\"{label}\",group=\"{number}\"}} {count}"
            )?;
        }
    }
    Ok(())
}

/// The value of a label, escaped.
struct Label<'a>(&'a str);

impl std::fmt::Display for Label<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> Result {
        self.0.chars().try_for_each(|character| match character {
            '"' => f.write_str("\\\""),
            '\\' => f.write_str("\\\\"),
            '\n' => f.write_str("\\n"),
            other => f.write_char(other),
        })
    }
}

//! The turns of the conversations.

use std::error::Error;
use std::ops::Range;
use std::time::{Duration, Instant};

use terrane::store::{BlockResult, Blocks, JobOptions, Presence, Priority, Store, TierId};

use crate::Options;
use crate::engine::Engine;
use crate::report::TurnReport;

/// Runs some turns. Turn n belongs to session n modulo the number of sessions.
pub(crate) fn run(
    options: &Options,
    (store, engine): (&Store, &Engine),
    turns: Range<u32>,
    mut report: impl FnMut(TurnReport) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    for number in turns {
        let keys = keys_of(options, number);
        let mut turn = TurnReport { number, blocks: keys.len(), ..TurnReport::default() };
        // The lease prevents the eviction of the hits until they have been read.
        let lease = store.acquire(0, &keys, Duration::from_secs(60));
        let hits = lease.prefix();
        let (known, new) = keys.split_at(hits);
        let tiers = lease.presence().iter().map(|presence| match presence {
            Presence::Ready { tier, .. } | Presence::Loading { tier, .. } => Some(*tier),
            _ => None,
        });
        let tiers: Vec<Option<TierId>> = tiers.take(hits).collect();
        for (id, _) in (0..).zip(known) {
            engine.wipe(id)?;
        }
        for tier in [0, 1] {
            let of_tier: Vec<(u32, &String)> = (0..)
                .zip(known)
                .zip(&tiers)
                .filter(|(_, found)| **found == Some(TierId::new(tier)))
                .map(|(block, _)| block)
                .collect();
            load(&of_tier, (store, engine), tier, &mut turn)?;
        }
        drop(lease);
        for (id, key) in (0..).zip(known) {
            if !engine.is_right(id, key)? {
                return Err(format!("block {key} was loaded with wrong bytes").into());
            }
            turn.verified += 1;
        }
        // Load the next session's blocks into host memory during the computation of this one.
        let next = keys_of(options, number + 1);
        let prefetch = JobOptions::new().priority(Priority::Low);
        let prefetch = store.promote(&next, TierId::new(0), prefetch)?;
        let ids: Vec<u32> = (u32::try_from(hits)?..).take(new.len()).collect();
        for (id, key) in ids.iter().zip(new) {
            engine.compute(*id, key)?;
        }
        let begun = Instant::now();
        let source = Blocks::new(engine.endpoint(), &ids);
        let outcome = store.put(new, source, JobOptions::new(), ())?.wait();
        turn.put_seconds = begun.elapsed().as_secs_f64();
        turn.put_bytes = outcome.bytes.get();
        if let Some(failed) = outcome.results.iter().find(|result| !result.is_ok()) {
            return Err(format!("a put ended with: {failed}").into());
        }
        drop(prefetch.wait());
        report(turn)?;
    }
    Ok(())
}

/// Loads blocks of one tier into the engine's cache.
fn load(
    blocks: &[(u32, &String)],
    (store, engine): (&Store, &Engine),
    tier: u8,
    turn: &mut TurnReport,
) -> Result<(), Box<dyn Error>> {
    if blocks.is_empty() {
        return Ok(());
    }
    let (ids, keys): (Vec<u32>, Vec<&String>) = blocks.iter().copied().unzip();
    let begun = Instant::now();
    let destination = Blocks::new(engine.endpoint(), &ids);
    let options = JobOptions::new().priority(Priority::High);
    let outcome = store.get(&keys, destination, options, ())?.wait();
    let seconds = begun.elapsed().as_secs_f64();
    for (key, result) in keys.iter().zip(&outcome.results) {
        if !matches!(result, BlockResult::Done { .. }) {
            return Err(format!("block {key} was pinned, and its get ended with: {result}").into());
        }
    }
    let from = if tier == 0 { &mut turn.host } else { &mut turn.disk };
    from.blocks += ids.len();
    from.bytes += outcome.bytes.get();
    from.seconds += seconds;
    Ok(())
}

/// The keys of the prompt of a turn: the system prompt, and the earlier turns of the session.
fn keys_of(options: &Options, number: u32) -> Vec<String> {
    let (session, turn) = (number % options.sessions, number / options.sessions);
    let shared = (0..options.shared).map(|block| format!("system {block}"));
    let own = (0..(turn.min(options.turns - 1) + 1) * options.blocks)
        .map(|block| format!("session {session}, block {block}"));
    shared.chain(own).collect()
}

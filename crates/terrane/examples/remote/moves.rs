//! The blocks of a group of layers that are moved. Both processes compute the same random ids.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use terrane::layout::LayoutConfig;
use terrane::layout::model::CacheGroup;
use terrane::nixl::{NixlEngine, NixlEngineOptions};
use terrane::transfer::{DeviceOrder, Endpoint, Report, Transfer, TransferManager};
use terrane_testkit::pattern::Pattern;
use terrane_testkit::random::Seeded;

use crate::cli::{MemoryTier, Options};
use crate::failure::Failure;
use crate::models::Model;
use crate::tier::LocalAgent;

/// The number of bytes that are moved by default.
const DEFAULT_BYTES: u64 = 128 << 20;
/// A serving engine's allocator returns adjacent blocks as long as possible.
const ADJACENT_BLOCKS: usize = 4;
/// The maximum time that one process waits for the other.
pub const PEER_TIMEOUT: Duration = Duration::from_secs(120);

/// The blocks of one group of layers, and their destinations.
pub struct Move {
    pub name: String,
    /// The model's name and the rank.
    pub model: String,
    pub config: LayoutConfig,
    pub source: Vec<u32>,
    pub destination: Vec<u32>,
    /// The blocks of decode that no process writes.
    pub untouched_blocks: Vec<u32>,
    pub layers: u32,
    pub computed: Pattern,
    /// The content of decode's memory before the transfer.
    pub poison: Pattern,
}

/// A measured transfer: medians over the rounds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    pub path: String,
    pub bytes: u64,
    /// The number of pieces, before adjacent ones were joined.
    pub pieces: u64,
    pub descriptors: u64,
    pub seconds: f64,
    pub predicted_seconds: f64,
    /// The time that NIXL measured, from its first request to the end of the last.
    pub nixl_seconds: Option<f64>,
    pub requests: Option<u64>,
}

impl Move {
    /// The moves of all groups of the model.
    pub fn all(options: &Options, model: &Model) -> Result<Vec<Self>, Failure> {
        let groups = model.geometry.groups();
        groups.iter().map(|group| Self::new(options, model, group, groups.len() > 1)).collect()
    }

    fn new(
        options: &Options,
        model: &Model,
        group: &CacheGroup,
        is_one_of_many: bool,
    ) -> Result<Self, Failure> {
        let config = |blocks| {
            group
                .layout_config(blocks, options.page_size)
                .map_err(|source| Failure::Model { name: model.name.clone(), source })
        };
        let a_block = config(1)?.block_bytes().get();
        let default = u32::try_from((DEFAULT_BYTES / a_block).max(1)).unwrap_or(u32::MAX / 4);
        let blocks = options.blocks.unwrap_or(default);
        // Space for other blocks, which must not change.
        let all = blocks.checked_add(blocks.div_ceil(4)).ok_or(Failure::TooManyIds { blocks })?;
        let config = config(all)?;
        let layers = options.layers.unwrap_or(config.num_layers());
        if layers > config.num_layers() {
            let (requested, layers) = (layers, config.num_layers());
            return Err(Failure::TooManyLayers { requested, layers });
        }
        let mut random = Seeded::new(options.seed);
        let mut draw = || -> Vec<u32> {
            let ids: Vec<u32> = (0..all).collect();
            let mut runs: Vec<&[u32]> = ids.chunks(ADJACENT_BLOCKS).collect();
            random.shuffle(&mut runs);
            runs.concat()
        };
        let (mut source, mut destination) = (draw(), draw());
        let moved = usize::try_from(blocks).map_err(|_| Failure::TooManyIds { blocks })?;
        source.truncate(moved);
        let untouched_blocks = destination.split_off(moved);
        let mut name = model.name.clone();
        if is_one_of_many {
            name.push_str(&format!(", {}", group.kind()));
        }
        let model = format!("{name}, rank 1 of {}", model.tensor_parallel);
        Ok(Self {
            name,
            model,
            config,
            source,
            destination,
            untouched_blocks,
            layers,
            computed: Pattern::new(options.seed),
            poison: Pattern::new(!options.seed),
        })
    }

    /// Executes the requested number of transfers, each with a notification.
    pub fn run_rounds(
        &self,
        options: &Options,
        local: &LocalAgent,
        from: &Endpoint,
        to: &Endpoint,
    ) -> Result<Measured, Failure> {
        let engine = NixlEngine::new(&local.agent, NixlEngineOptions::default())?;
        let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
        let mut reports: Vec<(f64, Report)> = Vec::new();
        for round in 0..options.rounds {
            let mut transfer = Transfer::new(from, to)
                .blocks(&self.source, &self.destination)
                .layers(0..self.layers)
                .notify(message(&self.name, round));
            if options.tier == MemoryTier::Device {
                transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
            }
            let begun = Instant::now();
            let report = manager.submit(transfer, ())?.wait().result?;
            reports.push((begun.elapsed().as_secs_f64(), report));
        }
        reports.sort_by(|left, right| left.0.total_cmp(&right.0));
        let middle = reports.swap_remove(reports.len() / 2);
        let (seconds, report) = middle;
        Ok(Measured {
            path: report.explanation.path().to_string(),
            bytes: report.explanation.bytes.get(),
            pieces: report.explanation.pieces,
            descriptors: report.explanation.runs,
            seconds,
            predicted_seconds: report.explanation.predicted.as_secs_f64(),
            nixl_seconds: report.engine_times.as_ref().map(|times| times.transfer.as_secs_f64()),
            requests: report.engine_times.as_ref().map(|times| times.requests),
        })
    }

    /// Waits until the other process has notified this one of the end of each round.
    pub fn wait_for_arrival(&self, options: &Options, local: &LocalAgent) -> Result<(), Failure> {
        let deadline = Instant::now() + PEER_TIMEOUT;
        let mut missing: Vec<Vec<u8>> =
            (0..options.rounds).map(|round| message(&self.name, round)).collect();
        while !missing.is_empty() {
            let notifications = local.agent.wait_for_notifications(deadline)?;
            if notifications.is_empty() {
                return Err(Failure::NoNotification);
            }
            missing.retain(|message| {
                notifications.iter().all(|received| received.message != *message)
            });
        }
        Ok(())
    }
}

fn message(name: &str, round: u32) -> Vec<u8> {
    format!("blocks of {name}, round {round}").into_bytes()
}

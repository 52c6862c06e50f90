//! The figures that the example prints.

use std::error::Error;
use std::time::Duration;

use comfy_table::Table;
use serde::{Deserialize, Serialize};
use serde_json::json;
use terrane::core::ByteCount;
use terrane::store::{Recovery, StoreSnapshot};

use crate::{Options, gigabytes};

/// One turn of a conversation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TurnReport {
    pub(crate) number: u32,
    /// The number of blocks of the prompt.
    pub(crate) blocks: usize,
    pub(crate) host: Loaded,
    pub(crate) disk: Loaded,
    /// The number of blocks whose bytes were compared.
    pub(crate) verified: usize,
    pub(crate) put_bytes: u64,
    pub(crate) put_seconds: f64,
}

/// The blocks that were loaded from one tier.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Loaded {
    pub(crate) blocks: usize,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

/// Both halves, and the restart between them.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) first: Vec<TurnReport>,
    pub(crate) second: Vec<TurnReport>,
    pub(crate) recovery: Option<Recovery>,
}

/// The sums over one half.
struct Half {
    turns: usize,
    blocks: usize,
    host: Loaded,
    disk: Loaded,
    verified: usize,
    put: Loaded,
}

impl Half {
    fn of(turns: &[TurnReport]) -> Self {
        let add = |sum: Loaded, each: Loaded| Loaded {
            blocks: sum.blocks + each.blocks,
            bytes: sum.bytes + each.bytes,
            seconds: sum.seconds + each.seconds,
        };
        let put = |turn: &TurnReport| Loaded {
            blocks: 0,
            bytes: turn.put_bytes,
            seconds: turn.put_seconds,
        };
        Self {
            turns: turns.len(),
            blocks: turns.iter().map(|turn| turn.blocks).sum(),
            host: turns.iter().map(|turn| turn.host).fold(Loaded::default(), add),
            disk: turns.iter().map(|turn| turn.disk).fold(Loaded::default(), add),
            verified: turns.iter().map(|turn| turn.verified).sum(),
            put: turns.iter().map(put).fold(Loaded::default(), add),
        }
    }

    fn hit_rate(&self) -> f64 {
        (self.host.blocks + self.disk.blocks) as f64 / self.blocks.max(1) as f64
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "turns": self.turns,
            "blocks": self.blocks,
            "hits_host": self.host.blocks,
            "hits_disk": self.disk.blocks,
            "hit_rate": self.hit_rate(),
            "verified": self.verified,
            "get_host_gb_per_s": self.host.rate(),
            "get_disk_gb_per_s": self.disk.rate(),
            "put_gb_per_s": self.put.rate(),
        })
    }

    fn row(&self, name: &str) -> Vec<String> {
        vec![
            name.to_owned(),
            self.turns.to_string(),
            self.blocks.to_string(),
            format!("{:.0} %", 100.0 * self.hit_rate()),
            format!("{} at {:.2} GB/s", self.host.blocks, self.host.rate()),
            format!("{} at {:.2} GB/s", self.disk.blocks, self.disk.rate()),
            format!("{:.2} GB/s", self.put.rate()),
            self.verified.to_string(),
        ]
    }
}

impl Loaded {
    fn rate(self) -> f64 {
        gigabytes(ByteCount::new(self.bytes), Duration::from_secs_f64(self.seconds))
    }
}

impl Report {
    pub(crate) fn print(
        &self,
        options: &Options,
        snapshot: &StoreSnapshot,
    ) -> Result<(), Box<dyn Error>> {
        let (first, second) = (Half::of(&self.first), Half::of(&self.second));
        let recovery = self.recovery.clone().unwrap_or_default();
        let evictions: Vec<u64> = snapshot.tiers.iter().map(|tier| tier.evictions).collect();
        if options.json {
            let found = json!({
                "first_half": first.json(),
                "recovered_blocks": recovery.found,
                "recovery_seconds": recovery.took.as_secs_f64(),
                "second_half": second.json(),
                "evictions": evictions,
            });
            println!("{found}");
            return Ok(());
        }
        let mut table = Table::new();
        table.set_header([
            "half",
            "turns",
            "blocks",
            "hits",
            "from host",
            "from disk",
            "puts",
            "verified",
        ]);
        table.add_row(first.row("before the kill"));
        table.add_row(second.row("after it"));
        println!("{table}");
        println!(
            "The first process was killed. The second one found {} blocks in {:.1?}.",
            recovery.found, recovery.took
        );
        let names = snapshot.tiers.iter().map(|tier| tier.name.as_str());
        for (name, count) in names.zip(evictions) {
            println!("The second process evicted {count} blocks from the tier {name:?}.");
        }
        println!("All blocks that were loaded had the right bytes.");
        Ok(())
    }
}

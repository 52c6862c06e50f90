//! A plan as text of 80 columns.

use terrane_core::ByteCount;
use terrane_plan::{EngineOptions, GroupPlan, Plan, TierPlan};

use crate::table::{duration, grouped, table, wrap};

pub(crate) fn render(plan: &Plan) -> String {
    let sections = [
        head(plan),
        groups(plan),
        tiers(plan),
        padding(plan),
        demand(plan),
        host(plan),
        limits(plan),
        predictions(plan),
        savings(plan),
        trace(plan),
        engines(plan),
    ];
    let sections: Vec<String> =
        sections.into_iter().filter(|section| !section.is_empty()).collect();
    sections.join("\n")
}

pub(super) fn bytes(bytes: u64) -> String {
    ByteCount::new(bytes).to_string()
}

pub(super) fn ranks(count: u32) -> String {
    if count == 1 { "1 rank".to_owned() } else { format!("{count} tensor-parallel ranks") }
}

/// The command of an engine, with an option on each line. Lines end with a backslash, so that a
/// shell reads one command.
pub(super) fn command(options: &EngineOptions) -> String {
    options.command.replace(" --", " \\\n    --")
}

fn head(plan: &Plan) -> String {
    let model = &plan.model;
    let ranks = ranks(model.tensor_parallel);
    let mut text = format!("{}, model type {}, {ranks}\n", model.name, model.model_type);
    if let (Some(source), Some(date)) = (&model.source, &model.date) {
        text.push_str(&wrap(&format!("parameters: {source}, {date}"), "  "));
    }
    if let Some(machine) = &plan.machine {
        text.push_str(&wrap(&format!("machine: {}, {}", machine.title, machine.date), "  "));
        for source in &machine.sources {
            text.push_str(&wrap(&format!("  figures: {source}"), "    "));
        }
    }
    text
}

pub(super) const GROUP_HEADER: [&str; 7] =
    ["CACHES OF ONE RANK", "LAYERS", "HEADS", "TOKEN, B", "BLOCK", "CHUNK", "SEQUENCE, B"];

pub(super) fn group_rows(plan: &Plan) -> Vec<Vec<String>> {
    let dash =
        |value: u64, text: fn(u64) -> String| if value == 0 { "-".to_owned() } else { text(value) };
    let row = |group: &GroupPlan| {
        vec![
            group.kind.clone(),
            group.layers.to_string(),
            group.heads.to_string(),
            dash(group.bytes_per_token, grouped),
            bytes(group.block_bytes),
            dash(group.chunk_bytes, bytes),
            dash(group.bytes_per_sequence, grouped),
        ]
    };
    plan.groups.iter().map(row).collect()
}

fn groups(plan: &Plan) -> String {
    let table = table(&GROUP_HEADER, &group_rows(plan), &[]);
    let all = if plan.groups.len() > 1 {
        format!("All groups: {} bytes a token.", grouped(plan.bytes_per_token))
    } else {
        String::new()
    };
    let sizes =
        format!("A block has {} tokens, a chunk {}. {all}", plan.block_tokens, plan.chunk_tokens);
    format!("{table}{}", wrap(&sizes, ""))
}

pub(super) const TIER_HEADER: [&str; 6] =
    ["TIER OF ONE RANK", "GIVEN", "BLOCKS", "TOKENS", "STATES", "USERS"];

pub(super) fn tier_rows(plan: &Plan) -> Vec<Vec<String>> {
    let row = |tier: &TierPlan| {
        vec![
            tier.name.clone(),
            bytes(tier.given_bytes),
            grouped(tier.blocks),
            grouped(tier.tokens),
            grouped(tier.states),
            tier.users.map_or_else(|| "-".to_owned(), grouped),
        ]
    };
    plan.tiers.iter().map(row).collect()
}

fn tiers(plan: &Plan) -> String {
    if plan.tiers.is_empty() {
        return wrap(
            "The request has no tier: add --gpu-mem, --host or --disk to see what fits.",
            "",
        );
    }
    let table = table(&TIER_HEADER, &tier_rows(plan), &[]);
    let note = "TOKENS: every group keeps every token. USERS: whole contexts in this tier alone.";
    format!("{table}{}", wrap(note, ""))
}

pub(super) const PADDING_HEADER: [&str; 6] =
    ["PADDING", "BLOCKS", "ALIGNMENT", "PAGES", "REST", "POWERS OF 2"];

pub(super) fn padding_rows(plan: &Plan) -> Vec<Vec<String>> {
    let row = |tier: &TierPlan| {
        let padding = &tier.padding;
        let share = |part: u64| {
            let percent = part as f64 / padding.block_bytes.max(1) as f64 * 100.0;
            if part == 0 { "0".to_owned() } else { format!("{} ({percent:.2} %)", bytes(part)) }
        };
        vec![
            tier.name.clone(),
            bytes(padding.block_bytes),
            share(padding.block_alignment),
            share(padding.regions_and_pages),
            bytes(padding.remainder),
            share(padding.powers_of_two),
        ]
    };
    plan.tiers.iter().map(row).collect()
}

fn padding(plan: &Plan) -> String {
    if plan.tiers.is_empty() {
        return String::new();
    }
    let table = table(&PADDING_HEADER, &padding_rows(plan), &[]);
    let note = "POWERS OF 2: padding with size classes of powers of two, for the same blocks.";
    format!("{table}{}", wrap(note, ""))
}

fn demand(plan: &Plan) -> String {
    let Some(demand) = &plan.demand else { return String::new() };
    let text = format!(
        "{} users with {} tokens each need {} on a rank, {} on all ranks; a user {}.",
        grouped(demand.users),
        grouped(demand.context),
        bytes(demand.bytes),
        bytes(demand.bytes_of_all_ranks),
        bytes(demand.bytes_per_user)
    );
    wrap(&text, "")
}

fn host(plan: &Plan) -> String {
    let Some(host) = &plan.host else { return String::new() };
    let rows = [
        vec!["huge pages of 2 MiB".to_owned(), grouped(host.huge_pages), host.sysctl.clone()],
        vec![
            "registrations of a rank".into(),
            grouped(host.registrations),
            "at most 64 GiB each".into(),
        ],
        vec![
            "memlock of a rank".into(),
            bytes(host.memlock_bytes),
            "for RDMA; CUDA is not limited by it".into(),
        ],
        vec!["/dev/shm".into(), bytes(host.shm_bytes), "for vLLM's native offloading only".into()],
    ];
    table(&["HOST", "NEEDS", ""], &rows, &[2])
}

fn limits(plan: &Plan) -> String {
    if plan.machine.is_none() {
        return String::new();
    }
    if plan.limits.is_empty() {
        return "LIMITS: the plan exceeds none of the known limits.\n".to_owned();
    }
    let lines = plan.limits.iter().map(|limit| wrap(&format!("  {limit}"), "    "));
    format!("LIMITS that the plan exceeds\n{}", lines.collect::<String>())
}

pub(super) fn prediction_rows(plan: &Plan) -> Vec<Vec<String>> {
    let rows = plan.predictions.iter().map(|prediction| {
        let least = if prediction.is_measured { "" } else { ">= " };
        let rate = prediction.bytes as f64 / prediction.seconds / 1e9;
        vec![
            prediction.what.clone(),
            bytes(prediction.bytes),
            format!("{least}{}", duration(prediction.seconds)),
            format!("{rate:.2}"),
        ]
    });
    rows.collect()
}

pub(super) const PREDICTION_HEADER: [&str; 4] = ["PREDICTED", "BYTES", "TIME", "GB/s"];

fn predictions(plan: &Plan) -> String {
    let Some(first) = plan.predictions.first() else { return String::new() };
    let table = table(&PREDICTION_HEADER, &prediction_rows(plan), &[]);
    let kind = if first.is_measured { "measured" } else { "a limit, not measured" };
    let ranks = if plan.model.tensor_parallel > 1 {
        " Rows without \"all ranks\" are of one rank."
    } else {
        ""
    };
    format!("{table}{}", wrap(&format!("Rates: {} ({kind}).{ranks}", first.rates), ""))
}

fn savings(plan: &Plan) -> String {
    if plan.savings.is_empty() {
        return String::new();
    }
    let rows = plan.savings.iter().map(|saving| {
        vec![saving.change.clone(), bytes(saving.after), format!("{:.0} %", saving.share() * 100.0)]
    });
    let rows: Vec<_> = rows.collect();
    table(&["FOR 20 % LESS HOST MEMORY", "THEN", "SAVED"], &rows, &[])
}

fn trace(plan: &Plan) -> String {
    let Some(trace) = &plan.trace else { return String::new() };
    let rows = trace.by_capacity.iter().map(|row| {
        vec![
            grouped(row.blocks),
            grouped(row.blocks.saturating_mul(plan.block_tokens.into())),
            format!("{:.2} %", row.hit_ratio * 100.0),
            row.tiers.clone(),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let table = table(&["BLOCKS OF CACHE", "TOKENS", "HITS", "TIERS"], &rows, &[3]);
    let text = format!(
        "Trace: {} requests, {} uses of {} keys; least recently used blocks are evicted.",
        grouped(trace.requests),
        grouped(trace.uses),
        grouped(trace.keys)
    );
    format!("{table}{}", wrap(&text, ""))
}

fn engines(plan: &Plan) -> String {
    let mut text = String::new();
    for options in &plan.engines {
        text.push_str(&format!("{}:\n", options.engine));
        if !options.command.is_empty() {
            text.push_str(&format!("  {}\n", command(options)));
        }
        for note in &options.notes {
            text.push_str(&wrap(&format!("  # {note}"), "  # "));
        }
    }
    text
}

//! A plan as a page.

use terrane_layout::LayoutPlan;
use terrane_plan::{Plan, PlanRequest, TierKind};

use super::text::{
    GROUP_HEADER, PADDING_HEADER, PREDICTION_HEADER, TIER_HEADER, bytes, command, group_rows,
    padding_rows, prediction_rows, ranks, tier_rows,
};
use crate::commands::page::{escape, page, table};
use crate::error::Failure;
use crate::table::grouped;

pub(crate) fn render(request: &PlanRequest, plan: &Plan) -> Result<String, Failure> {
    let title = format!("{} on {}", plan.model.name, ranks(plan.model.tensor_parallel));
    let mut body = format!("<h1>{}</h1>\n", escape(&title));
    if let (Some(source), Some(date)) = (&plan.model.source, &plan.model.date) {
        body.push_str(&format!("<p class=\"note\">Parameters: {}, {date}</p>\n", escape(source)));
    }
    if let Some(machine) = &plan.machine {
        let sources = machine.sources.join("; ");
        body.push_str(&format!(
            "<p class=\"note\">Machine: {}. Figures: {}</p>\n",
            escape(&machine.title),
            escape(&sources)
        ));
    }
    section(&mut body, "Caches of one rank", &table(&GROUP_HEADER, &group_rows(plan)));
    if !plan.tiers.is_empty() {
        section(&mut body, "Tiers of one rank, to scale", &scale(plan));
        body.push_str(&table(&TIER_HEADER, &tier_rows(plan)));
        section(&mut body, "Padding", &table(&PADDING_HEADER, &padding_rows(plan)));
    }
    needs(&mut body, plan);
    if !plan.predictions.is_empty() {
        let rates = plan.predictions.first().map_or("", |first| first.rates.as_str());
        section(&mut body, "Predicted times", &table(&PREDICTION_HEADER, &prediction_rows(plan)));
        body.push_str(&format!("<p class=\"note\">Rates: {}</p>\n", escape(rates)));
    }
    if !plan.savings.is_empty() {
        let rows = plan.savings.iter().map(|saving| {
            let share = format!("{:.0} %", saving.share() * 100.0);
            vec![saving.change.clone(), bytes(saving.after), share]
        });
        let rows: Vec<_> = rows.collect();
        section(
            &mut body,
            "For 20 % less host memory",
            &table(&["Change", "Then", "Saved"], &rows),
        );
    }
    if let Some(trace) = &plan.trace {
        let rows = trace.by_capacity.iter().map(|row| {
            let ratio = format!("{:.2} %", row.hit_ratio * 100.0);
            vec![grouped(row.blocks), ratio, row.tiers.clone()]
        });
        let rows: Vec<_> = rows.collect();
        section(&mut body, "Hit ratios of the trace", &table(&["Blocks", "Hits", "Tiers"], &rows));
    }
    for options in &plan.engines {
        let notes = options.notes.iter().map(|note| format!("# {note}"));
        let command = Some(command(options)).filter(|command| !command.is_empty());
        let text = command.into_iter().chain(notes).collect::<Vec<_>>().join("\n");
        section(&mut body, &options.engine, &format!("<pre>{}</pre>\n", escape(&text)));
    }
    pictures(&mut body, request, plan)?;
    Ok(page(&title, &body))
}

fn section(body: &mut String, title: &str, html: &str) {
    body.push_str(&format!("<h2>{}</h2>\n{html}", escape(title)));
}

fn needs(body: &mut String, plan: &Plan) {
    if let Some(host) = &plan.host {
        let rows = [
            vec!["huge pages of 2 MiB".to_owned(), grouped(host.huge_pages)],
            vec!["registrations of a rank".into(), grouped(host.registrations)],
            vec!["memlock of a rank, for RDMA".into(), bytes(host.memlock_bytes)],
            vec!["/dev/shm, for vLLM's native offloading only".into(), bytes(host.shm_bytes)],
        ];
        section(body, "Needs of the host tier", &table(&["", ""], &rows));
        body.push_str(&format!("<pre>{}</pre>\n", escape(&host.sysctl)));
    }
    for limit in &plan.limits {
        body.push_str(&format!("<p class=\"limit\">{}</p>\n", escape(&limit.to_string())));
    }
}

/// Bars in proportion to the bytes of the tiers, with padding in another shade.
fn scale(plan: &Plan) -> String {
    const WIDTH: f64 = 700.0;
    let largest = plan.tiers.iter().map(|tier| tier.given_bytes).max().unwrap_or(1).max(1) as f64;
    let height = plan.tiers.len() * 34 + 6;
    let mut svg = format!(
        "<svg viewBox=\"0 0 980 {height}\" width=\"980\" height=\"{height}\" role=\"img\" \
         aria-label=\"tiers to scale\" font-family=\"sans-serif\" font-size=\"13\">\n"
    );
    for (number, tier) in plan.tiers.iter().enumerate() {
        let y = number * 34 + 4;
        let width = |bytes: u64| (bytes as f64 / largest * WIDTH).max(1.0);
        svg.push_str(&format!(
            "<text x=\"0\" y=\"{}\">{}</text>\n<rect x=\"120\" y=\"{y}\" width=\"{:.1}\" height=\"24\" \
             fill=\"#c9d6e5\"/>\n<rect x=\"120\" y=\"{y}\" width=\"{:.1}\" height=\"24\" fill=\"#3a6ea5\"/>\n\
             <text x=\"{:.1}\" y=\"{}\">{}</text>\n",
            y + 17,
            escape(&shortened(&tier.name)),
            width(tier.given_bytes),
            width(tier.padding.block_bytes),
            128.0 + width(tier.given_bytes),
            y + 17,
            bytes(tier.given_bytes),
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

/// Keeps the end of a long path.
fn shortened(name: &str) -> String {
    let count = name.chars().count();
    if count <= 16 {
        name.to_owned()
    } else {
        format!("…{}", name.chars().skip(count - 15).collect::<String>())
    }
}

/// Draws block 0 of each group in each kind of tier, in layouts of four blocks.
fn pictures(body: &mut String, request: &PlanRequest, plan: &Plan) -> Result<(), Failure> {
    let mut kinds: Vec<TierKind> = plan.tiers.iter().map(|tier| tier.kind).collect();
    kinds.dedup();
    for kind in kinds {
        let layouts: Vec<LayoutPlan> = request.layouts(kind, 4)?;
        for (group, layout) in plan.groups.iter().zip(layouts) {
            let name = format!("{:?}", kind).to_lowercase();
            let title = format!("A block in the {name} tier: {}", group.kind);
            section(body, &title, &format!("{}\n", layout.geometry().picture().to_svg()));
        }
    }
    Ok(())
}

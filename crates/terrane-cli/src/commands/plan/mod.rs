//! `terrane plan`.

mod html;
mod text;

use std::path::{Path, PathBuf};

use clap::Args;
use terrane_core::ByteCount;
use terrane_plan::{
    DiskSpace, Machine, Model, Plan, PlanRequest, Trace, published_machines, published_models,
};

use crate::commands::doctor::this_machine;
use crate::commands::files;
use crate::commands::model::ModelArguments;
use crate::commands::sizes::{count, size};
use crate::error::{ExitStatus, Failure};
use crate::output::Output;
use crate::restart::Restart;
use crate::table::table;

/// The arguments of `terrane plan`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Tokens of a chunk, the unit that a cache shares; 256 if not set
    #[arg(long, value_name = "TOKENS")]
    chunk: Option<u32>,
    /// The memory of each GPU for the cache, after weights and activations
    #[arg(long, value_name = "SIZE", value_parser = size)]
    gpu_mem: Option<ByteCount>,
    /// Host memory for the cache, a total of all ranks
    #[arg(long, value_name = "SIZE", value_parser = size)]
    host: Option<ByteCount>,
    /// Disk space for the cache, a total of all ranks; repeat the option for several tiers
    #[arg(long, value_name = "DIR:SIZE", value_parser = disk)]
    disk: Vec<DiskSpace>,
    /// Tokens of a user's context, such as 32768 or 32k
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    context: Option<u64>,
    /// Number of users, each with one context
    #[arg(long, value_name = "N", value_parser = count)]
    users: Option<u64>,
    /// A machine's profile, or a file that describes one
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "here")]
    machine: Option<String>,
    /// Uses this machine, with the facts of `terrane doctor`
    #[arg(long)]
    here: bool,
    /// A trace of keys: each line has the keys of a request, or JSON with `hash_ids`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// Writes a self-contained page with pictures
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Exits with 4 if the plan exceeds a limit of the machine
    #[arg(long)]
    check: bool,
    /// Lists the published models and the profiles of machines
    #[arg(long, conflicts_with_all = ["model", "html", "json"])]
    list: bool,
    /// Prints a profile, as a template for your own
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "html", "list"])]
    show_machine: Option<String>,
}

pub(crate) fn run(
    arguments: &Arguments,
    restart: &Restart,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    if arguments.list {
        output.text(&list()?)?;
        return Ok(ExitStatus::Success);
    }
    if let Some(name) = &arguments.show_machine {
        output.text(&format!("{}\n", Machine::published(name)?.to_json()?))?;
        return Ok(ExitStatus::Success);
    }
    let request = request(arguments, restart)?;
    let plan = Plan::new(&request)?;
    if let Some(path) = &arguments.html {
        files::write(path, &html::render(&request, &plan)?)?;
    }
    if arguments.json {
        output.json(&plan)?;
    } else {
        output.text(&text::render(&plan))?;
    }
    let is_hit = arguments.check && !plan.limits.is_empty();
    Ok(if is_hit { ExitStatus::LimitHit } else { ExitStatus::Success })
}

fn request(arguments: &Arguments, restart: &Restart) -> Result<PlanRequest, Failure> {
    let mut request = arguments.model.request()?;
    if let Some(chunk) = arguments.chunk {
        request.chunk_tokens = chunk;
    }
    request.device = arguments.gpu_mem;
    request.host = arguments.host;
    request.disks = arguments.disk.clone();
    (request.context, request.users) = (arguments.context, arguments.users);
    request.machine = match &arguments.machine {
        Some(name) => Some(machine(name)?),
        None if arguments.here => {
            let directories = arguments.disk.iter().map(|disk| PathBuf::from(&disk.directory));
            Some(this_machine::facts(restart, &directories.collect::<Vec<_>>()))
        }
        None => None,
    };
    if let Some(path) = &arguments.trace {
        request.trace = Some(Trace::parse(&files::read_text(path)?)?);
    }
    Ok(request)
}

/// Loads a file if it exists, else a profile.
fn machine(name: &str) -> Result<Machine, Failure> {
    let path = Path::new(name);
    if path.is_file() || name.ends_with(".json") {
        return Ok(Machine::from_json(name, &files::read(path)?)?);
    }
    Ok(Machine::published(name)?)
}

fn list() -> Result<String, Failure> {
    let mut models = Vec::new();
    for name in published_models() {
        let model = Model::published(name)?;
        let source = model.source().map_or_else(String::new, |(source, _)| source.to_owned());
        models.push(vec![name.to_owned(), source]);
    }
    let mut machines = Vec::new();
    for name in published_machines() {
        machines.push(vec![name.to_owned(), Machine::published(name)?.title]);
    }
    let (models, machines) =
        (table(&["MODEL", "SOURCE"], &models, &[1]), table(&["MACHINE", ""], &machines, &[1]));
    Ok(format!("{models}\n{machines}"))
}

fn disk(text: &str) -> Result<DiskSpace, String> {
    let (directory, bytes) =
        text.rsplit_once(':').ok_or("write a directory and a size, such as /mnt/nvme:2TiB")?;
    Ok(DiskSpace { directory: directory.to_owned(), bytes: size(bytes)? })
}

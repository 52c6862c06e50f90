//! Creates backends. Checks run beforehand, so that each reason has its own error.

use std::borrow::Cow;
use std::sync::Mutex;

use terrane_core::BackendName;
use terrane_core::sync::lock;

use super::backend::Backend;
use super::config::{BackendConfig, Parameter};
use super::io_limit::IoLimit;
use super::options::{BackendOptions, naming};
use crate::bindings::memory_type::MemoryType;
use crate::bindings::status::Status;
use crate::bindings::without_tracing::without_tracing;
use crate::error::NixlError;
use crate::probe::{NixlInstallation, plugins};

/// The backends that exclude each other: an agent can have only one of them.
const EXCLUSIVE: [&str; 2] = ["GDS", "GDS_MT"];

/// Locked while plugins are queried and backends are created.
///
/// NIXL loads a plugin to query its parameters, and unloads it if the querying agent has no such
/// backend. If another agent creates such a backend in between, NIXL does not find the plugin when
/// that agent ends, and leaks the backend and its threads.
static PLUGINS: Mutex<()> = Mutex::new(());

/// Checks combinations of backends: those that NIXL refuses, those that it should refuse, and
/// duplicates.
pub(super) fn check_combination(configs: &[BackendConfig]) -> Result<(), NixlError> {
    for (index, config) in configs.iter().enumerate() {
        for earlier in configs.iter().take(index) {
            if earlier.name == config.name {
                return Err(NixlError::DuplicateBackend { backend: config.name.clone() });
            }
            if [earlier, config].iter().all(|c| EXCLUSIVE.contains(&c.name.as_str())) {
                let (first, second) = (earlier.name.clone(), config.name.clone());
                return Err(NixlError::IllegalCombination { first, second });
            }
        }
    }
    Ok(())
}

/// Creates all backends, in order.
pub(super) fn backends(
    agent: &nixl_sys::Agent,
    installation: &NixlInstallation,
    configs: Vec<BackendConfig>,
) -> Result<Vec<Backend>, NixlError> {
    let _held = lock(&PLUGINS);
    without_tracing(|| {
        configs.into_iter().map(|config| create(agent, installation, config)).collect()
    })
}

fn create(
    agent: &nixl_sys::Agent,
    installation: &NixlInstallation,
    config: BackendConfig,
) -> Result<Backend, NixlError> {
    check_texts(&config)?;
    check_plugin(agent, installation, &config.name)?;
    check_parameters(agent, &config)?;
    let failed =
        |error| NixlError::Backend { backend: config.name.clone(), status: Status::of(&error) };
    let parameters = nixl_sys::Params::from(parameters(&config)).map_err(failed)?;
    let raw = agent.create_backend(config.name.as_str(), &parameters).map_err(failed)?;
    let query = NixlError::during("querying the memory types of a backend");
    let (types, _) = agent.get_backend_params(&raw).map_err(query)?;
    let mut memory = Vec::new();
    for index in 0..types.len().map_err(query)? {
        memory.extend(MemoryType::from_raw(types.get(index).map_err(query)?));
    }
    memory.sort_unstable();
    let created = NixlError::during("creating the options of a backend");
    let options = BackendOptions(naming([&raw]).map_err(created)?);
    let ios = IoLimit::of(&config);
    let failure_is_final = installation.package_version().as_deref() == Some(KNOWN_RELEASE)
        && failure_is_final(&config, || known_parameters(agent, &config.name).unwrap_or_default());
    let BackendConfig { name, requirement, file_access, .. } = config;
    Ok(Backend { name, raw, options, memory, requirement, file_access, ios, failure_is_final })
}

/// The NIXL release whose storage backends' failure behaviour is known.
const KNOWN_RELEASE: &str = "1.5.1";

/// Whether a backend reports a failed request only after all I/Os of the request have ended.
///
/// GDS_MT waits for its threads first. POSIX counts the I/Os of the kernel's asynchronous I/O,
/// which it prefers if available. With other queues it may report the failure earlier. With other
/// backends, I/Os may continue.
fn failure_is_final(config: &BackendConfig, known: impl FnOnce() -> Vec<String>) -> bool {
    const QUEUE: &str = "use_aio";
    let is_another = |stated: &Parameter| {
        matches!(stated.key.as_str(), "use_uring" | "use_posix_aio") && stated.value != "false"
    };
    match config.name.as_str() {
        "GDS_MT" => true,
        "POSIX" => {
            !config.parameters.iter().any(is_another) && known().iter().any(|key| key == QUEUE)
        }
        _ => false,
    }
}

/// The parameters passed to the backend: the stated ones, and the defaults.
fn parameters(config: &BackendConfig) -> Vec<(&str, Cow<'_, str>)> {
    let stated = config.parameters.iter().map(|stated| (&*stated.key, Cow::from(&*stated.value)));
    let mut all: Vec<_> = stated.collect();
    if config.name.as_str() != "UCX" {
        return all;
    }
    match all.iter_mut().find(|(key, _)| *key == ENGINE_CONFIG) {
        // UCX applies the last of several values of a setting.
        Some((_, stated)) => *stated = format!("{READS_BY_CUDA_IPC},{stated}").into(),
        None => all.push((ENGINE_CONFIG, READS_BY_CUDA_IPC.into())),
    }
    all
}

/// The parameter that holds UCX settings, separated by commas.
const ENGINE_CONFIG: &str = "engine_config";

/// On a device without NVLinks, UCX by default does not read another process's device memory by
/// CUDA IPC. It would ask the owner to write, which is faster there. But NIXL posts a read as a
/// read, for which only TCP remains. A UCX without CUDA does not know the setting; NIXL logs that
/// at debug level.
const READS_BY_CUDA_IPC: &str = "CUDA_IPC_ENABLE_GET_ZCOPY=y";

fn check_texts(config: &BackendConfig) -> Result<(), NixlError> {
    let check = |what, text: &str| {
        let text = text.to_owned();
        if text.contains('\0') { Err(NixlError::Nul { what, text }) } else { Ok(()) }
    };
    check("name of a backend", config.name.as_str())?;
    for Parameter { key, value, .. } in &config.parameters {
        check("name of a parameter", key)?;
        check("value of a parameter", value)?;
    }
    Ok(())
}

/// Checks that NIXL finds the plugin, and that it can be loaded.
fn check_plugin(
    agent: &nixl_sys::Agent,
    installation: &NixlInstallation,
    backend: &BackendName,
) -> Result<(), NixlError> {
    let files = installation.plugins();
    if let Some(plugin) = files.iter().find(|plugin| plugin.name() == backend) {
        let failed = |source| NixlError::Plugin { backend: backend.clone(), source };
        return plugin.check().map_err(failed);
    }
    // A plugin that is linked into NIXL, or is in a list of plugins, has no file to check.
    let available = available(agent, installation)?;
    if available.contains(backend) {
        return Ok(());
    }
    Err(NixlError::UnknownPlugin { backend: backend.clone(), available })
}

/// The plugins that NIXL finds.
fn available(
    agent: &nixl_sys::Agent,
    installation: &NixlInstallation,
) -> Result<Vec<BackendName>, NixlError> {
    if !plugins::names_are_text(installation.plugin_directory()) {
        // The bindings panic on such a name.
        return Ok(installation.plugins().iter().map(|plugin| plugin.name().clone()).collect());
    }
    let query = NixlError::during("listing the plugins");
    let list = agent.get_available_plugins().map_err(query)?;
    (0..list.len().map_err(query)?)
        .map(|index| Ok(BackendName::from(list.get(index).map_err(query)?)))
        .collect()
}

/// Checks that the plugin names each parameter, and that none is set twice.
fn check_parameters(agent: &nixl_sys::Agent, config: &BackendConfig) -> Result<(), NixlError> {
    if config.parameters.is_empty() {
        return Ok(());
    }
    let known = known_parameters(agent, &config.name)?;
    for (index, parameter) in config.parameters.iter().enumerate() {
        let (backend, key) = (&config.name, &parameter.key);
        if parameter.checked && !known.contains(key) {
            let (backend, parameter) = (backend.clone(), key.clone());
            return Err(NixlError::UnknownParameter { backend, parameter, known });
        }
        if config.parameters.iter().take(index).any(|earlier| earlier.key == *key) {
            let (backend, parameter) = (backend.clone(), key.clone());
            return Err(NixlError::DuplicateParameter { backend, parameter });
        }
    }
    Ok(())
}

fn known_parameters(
    agent: &nixl_sys::Agent,
    backend: &BackendName,
) -> Result<Vec<String>, NixlError> {
    let refused = |_| NixlError::PluginRefused { backend: backend.clone() };
    let (_, parameters) = agent.get_plugin_params(backend.as_str()).map_err(refused)?;
    let query = NixlError::during("querying the parameters of a plugin");
    let mut known = Vec::new();
    // Each pair is copied before the next is requested. The bindings declare that the texts live as
    // long as the list, but they live only until the next pair.
    for pair in parameters.iter().map_err(query)? {
        let (key, _) = pair.map_err(query)?;
        known.push(key.to_owned());
    }
    known.sort_unstable();
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(names: &[&str]) -> Result<(), NixlError> {
        let configs: Vec<_> = names.iter().map(|name| BackendConfig::new(*name)).collect();
        check_combination(&configs)
    }

    #[test]
    fn queues_that_report_failures_early_are_recognised() {
        let known = |with: &[&str]| with.iter().map(|key| (*key).to_owned()).collect();
        let posix = |key: &str, value: &str| BackendConfig::new("POSIX").parameter(key, value);
        let failure_is_final =
            |config: &BackendConfig, with: &[&str]| failure_is_final(config, || known(with));
        let usual = posix("ios_pool_size", "64");
        assert!(failure_is_final(&usual, &["ios_pool_size", "use_aio"]));
        assert!(
            !failure_is_final(&usual, &["ios_pool_size", "use_uring"]),
            "it takes another queue"
        );
        assert!(!failure_is_final(&posix("use_uring", "true"), &["use_aio", "use_uring"]));
        assert!(failure_is_final(&posix("use_uring", "false"), &["use_aio", "use_uring"]));
        let other = ["GDS_MT", "GDS", "UCX"].map(BackendConfig::new);
        assert_eq!(
            other.each_ref().map(|config| failure_is_final(config, &[])),
            [true, false, false]
        );
    }

    #[test]
    fn defaults_precede_stated_settings() {
        let passed = |config: &BackendConfig| {
            let passed = parameters(config);
            passed.iter().map(|(key, value)| format!("{key}: {value}")).collect::<Vec<_>>()
        };
        let ucx = || BackendConfig::new("UCX").parameter("num_workers", "2");
        let usual = "engine_config: CUDA_IPC_ENABLE_GET_ZCOPY=y";
        assert_eq!(passed(&ucx()), ["num_workers: 2", usual]);
        let stated = ucx().unchecked_parameter("engine_config", "MAX_RMA_RAILS=1");
        assert_eq!(passed(&stated), ["num_workers: 2", &format!("{usual},MAX_RMA_RAILS=1")]);
        let other = BackendConfig::new("POSIX").parameter("ios_pool_size", "8");
        assert_eq!(passed(&other), ["ios_pool_size: 8"]);
    }

    #[test]
    fn invalid_combinations_are_refused_before_anything_is_created() {
        assert!(check(&["UCX", "POSIX", "GDS"]).is_ok());
        let twice = check(&["UCX", "POSIX", "UCX"]).unwrap_err();
        assert!(matches!(twice, NixlError::DuplicateBackend { .. }), "{twice}");
        let both = check(&["GDS_MT", "UCX", "GDS"]).unwrap_err();
        assert_eq!(
            both.to_string(),
            "an agent cannot have both GDS_MT and GDS; choose one of them"
        );
    }
}

//! Backends that cannot be created, each with its own error.

use terrane_core::BackendName;
use terrane_nixl::{
    AgentBuilder, BackendConfig, BackendRequirement, MemoryType, NixlError, PluginError, Status,
    probe,
};
use terrane_testkit::process::in_child_with;

use crate::support::{agent, chain, posix};

#[track_caller]
fn refused(backends: impl IntoIterator<Item = BackendConfig>) -> NixlError {
    let builder = backends.into_iter().fold(AgentBuilder::unnamed(), AgentBuilder::backend);
    builder.build().unwrap_err()
}

#[test]
fn backends_report_their_memory_types() {
    let agent = agent([BackendConfig::new("UCX"), posix()]);
    let types = |name: &str| agent.memory_types(&name.into()).unwrap();
    assert_eq!(types("UCX"), [MemoryType::Host, MemoryType::Device]);
    assert_eq!(types("POSIX"), [MemoryType::Host, MemoryType::File]);
    assert_eq!(agent.memory_types(&"GDS".into()), None);
}

#[test]
fn the_error_of_an_unknown_plugin_lists_the_available_ones() {
    let error = refused([BackendConfig::new("NOSUCH")]);
    let NixlError::UnknownPlugin { backend, available } = &error else { panic!("{error}") };
    assert_eq!(backend.as_str(), "NOSUCH");
    assert!(available.contains(&BackendName::from("UCX")), "{available:?}");
    assert!(error.to_string().contains("UCX"), "{error}");
}

#[test]
fn a_plugin_that_cannot_be_loaded_reports_the_missing_library() {
    const TEST: &str = "backends::a_plugin_that_cannot_be_loaded_reports_the_missing_library";
    // GDS, changed so that it depends on a library that does not exist.
    let plugins = probe().unwrap().plugins();
    let gds = plugins.iter().find(|plugin| plugin.name().as_str() == "GDS").unwrap();
    let mut bytes = std::fs::read(gds.path()).unwrap();
    let (runtime, absent) = (b"libcudart.so.", b"libabsent.so.");
    // The child process finds the changed plugin.
    if let Some(at) = bytes.windows(runtime.len()).position(|window| window == runtime) {
        bytes[at..at + runtime.len()].copy_from_slice(absent);
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("libplugin_GDS.so"), bytes).unwrap();
    let directory = directory.path().to_str().unwrap();
    in_child_with(TEST, &[("NIXL_PLUGIN_DIR", directory)], || {
        let error = refused([BackendConfig::new("GDS")]);
        let NixlError::Plugin { backend, source } = &error else { panic!("{error}") };
        assert_eq!(backend.as_str(), "GDS");
        assert!(matches!(source, PluginError::NotLoaded { .. }), "{source:?}");
        let text = chain(&error);
        assert!(text.contains("libabsent.so."), "{text}");
        assert!(text.contains("cannot open shared object file"), "{text}");
    });
}

/// NIXL reports only that it has no such plugin. No backend is created then.
#[test]
fn a_plugin_that_nixl_refuses_differs_from_one_that_cannot_be_loaded() {
    const TEST: &str =
        "backends::a_plugin_that_nixl_refuses_differs_from_one_that_cannot_be_loaded";
    let directory = tempfile::tempdir().unwrap();
    let compile = |name: &str, answer: &str| {
        let source = directory.path().join(name).with_extension("c");
        let plugin = directory.path().join(format!("libplugin_{name}.so"));
        let begin = "static int version_of_none[64] = {9999};";
        let text = format!("{begin}\nvoid *nixl_plugin_init(void) {{ return {answer}; }}\n");
        std::fs::write(&source, text).unwrap();
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(plugin).arg(source);
        assert!(compiler.status().unwrap().success(), "the C compiler that Rust links with");
    };
    // A plugin without a description, and one of another NIXL version.
    compile("NOTHING", "0");
    compile("OTHER", "version_of_none");
    let directory = directory.path().to_str().unwrap();
    in_child_with(TEST, &[("NIXL_PLUGIN_DIR", directory)], || {
        for name in ["NOTHING", "OTHER"] {
            let error = refused([BackendConfig::new(name).parameter("any", "1")]);
            let NixlError::PluginRefused { backend } = &error else { panic!("{error:?}") };
            assert_eq!(backend.as_str(), name);
        }
    });
}

#[test]
fn a_backend_that_refuses_its_parameters_is_not_created() {
    for backend in [
        BackendConfig::new("UCX").parameter("num_workers", "many"),
        BackendConfig::new("UCX").parameter("ucx_error_handling_mode", "hope"),
        posix().parameter("use_uring", "banana"),
        posix().parameter("use_uring", "true").parameter("use_aio", "true"),
    ] {
        let name = backend.name().clone();
        let error = refused([backend]);
        let NixlError::Backend { backend, status } = &error else { panic!("{error}") };
        assert_eq!((backend, *status), (&name, Status::Backend));
    }
}

#[test]
fn a_parameter_that_would_be_ignored_is_refused() {
    let error = refused([BackendConfig::new("UCX").parameter("device_list", "mlx5_0")]);
    let NixlError::UnknownParameter { parameter, known, .. } = &error else { panic!("{error}") };
    assert_eq!(parameter, "device_list");
    assert!(known.contains(&"ucx_devices".to_owned()), "{known:?}");
    assert!(error.to_string().contains("ucx_devices"), "{error}");
    // An unchecked parameter is forwarded.
    agent([posix().unchecked_parameter("device_list", "mlx5_0")]);
}

#[test]
fn a_parameter_is_set_once() {
    let error = refused([posix().parameter("ios_pool_size", "128")]);
    assert!(matches!(error, NixlError::DuplicateParameter { .. }), "{error}");
}

#[test]
fn illegal_combinations_are_refused_whether_or_not_the_plugins_load() {
    let error = refused([BackendConfig::new("GDS"), BackendConfig::new("GDS_MT")]);
    assert!(matches!(error, NixlError::IllegalCombination { .. }), "{error}");
    let error = refused([posix(), BackendConfig::new("POSIX")]);
    assert!(matches!(error, NixlError::DuplicateBackend { .. }), "{error}");
}

#[test]
fn texts_that_c_cannot_hold_are_refused() {
    for backend in [
        BackendConfig::new("PO\0SIX"),
        posix().parameter("use\0aio", "false"),
        posix().parameter("use_aio", "fa\0lse"),
    ] {
        let error = refused([backend]);
        assert!(matches!(error, NixlError::Nul { .. }), "{error}");
    }
}

#[test]
fn a_registrar_accepts_only_backends_of_its_agent() {
    let agent = agent([posix()]);
    let error = agent.registrar([("UCX", BackendRequirement::Required)]).unwrap_err();
    let NixlError::NoSuchBackend { backend, available, .. } = &error else { panic!("{error}") };
    assert_eq!(backend.as_str(), "UCX");
    assert_eq!(available, &[BackendName::from("POSIX")]);
    let twice =
        [("POSIX", BackendRequirement::Required), ("POSIX", BackendRequirement::IfSupported)];
    let error = agent.registrar(twice).unwrap_err();
    assert!(matches!(error, NixlError::DuplicateBackend { .. }), "{error}");
}

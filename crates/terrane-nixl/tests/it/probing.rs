//! Results of the probe. Each case runs in a child process, because a process loads a library once.

use std::fs;
use std::path::Path;

use terrane_nixl::{
    AgentBuilder, NixlError, NixlUnavailable, PluginError, REQUIRED_SYMBOLS, probe, probe_file,
};
use terrane_testkit::process::{in_child, in_child_with};

use crate::support::{chain, compile, posix};

const LIBRARY: &str = "libnixl_capi.so";

#[test]
fn the_library_is_found_with_its_plugins() {
    in_child("probing::the_library_is_found_with_its_plugins", || {
        let found = probe().unwrap();
        assert_eq!(found.library().file_name().unwrap(), LIBRARY);
        assert!(found.library().is_file(), "{found:?}");
        assert!(found.plugin_directory().is_dir(), "{found:?}");
        let plugins = found.plugins();
        let needed: &[&str] = if is_of_the_machine() {
            &["UCX", "POSIX"]
        } else {
            // The downloaded release is complete.
            assert_eq!(found.package_version().as_deref(), Some("1.5.1"), "{found:?}");
            &["UCX", "POSIX", "GDS", "GDS_MT"]
        };
        for &needed in needed {
            let plugin = plugins.iter().find(|plugin| plugin.name().as_str() == needed);
            let plugin = plugin.unwrap_or_else(|| panic!("no {needed} in {plugins:?}"));
            // Not skipped: the library that the loader misses must be installed.
            plugin.check().unwrap_or_else(|failed| panic!("{}", chain(&failed)));
        }
        // The result is cached.
        assert_eq!(probe().unwrap(), found);
    });
}

#[test]
fn a_missing_library_is_an_error_with_the_loaders_message() {
    const TEST: &str = "probing::a_missing_library_is_an_error_with_the_loaders_message";
    in_child_with(TEST, &[("LD_LIBRARY_PATH", "")], || {
        if is_in_the_default_path(TEST) {
            return;
        }
        let error = probe().unwrap_err();
        assert!(matches!(error, NixlUnavailable::LibraryMissing { .. }), "{error:?}");
        let text = chain(&error);
        assert!(text.contains(LIBRARY) && text.contains("No such file"), "{text}");
        // An agent returns the same error, and so does a second call.
        for _ in 0..2 {
            let error = AgentBuilder::unnamed().backend(posix()).build().unwrap_err();
            let NixlError::Unavailable(unavailable) = &error else { panic!("{error:?}") };
            assert_eq!(chain(unavailable), text);
            assert_eq!(chain(&error), text, "the reason is stated once");
        }
    });
}

#[test]
fn a_library_that_is_installed_later_is_found() {
    const TEST: &str = "probing::a_library_that_is_installed_later_is_found";
    let library = library_of_this_process(TEST);
    in_child_with(TEST, &[("LD_LIBRARY_PATH", ""), (LIBRARY_VARIABLE, &library)], || {
        if is_in_the_default_path(TEST) {
            return;
        }
        load(&library_named_by_parent());
        // Loaded by its path, it is found by its name.
        assert!(probe().is_ok());
        AgentBuilder::unnamed().backend(posix()).build().unwrap();
    });
}

#[test]
fn a_library_is_loaded_from_the_named_file() {
    const TEST: &str = "probing::a_library_is_loaded_from_the_named_file";
    let library = library_of_this_process(TEST);
    in_child_with(TEST, &[("LD_LIBRARY_PATH", ""), (LIBRARY_VARIABLE, &library)], || {
        let error = probe_file(Path::new("/nowhere/libnixl_capi.so")).unwrap_err();
        assert!(matches!(error, NixlUnavailable::FileMissing { .. }), "{error:?}");
        assert!(chain(&error).contains("/nowhere/libnixl_capi.so"), "{}", chain(&error));
        let found = probe_file(Path::new(&library_named_by_parent())).unwrap();
        assert_eq!(probe().unwrap(), found);
        AgentBuilder::unnamed().backend(posix()).build().unwrap();
    });
}

#[test]
fn a_library_that_the_bindings_do_not_find_by_its_name_is_refused() {
    const TEST: &str = "probing::a_library_that_the_bindings_do_not_find_by_its_name_is_refused";
    let library = library_of_this_process(TEST);
    in_child_with(TEST, &[("LD_LIBRARY_PATH", ""), (LIBRARY_VARIABLE, &library)], || {
        if is_in_the_default_path(TEST) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let other = directory.path().join("libother.so");
        compile(&other, REQUIRED_SYMBOLS);
        let error = probe_file(&other).unwrap_err();
        match &error {
            NixlUnavailable::NotByName { library, found: None } => assert_eq!(*library, other),
            _ => panic!("{error:?}"),
        }
        // The bindings have not looked it up yet.
        probe_file(Path::new(&library_named_by_parent())).unwrap();
        AgentBuilder::unnamed().backend(posix()).build().unwrap();
    });
}

#[test]
fn bindings_that_looked_too_early_differ_from_a_missing_library() {
    const TEST: &str = "probing::bindings_that_looked_too_early_differ_from_a_missing_library";
    let library = library_of_this_process(TEST);
    in_child_with(TEST, &[("LD_LIBRARY_PATH", ""), (LIBRARY_VARIABLE, &library)], || {
        if !nixl_sys::is_stub() {
            eprintln!("skipped: {TEST}: {IN_DEFAULT_PATH}");
            return;
        }
        load(&library_named_by_parent());
        assert!(nixl_sys::is_stub(), "the bindings look once");
        let error = probe().unwrap_err();
        assert!(matches!(error, NixlUnavailable::BindingsGaveUp { .. }), "{error:?}");
    });
}

#[test]
fn the_error_of_a_missing_function_names_library_and_function() {
    const TEST: &str = "probing::the_error_of_a_missing_function_names_library_and_function";
    let directory = tempfile::tempdir().unwrap();
    // All except the last, so that the names before it are found.
    let (missing, present) = REQUIRED_SYMBOLS.split_last().unwrap();
    compile(&directory.path().join(LIBRARY), present);
    let path = directory.path().display().to_string();
    in_child_with(TEST, &[("LD_LIBRARY_PATH", &path)], || {
        let error = probe().unwrap_err();
        let NixlUnavailable::SymbolMissing { library, symbol } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(symbol, missing);
        assert!(library.is_file() && library.ends_with(LIBRARY), "{library:?}");
    });
}

#[test]
fn stubs_differ_from_the_library() {
    const TEST: &str = "probing::stubs_differ_from_the_library";
    let directory = tempfile::tempdir().unwrap();
    let stub = ["nixl_capi_is_stub"];
    compile(&directory.path().join(LIBRARY), REQUIRED_SYMBOLS.iter().chain(&stub));
    let path = directory.path().display().to_string();
    in_child_with(TEST, &[("LD_LIBRARY_PATH", &path)], || {
        let error = probe().unwrap_err();
        assert!(matches!(error, NixlUnavailable::Stub { .. }), "{error:?}");
    });
}

#[test]
fn plugins_that_cannot_be_loaded_report_the_reason() {
    const TEST: &str = "probing::plugins_that_cannot_be_loaded_report_the_reason";
    let directory = tempfile::tempdir().unwrap();
    let plugins = directory.path();
    fs::write(plugins.join("libplugin_GARBAGE.so"), b"no library").unwrap();
    compile(&plugins.join("libplugin_OTHER.so"), &["not_what_nixl_calls"]);
    let variable = plugins.display().to_string();
    in_child_with(TEST, &[("NIXL_PLUGIN_DIR", &variable)], || {
        let found = probe().unwrap();
        let plugins = found.plugins();
        let names: Vec<_> = plugins.iter().map(|plugin| plugin.name().as_str()).collect();
        assert_eq!(names, ["GARBAGE", "OTHER"]);
        let garbage = plugins[0].check().unwrap_err();
        assert!(matches!(garbage, PluginError::NotLoaded { .. }), "{garbage:?}");
        let text = chain(&garbage);
        assert!(text.contains("libplugin_GARBAGE.so") && text.contains("file too short"), "{text}");
        let other = plugins[1].check().unwrap_err();
        assert!(matches!(other, PluginError::NoPlugin { .. }), "{other:?}");

        // The same reasons when they are queried; a name without a file has another reason.
        let build = |name| {
            let backend = terrane_nixl::BackendConfig::new(name);
            AgentBuilder::unnamed().backend(backend).build()
        };
        for name in ["GARBAGE", "OTHER"] {
            let error = build(name).unwrap_err();
            assert!(matches!(error, NixlError::Plugin { .. }), "{error:?}");
        }
        let error = build("UCX").unwrap_err();
        let NixlError::UnknownPlugin { available, .. } = &error else { panic!("{error:?}") };
        let available: Vec<_> = available.iter().map(|name| name.as_str()).collect();
        assert_eq!(available, ["GARBAGE", "OTHER"]);
    });
}

/// Whether the library belongs to the machine, and not to `cargo xtask nixl`.
#[expect(clippy::disallowed_methods, reason = "the choice of `cargo xtask`")]
fn is_of_the_machine() -> bool {
    std::env::var_os("TERRANE_NIXL").is_some_and(|choice| choice == "system")
}

const IN_DEFAULT_PATH: &str =
    "NIXL is installed in the loader's default path, so it is not missing";

/// Whether the loader finds the library in its default path. If so, prints the skip.
fn is_in_the_default_path(test: &str) -> bool {
    let found = probe().is_ok();
    if found {
        eprintln!("skipped: {test}: {IN_DEFAULT_PATH}");
    }
    found
}

/// Passes the library's path to a child process that cannot find it.
const LIBRARY_VARIABLE: &str = "TERRANE_TEST_NIXL_LIBRARY";

fn library_of_this_process(test: &str) -> String {
    if terrane_testkit::process::is_child(test) {
        return String::new();
    }
    probe().unwrap().library().display().to_string()
}

#[expect(clippy::disallowed_methods, reason = "the parent passes it to its child")]
fn library_named_by_parent() -> String {
    std::env::var(LIBRARY_VARIABLE).unwrap()
}

fn load(library: &str) {
    // SAFETY: NIXL's library, whose initialisers may run in any process.
    let library = unsafe { libloading::Library::new(library) }.unwrap();
    // It must stay loaded.
    let _ = std::mem::ManuallyDrop::new(library);
}

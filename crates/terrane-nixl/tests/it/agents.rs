//! Agents: their names, threads and options.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{AgentName, ByteCount, Capability, CapabilityStatus, Register};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig, NixlError, Registrar, Status};
use terrane_testkit::events::AtEvents;
use terrane_testkit::process::{allow_seconds, in_child, in_child_with};

use crate::support::{agent, memory, posix};

#[test]
fn agents_are_shared_and_sent() {
    fn is_shared<T: Send + Sync + 'static>() {}
    is_shared::<Agent>();
    is_shared::<Registrar>();
    is_shared::<NixlError>();
}

#[test]
fn a_name_belongs_to_one_agent_until_its_last_owner_drops() {
    let name = AgentName::from("the-one");
    let first = AgentBuilder::new(name.clone()).backend(posix()).build().unwrap();
    assert_eq!(first.name(), &name);
    let taken = || AgentBuilder::new(name.clone()).build().unwrap_err();
    assert!(matches!(taken(), NixlError::NameTaken { .. }), "{}", taken());
    let clone = first.clone();
    let registered = first.register(memory(ByteCount::kib(4))).unwrap();
    drop(first);
    assert!(matches!(taken(), NixlError::NameTaken { .. }), "a clone remains");
    drop(clone);
    assert!(matches!(taken(), NixlError::NameTaken { .. }), "a registration remains");
    drop(registered);
    AgentBuilder::new(name).build().unwrap();
}

#[test]
fn a_build_that_fails_leaves_the_name_free() {
    let build = |backend: BackendConfig| AgentBuilder::new("again").backend(backend).build();
    let error = build(posix().parameter("use_uring", "banana")).unwrap_err();
    assert!(matches!(error, NixlError::Backend { .. }), "{error}");
    build(posix()).unwrap();
}

/// NIXL reads some variables itself, and creates no agent if one is invalid.
#[test]
fn an_agent_that_nixl_refuses_is_an_error_and_leaves_the_name_free() {
    const TEST: &str = "agents::an_agent_that_nixl_refuses_is_an_error_and_leaves_the_name_free";
    in_child_with(TEST, &[("NIXL_TELEMETRY_ENABLE", "banana")], || {
        for _ in 0..2 {
            let error = AgentBuilder::new("refused").backend(posix()).build().unwrap_err();
            let NixlError::Agent { name, status } = &error else { panic!("{error:?}") };
            assert_eq!((name.as_str(), *status), ("refused", Status::Backend));
        }
    });
}

#[test]
fn invalid_names_are_refused() {
    let error = AgentBuilder::new("").build().unwrap_err();
    assert!(matches!(error, NixlError::EmptyName), "{error}");
    let error = AgentBuilder::new("a\0b").build().unwrap_err();
    assert!(matches!(error, NixlError::Nul { .. }), "{error}");
    assert!(error.to_string().contains(r"a\0b"), "{error}");
    for name in ["a\nb", "\u{7f}", "tab\t"] {
        let error = AgentBuilder::new(name).build().unwrap_err();
        assert!(matches!(error, NixlError::ControlCharacter { .. }), "{error}");
    }
    // Peers accept any printable name.
    let owner = AgentBuilder::new("décode 3|Agent").backend(posix()).build().unwrap();
    let report = owner.capabilities();
    assert_eq!(report.status(&Capability::CheckedMetadata), Some(&CapabilityStatus::Granted));
}

#[test]
fn unnamed_agents_have_unique_names() {
    let names: Vec<_> = (0..16).map(|_| AgentBuilder::unnamed().name().clone()).collect();
    for (index, name) in names.iter().enumerate() {
        assert!(!names[..index].contains(name), "{name} twice");
    }
    let renamed = AgentBuilder::unnamed().named("another").build().unwrap();
    assert_eq!(renamed.name().as_str(), "another");
}

#[test]
fn the_progress_thread_exists_on_request() {
    in_child("agents::the_progress_thread_exists_on_request", || {
        let build = |rest| {
            let builder = AgentBuilder::unnamed().progress_thread(rest);
            builder.backend(BackendConfig::new("UCX")).build().unwrap()
        };
        // UCX starts some threads once for the process. They stay.
        let _first = build(None);
        let before = threads();
        let without = build(None);
        wait_for(|| threads().difference(&before).count() == 0);
        let with = build(Some(Duration::from_micros(500)));
        wait_for(|| threads().difference(&before).count() == 1);
        drop(with);
        wait_for(|| threads().difference(&before).count() == 0);
        drop(without);
    });
}

#[test]
fn an_idle_agent_uses_no_processor() {
    in_child("agents::an_idle_agent_uses_no_processor", || {
        let builder = AgentBuilder::unnamed().backend(BackendConfig::new("UCX"));
        let _idle = builder.build().unwrap();
        // After its start, the progress thread only polls every millisecond.
        let share = || {
            let (begun, before) = (Instant::now(), processor_time());
            thread::sleep(Duration::from_millis(300));
            (processor_time() - before).as_secs_f64() / begun.elapsed().as_secs_f64()
        };
        let least = (0..5).map(|_| share()).fold(f64::INFINITY, f64::min);
        assert!(least < 0.3, "{least} of a processor");
    });
}

/// The processor time of all threads of this process.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a time to the given address.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// The threads of this process, by their ids.
fn threads() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/proc/self/task").unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// A joined thread is in the list for a moment longer.
#[track_caller]
fn wait_for(condition: impl Fn() -> bool) {
    let patience = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < patience, "the condition did not become true within a minute");
        thread::yield_now();
    }
}

#[test]
fn a_delay_that_nixl_cannot_represent_is_refused() {
    let builder = AgentBuilder::unnamed().progress_thread(Some(Duration::MAX));
    let error = builder.build().unwrap_err();
    assert!(matches!(error, NixlError::DelayTooLong { .. }), "{error}");
}

#[test]
fn agents_serve_several_threads() {
    let agent = agent([BackendConfig::new("UCX"), posix()]);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let agent = agent.clone();
                for _ in 0..100 {
                    let registered = agent.register(memory(ByteCount::kib(4))).unwrap();
                    assert_eq!(registered.record().accepted().count(), 2);
                }
            });
        }
    });
}

#[test]
fn agents_are_created_and_dropped_on_several_threads() {
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..4 {
                    // With a parameter, because then the plugins are queried.
                    let ucx = BackendConfig::new("UCX").parameter("num_workers", "1");
                    let agent = agent([ucx, posix()]);
                    drop(agent.register(memory(ByteCount::kib(4))).unwrap());
                }
            });
        }
    });
}

#[test]
fn an_agent_is_built_from_the_environment() {
    let agent = AgentBuilder::from_variables([
        ("TERRANE_NIXL_BACKENDS", "POSIX"),
        ("TERRANE_NIXL_PARAMETERS_POSIX", "ios_pool_size=64;use_aio=false"),
        ("TERRANE_NIXL_REQUIRED", "POSIX"),
    ]);
    let agent = agent.unwrap().build().unwrap();
    let names: Vec<_> = agent.backends().map(|name| name.as_str()).collect();
    assert_eq!(names, ["POSIX"]);
    assert!(format!("{agent:?}").contains("POSIX"));
}

/// The bindings trace their calls, and a subscriber may use the agent.
#[test]
fn traces_under_a_lock_reach_no_subscriber() {
    const TEST: &str = "agents::traces_under_a_lock_reach_no_subscriber";
    in_child(TEST, || {
        allow_seconds(120);
        let agent = agent([posix(), BackendConfig::new("UCX")]);
        let (used, config) = (agent.clone(), posix());
        let uses = AtEvents::any(move |_| {
            drop(used.register(memory(ByteCount::kib(4))).unwrap());
            used.notifications().unwrap();
            drop(AgentBuilder::unnamed().backend(config.clone()).build().unwrap());
        });
        tracing::subscriber::with_default(uses, || {
            drop(agent.register(memory(ByteCount::kib(64))).unwrap());
            agent.notifications().unwrap();
            drop(AgentBuilder::unnamed().backend(posix()).build().unwrap());
        });
    });
}

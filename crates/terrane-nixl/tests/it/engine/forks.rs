//! Processes that are forked from one that uses NIXL.

use std::sync::Arc;

use terrane_core::{ByteCount, ForkedProcess, Register, RegisterError};
use terrane_nixl::{
    AgentBuilder, BackendConfig, ExportError, ImportError, NixlEngine, NixlEngineOptions,
    NixlError, Refusal, probe,
};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::process::{in_child, in_fork};
use terrane_transfer::{Transfer, TransferManager};

use super::support::{CONTIGUOUS, Pair, config, registered};
use crate::support::{agent, chain, memory, posix};

#[test]
fn a_forked_process_gets_errors_and_drops_its_parents_values() {
    in_child("engine::forks::a_forked_process_gets_errors_and_drops_its_parents_values", || {
        let agent = agent([BackendConfig::new("UCX"), posix()]);
        let engine = NixlEngine::new(&agent, NixlEngineOptions::default()).unwrap();
        let registered = agent.register(memory(ByteCount::kib(64))).unwrap();
        let all = std::cell::Cell::new(Some((agent.clone(), engine, registered)));
        in_fork(|| {
            let error = AgentBuilder::unnamed().backend(posix()).build().unwrap_err();
            assert!(matches!(error, NixlError::Forked(ForkedProcess)), "{error:?}");
            assert!(error.to_string().contains("exec"), "{error}");
            let error = agent.notifications().unwrap_err();
            assert!(matches!(error, NixlError::Forked(_)), "{error:?}");
            let error = NixlEngine::new(&agent, NixlEngineOptions::default()).unwrap_err();
            assert!(matches!(error, NixlError::Forked(_)), "{error:?}");
            let failed = agent.register(memory(ByteCount::kib(4))).unwrap_err();
            let RegisterError::Refused { backends, .. } = &failed.cause else {
                panic!("{failed:?}")
            };
            for outcome in backends {
                let refusal = outcome.refusal.as_ref().and_then(|cause| cause.downcast_ref());
                assert!(matches!(refusal, Some(Refusal::Forked(_))), "{outcome:?}");
            }
            let (agent, engine, registered) = all.take().unwrap();
            drop(agent);
            drop(engine);
            drop(registered);
        });
        // The parent's values still work.
        let (agent, engine, registered) = all.take().unwrap();
        drop((engine, registered));
        drop(agent.register(memory(ByteCount::kib(4))).unwrap());
    });
}

#[test]
fn transfers_of_the_parent_drop_in_a_forked_process() {
    in_child("engine::forks::transfers_of_the_parent_drop_in_a_forked_process", || {
        let pair = Pair::new();
        let engine = pair.engine(NixlEngineOptions::default());
        let manager = TransferManager::new([Arc::clone(&engine)]);
        let (local, there) =
            (pair.local(config(8), CONTIGUOUS), pair.remote(config(8), CONTIGUOUS));
        let write = || Transfer::new(&local, &there).blocks(&[0, 1], &[2, 3]);
        let offered = registered(&HeapAllocator::system(), &pair.there, config(1), CONTIGUOUS);
        let exported = pair.there.export(&offered).unwrap();
        let imported = std::cell::Cell::new(Some(pair.here.import(&exported).unwrap()));
        let in_flight = std::cell::Cell::new(Some(manager.submit(write(), ()).unwrap()));
        let ends = std::cell::Cell::new(Some((local.clone(), engine)));
        in_fork(|| {
            // A manager of this process has an engine of the parent.
            let (local, engine) = ends.take().unwrap();
            let own = TransferManager::new([engine]);
            let declined = own.submit(write(), ()).map(drop).unwrap_err();
            assert!(chain(&declined).contains("forked"), "{}", chain(&declined));
            let forked = pair.there.export(&offered).unwrap_err();
            assert!(matches!(forked, ExportError::Forked(_)), "{forked:?}");
            let forked = pair.here.import(&exported).unwrap_err();
            assert!(matches!(forked, ImportError::Forked(_)), "{forked:?}");
            assert!(pair.here.peers().is_empty() && pair.here.disconnect() == 0);
            drop((in_flight.take(), own, local, imported.take()));
        });
        in_flight.take().unwrap().wait().result.unwrap();
        manager.submit(write(), ()).unwrap().wait().result.unwrap();
    });
}

#[test]
fn children_of_a_parent_that_only_probed_use_nixl() {
    in_child("engine::forks::children_of_a_parent_that_only_probed_use_nixl", || {
        probe().unwrap();
        in_fork(|| {
            let agent = agent([posix()]);
            drop(agent.register(memory(ByteCount::kib(4))).unwrap());
        });
        drop(agent([posix()]));
    });
}

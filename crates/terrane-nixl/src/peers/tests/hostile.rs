//! Exports of real agents in valid frames, with damaged NIXL metadata.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use terrane_testkit::damage::Damage;
use terrane_wire::{LayoutDescriptor, WireLimits};

use super::super::metadata::Metadata;
use super::super::metadata::coverage::uncovered;
use super::super::metadata::parts::MetadataParts;
use super::{agent, layout};
use crate::agent::Agent;

/// An agent's export with other metadata.
fn with_metadata(sent: &LayoutDescriptor, metadata: Vec<u8>) -> Option<Arc<LayoutDescriptor>> {
    let (geometry, regions) = (sent.geometry().clone(), sent.regions().to_vec());
    let name = sent.agent().clone();
    let described =
        LayoutDescriptor::new(geometry, sent.storage(), name, metadata, regions).unwrap();
    let bytes = described.encode().unwrap();
    LayoutDescriptor::decode(&bytes, &WireLimits::default()).ok().map(Arc::new)
}

/// Whether the import passes the checks. If so, all properties that an import relies on must hold.
fn check(reader: &Agent, described: &Arc<LayoutDescriptor>) -> bool {
    match reader.check(described) {
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
        Ok(checked) => {
            let parts = MetadataParts::split(described.metadata()).unwrap();
            let [connection, keys] =
                [parts.connection, parts.keys].map(|part| Metadata::parse(part).unwrap());
            assert_eq!([connection.agent, keys.agent], [described.agent().as_str(); 2]);
            assert!(!checked.usable.is_empty());
            for backend in &checked.usable {
                assert!(connection.connections.iter().any(|c| c.backend == backend.as_str()));
                assert_eq!(uncovered(described.regions(), backend, &keys.memory), None);
            }
            true
        }
    }
}

#[test]
fn damaged_exports_are_refused_or_reach_all_regions() {
    let (owner, reader) = (agent(), agent());
    let source = layout(&owner);
    let sent = owner.describe(&source).unwrap();
    assert!(check(&reader, &with_metadata(&sent, sent.metadata().to_vec()).unwrap()));

    let parts = MetadataParts::split(sent.metadata()).unwrap();
    let damage = (Damage::up_to(4), any::<Option<bool>>());
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let run = runner.run(&damage, |(damage, part)| {
        let [mut connection, mut keys] = [parts.connection, parts.keys].map(<[u8]>::to_vec);
        let metadata = match part {
            Some(of_keys) => {
                let part = if of_keys { &mut keys } else { &mut connection };
                damage.iter().for_each(|damage| damage.apply(part));
                MetadataParts { connection: &connection, keys: &keys }.join().unwrap()
            }
            None => {
                let mut whole = sent.metadata().to_vec();
                damage.iter().for_each(|damage| damage.apply(&mut whole));
                whole
            }
        };
        if let Some(described) = with_metadata(&sent, metadata) {
            check(&reader, &described);
        }
        Ok(())
    });
    run.unwrap();
    // The agent still works.
    reader.import(&owner.export(&source).unwrap()).unwrap();
}

//! Names of agents, each unique in a process.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;

use terrane_core::AgentName;
use terrane_core::sync::lock;

use crate::error::NixlError;

/// The reserved names.
static RESERVED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A name that is reserved in this process until this value drops.
#[derive(Debug)]
pub(crate) struct ClaimedName(AgentName);

impl ClaimedName {
    pub(crate) fn claim(name: AgentName) -> Result<Self, NixlError> {
        if name.as_str().is_empty() {
            return Err(NixlError::EmptyName);
        }
        if name.as_str().contains('\0') {
            let text = name.as_str().to_owned();
            return Err(NixlError::Nul { what: "name of an agent", text });
        }
        if name.as_str().chars().any(char::is_control) {
            // Peers refuse it too, because their errors print received names.
            return Err(NixlError::ControlCharacter { name });
        }
        let mut reserved = lock(&RESERVED);
        if reserved.insert(name.as_str().to_owned()) {
            Ok(Self(name))
        } else {
            Err(NixlError::NameTaken { name })
        }
    }

    pub(crate) fn get(&self) -> &AgentName {
        &self.0
    }
}

impl Drop for ClaimedName {
    fn drop(&mut self) {
        lock(&RESERVED).remove(self.0.as_str());
    }
}

/// A name that is unique across processes: it has 64 random bits.
pub(crate) fn unique() -> AgentName {
    let process = std::process::id();
    let random = RandomState::new().hash_one(process);
    AgentName::from(format!("terrane-{process}-{random:016x}"))
}

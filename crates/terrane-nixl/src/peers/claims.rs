//! The bytes of peers that layouts of this process contain, over all its agents.
//!
//! Each agent tracks only the transfers with its own layouts. Two agents with the same bytes would
//! not see each other's transfers in flight. Equal addresses are the same bytes if they belong to
//! the same agent. The connection information of each backend identifies an agent. An agent may add
//! backends, so one common backend suffices.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use terrane_core::sync::lock;
use terrane_core::{AgentName, PeerId};
use terrane_wire::LayoutDescriptor;

use super::metadata::Metadata;
use super::overlap::first_shared;
use crate::bindings::process;

/// The holders of one agent's layouts.
type Holders = Vec<Holder>;

static CLAIMED: LazyLock<Mutex<HashMap<Arc<[u8]>, Holders>>> = LazyLock::new(Mutex::default);

struct Holder {
    /// The importing agent's number of the peer.
    peer: PeerId,
    /// The importing agent.
    agent: AgentName,
    layouts: Vec<Arc<LayoutDescriptor>>,
}

/// A claim on the bytes of a layout. Another agent of this process cannot claim them until this
/// value drops or its peer has ended.
pub(super) struct Claim {
    connections: Vec<Arc<[u8]>>,
    peer: PeerId,
    layout: Arc<LayoutDescriptor>,
}

impl Claim {
    /// Claims the bytes of a layout for one agent.
    ///
    /// # Errors
    ///
    /// The first region that shares bytes with another agent's claim, and that agent.
    pub(super) fn new(
        connection: &[u8],
        peer: PeerId,
        agent: &AgentName,
        layout: &Arc<LayoutDescriptor>,
    ) -> Result<Self, (u32, AgentName)> {
        let connections: Vec<Arc<[u8]>> = each(connection).map(Arc::from).collect();
        let mut claimed = claimed();
        let holders = connections.iter().filter_map(|connection| claimed.get(connection)).flatten();
        for other in holders.filter(|holder| holder.peer != peer) {
            if let Some(region) = first_shared(other.layouts.iter().map(|layout| &**layout), layout)
            {
                return Err((region, other.agent.clone()));
            }
        }
        for connection in &connections {
            let holders = claimed.entry(Arc::clone(connection)).or_default();
            match holders.iter_mut().find(|holder| holder.peer == peer) {
                Some(own) => own.layouts.push(Arc::clone(layout)),
                None => {
                    let (agent, layouts) = (agent.clone(), vec![Arc::clone(layout)]);
                    holders.push(Holder { peer, agent, layouts });
                }
            }
        }
        Ok(Self { connections, peer, layout: Arc::clone(layout) })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if process::is_forked() {
            return;
        }
        let mut claimed = claimed();
        for connection in &self.connections {
            let Some(holders) = claimed.get_mut(connection) else { continue };
            if let Some(own) = holders.iter_mut().find(|holder| holder.peer == self.peer)
                && let Some(index) = own.layouts.iter().position(|l| Arc::ptr_eq(l, &self.layout))
            {
                own.layouts.swap_remove(index);
            }
            holders.retain(|holder| !holder.layouts.is_empty());
            if holders.is_empty() {
                claimed.remove(connection);
            }
        }
    }
}

/// Releases all bytes of a peer that has ended: no transfer with it is in flight or can begin.
pub(super) fn release(connection: &[u8], peer: PeerId) {
    let mut claimed = claimed();
    for connection in each(connection) {
        let Some(holders) = claimed.get_mut(connection) else { continue };
        holders.retain(|holder| holder.peer != peer);
        if holders.is_empty() {
            claimed.remove(connection);
        }
    }
}

/// Whether two pieces of metadata connect to the same agent.
pub(super) fn is_same_process(a: &[u8], b: &[u8]) -> bool {
    each(a).any(|data| each(b).any(|other| data == other))
}

/// The connection information of each backend. If it cannot be parsed, all of it is one item.
fn each(connection: &[u8]) -> impl Iterator<Item = &[u8]> {
    let each: Vec<&[u8]> = match Metadata::parse(connection) {
        Ok(metadata) => metadata.connections.into_iter().map(|c| c.data).collect(),
        Err(_) => vec![connection],
    };
    each.into_iter()
}

fn claimed() -> MutexGuard<'static, HashMap<Arc<[u8]>, Holders>> {
    lock(&CLAIMED)
}

//! The same transfers through the bindings alone, as a program would write them that uses nothing
//! else.

use anyhow::{Result, bail};
use nixl_sys::{
    Agent, AgentConfig, Backend, MemType, MemoryRegion, NixlDescriptor, OptArgs,
    RegistrationHandle, ThreadSync, XferDescList, XferDlistHandle, XferOp, XferRequest, XferStatus,
};

use crate::ours::Way;

/// The backend through which all is moved.
pub const BACKEND: &str = "UCX";

/// One piece: where it begins on either side, and how long it is.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    pub local: usize,
    pub remote: usize,
    pub bytes: usize,
}

/// Two agents of this process, each with memory that is registered; one of them knows the other.
pub struct Pair {
    local: Side,
    remote: Side,
}

struct Side {
    // The registration goes first, and the agent after all that is its own.
    _registration: RegistrationHandle,
    options: OptArgs,
    _backend: Backend,
    agent: Agent,
    name: String,
    span: Span,
}

/// A span of host memory, as the bindings are told of it.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    address: usize,
    bytes: usize,
}

impl Span {
    /// The span of these bytes, which stay where they are for as long as it is registered.
    pub fn new(address: u64, bytes: u64) -> Result<Self> {
        Ok(Self { address: usize::try_from(address)?, bytes: usize::try_from(bytes)? })
    }
}

impl MemoryRegion for Span {
    // SAFETY: as the trait asks, it is where the memory begins; nothing here follows it.
    unsafe fn as_ptr(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(self.address)
    }

    fn size(&self) -> usize {
        self.bytes
    }
}

impl NixlDescriptor for Span {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

impl Way {
    const fn operation(self) -> XferOp {
        match self {
            Self::Write => XferOp::Write,
            Self::Read => XferOp::Read,
        }
    }
}

impl Pair {
    /// Two agents with this memory each.
    pub fn new(local: Span, remote: Span) -> Result<Self> {
        let (local, remote) = (Side::new("raw-local", local)?, Side::new("raw-remote", remote)?);
        let metadata = remote.agent.get_local_md()?;
        let loaded = local.agent.load_remote_md(&metadata)?;
        if loaded != remote.name {
            bail!("metadata of `{}` was taken for that of `{loaded}`", remote.name);
        }
        Ok(Self { local, remote })
    }

    /// Describes the pieces, asks for their transfer and waits for its end.
    pub fn transfer(&self, way: Way, pieces: &[Piece]) -> Result<()> {
        let Self { local, remote } = self;
        let mut here = XferDescList::new(MemType::Dram)?;
        let mut there = XferDescList::new(MemType::Dram)?;
        for piece in pieces {
            here.add_desc(local.span.address + piece.local, piece.bytes, 0);
            there.add_desc(remote.span.address + piece.remote, piece.bytes, 0);
        }
        let options = Some(&local.options);
        let request =
            local.agent.create_xfer_req(way.operation(), &here, &there, &remote.name, options)?;
        self.finish(&request)
    }

    /// Both sides cut into pieces of `bytes`, once for many transfers.
    pub fn prepare(&self, bytes: usize) -> Result<Prepared<'_>> {
        let Side { agent, options, .. } = &self.local;
        let list = |side: &Side, name: &str| -> Result<XferDlistHandle> {
            let mut list = XferDescList::new(MemType::Dram)?;
            for offset in (0..side.span.bytes).step_by(bytes) {
                list.add_desc(side.span.address + offset, bytes, 0);
            }
            Ok(agent.prepare_xfer_dlist(name, &list, Some(options))?)
        };
        Ok(Prepared {
            // An empty name means the agent's own memory.
            local: list(&self.local, "")?,
            remote: list(&self.remote, &self.remote.name)?,
            pair: self,
        })
    }

    fn finish(&self, request: &XferRequest) -> Result<()> {
        let Side { agent, options, .. } = &self.local;
        if !agent.post_xfer_req(request, Some(options))? {
            return Ok(());
        }
        while let XferStatus::InProgress = agent.get_xfer_status(request)? {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// Descriptors that are prepared once; a transfer names them by number.
pub struct Prepared<'a> {
    local: XferDlistHandle,
    remote: XferDlistHandle,
    pair: &'a Pair,
}

impl Prepared<'_> {
    /// Asks for the transfer of the pieces of these numbers, and waits for its end.
    pub fn transfer(&self, way: Way, local: &[i32], remote: &[i32]) -> Result<()> {
        let Side { agent, options, .. } = &self.pair.local;
        let (here, there) = (&self.local, &self.remote);
        let operation = way.operation();
        let request = agent.make_xfer_req(operation, here, local, there, remote, Some(options))?;
        self.pair.finish(&request)
    }
}

impl Side {
    fn new(name: &str, span: Span) -> Result<Self> {
        let (agent, backend, options) = agent(name)?;
        let registration = agent.register_memory(&span, Some(&options))?;
        let name = name.to_owned();
        Ok(Self { _registration: registration, options, _backend: backend, agent, name, span })
    }
}

/// An agent with the backend, set up as Terrane does by default.
pub fn agent(name: &str) -> Result<(Agent, Backend, OptArgs)> {
    let config = AgentConfig { thread_sync: ThreadSync::Strict, ..AgentConfig::default() };
    let agent = Agent::new_configured(name, &config)?;
    let (_, parameters) = agent.get_plugin_params(BACKEND)?;
    let backend = agent.create_backend(BACKEND, &parameters)?;
    let mut options = OptArgs::new()?;
    options.add_backend(&backend)?;
    Ok((agent, backend, options))
}

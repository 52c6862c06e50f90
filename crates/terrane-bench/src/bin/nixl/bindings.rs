//! The same transfers with the bindings alone, as a program without Terrane would write them.

use anyhow::{Context as _, Result, bail};
use nixl_sys::{
    Agent, AgentConfig, Backend, MemType, MemoryRegion, NixlDescriptor, OptArgs, RegDescList,
    RegistrationHandle, ThreadSync, XferDescList, XferDlistHandle, XferOp, XferRequest, XferStatus,
};
use terrane_core::{ByteCount, Location, Memory};

use crate::agents::Agents;
use crate::terrane::Way;

/// The backend of all transfers.
pub const UCX: &str = "UCX";

/// A piece: its offset on either side, and its length.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    pub local: usize,
    pub remote: usize,
    pub bytes: usize,
}

/// Two agents of this process with registered memory each. The first knows the second.
pub struct Pair {
    local: Side,
    remote: Side,
}

struct Side {
    // The registration drops first, and the agent after everything that belongs to it.
    _registration: RegistrationHandle,
    bare: Bare,
    span: Span,
}

/// An agent with one backend and no memory.
pub struct Bare {
    options: OptArgs,
    _backend: Backend,
    agent: Agent,
    name: String,
}

/// A span of memory for the bindings.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    memory: MemType,
    device: u64,
    address: usize,
    bytes: usize,
}

impl Span {
    /// Returns the span of this memory. The memory must not move while the span is registered.
    pub fn of(memory: &dyn Memory) -> Result<Self> {
        Self::at(memory.location(), memory.length())
    }

    /// Returns the registered span that contains this memory.
    pub fn registered(memory: &dyn Memory) -> Result<Self> {
        let mut found = None;
        memory.visit_registrations(&mut |record| found = Some(record.span));
        let span = found.context("the memory is not registered")?;
        Self::at(span.location, span.length)
    }

    fn at(location: Location, length: ByteCount) -> Result<Self> {
        let (kind, device, address) = match location {
            Location::Host(address) => (MemType::Dram, 0, address.get()),
            Location::Device { device, address } => {
                (MemType::Vram, device.get().into(), address.get())
            }
            _ => bail!("neither the host's memory nor a device's"),
        };
        let (address, bytes) = (usize::try_from(address)?, usize::try_from(length.get())?);
        Ok(Self { memory: kind, device, address, bytes })
    }

    /// Returns the first `bytes` bytes of the span.
    pub fn first(self, bytes: usize) -> Result<Self> {
        Ok(Self { bytes: Some(bytes).filter(|n| *n <= self.bytes).context("too short")?, ..self })
    }
}

impl MemoryRegion for Span {
    // SAFETY: the trait requires the start of the memory. This function does not dereference the
    // address.
    unsafe fn as_ptr(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(self.address)
    }

    fn size(&self) -> usize {
        self.bytes
    }
}

impl NixlDescriptor for Span {
    fn mem_type(&self) -> MemType {
        self.memory
    }

    fn device_id(&self) -> u64 {
        self.device
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
    /// Connects two agents and registers this memory with them.
    pub fn new([local, remote]: [Bare; 2], here: Span, there: Span) -> Result<Self> {
        let (local, remote) = (local.with(here)?, remote.with(there)?);
        local.bare.load(&remote.bare, &remote.bare.metadata()?)?;
        Ok(Self { local, remote })
    }

    /// Describes the pieces, starts their transfer and waits for its end.
    pub fn transfer(&self, way: Way, pieces: &[Piece]) -> Result<()> {
        let Self { local, remote } = self;
        let mut here = XferDescList::new(MemType::Dram)?;
        let mut there = XferDescList::new(MemType::Dram)?;
        for piece in pieces {
            here.add_desc(local.span.address + piece.local, piece.bytes, 0);
            there.add_desc(remote.span.address + piece.remote, piece.bytes, 0);
        }
        let Bare { agent, options, .. } = &local.bare;
        let (operation, peer) = (way.operation(), &remote.bare.name);
        let request = agent.create_xfer_req(operation, &here, &there, peer, Some(options))?;
        self.finish(&request)
    }

    /// Divides both sides into pieces of `bytes`, once for many transfers.
    pub fn prepare(&self, bytes: usize) -> Result<Prepared<'_>> {
        let Bare { agent, options, .. } = &self.local.bare;
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
            remote: list(&self.remote, &self.remote.bare.name)?,
            pair: self,
        })
    }

    fn finish(&self, request: &XferRequest) -> Result<()> {
        let Bare { agent, options, .. } = &self.local.bare;
        if !agent.post_xfer_req(request, Some(options))? {
            return Ok(());
        }
        while let XferStatus::InProgress = agent.get_xfer_status(request)? {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// Descriptors that are prepared once. A transfer selects them by number.
pub struct Prepared<'a> {
    local: XferDlistHandle,
    remote: XferDlistHandle,
    pair: &'a Pair,
}

impl Prepared<'_> {
    /// Starts the transfer of the pieces with these numbers, and waits for its end.
    pub fn transfer(&self, way: Way, local: &[i32], remote: &[i32]) -> Result<()> {
        let Bare { agent, options, .. } = &self.pair.local.bare;
        let (here, there) = (&self.local, &self.remote);
        let operation = way.operation();
        let request = agent.make_xfer_req(operation, here, local, there, remote, Some(options))?;
        self.pair.finish(&request)
    }
}

/// Creates the agents of both sides of the pair `name`.
pub fn pair(name: &str, agents: Agents) -> Result<[Bare; 2]> {
    let [local, remote] = ["local", "remote"].map(|side| format!("raw-{name}-{side}"));
    Ok([Bare::new(&local, UCX, agents)?, Bare::new(&remote, UCX, agents.answering())?])
}

impl Bare {
    /// Creates an agent with Terrane's settings: the backend's own parameters and the one parameter
    /// that Terrane sets.
    pub fn new(name: &str, backend: &str, agents: Agents) -> Result<Self> {
        let rest = agents.progress.0;
        let config = AgentConfig {
            thread_sync: ThreadSync::Strict,
            enable_prog_thread: rest.is_some(),
            pthr_delay_us: u64::try_from(rest.unwrap_or_default().as_micros())?,
            ..AgentConfig::default()
        };
        let agent = Agent::new_configured(name, &config)?;
        let (_, mut parameters) = agent.get_plugin_params(backend)?;
        if backend == UCX {
            parameters.set("engine_config", "CUDA_IPC_ENABLE_GET_ZCOPY=y")?;
        }
        let backend = agent.create_backend(backend, &parameters)?;
        let mut options = OptArgs::new()?;
        options.add_backend(&backend)?;
        Ok(Self { options, _backend: backend, agent, name: name.to_owned() })
    }

    /// Registers memory until the handle drops.
    pub fn register(&self, span: &Span) -> Result<RegistrationHandle> {
        Ok(self.agent.register_memory(span, Some(&self.options))?)
    }

    /// Returns the addresses of the agent and the keys of all its registered memory.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        Ok(self.agent.get_local_md()?)
    }

    /// Returns the keys of the memory that was registered as this span.
    pub fn keys(&self, span: &Span) -> Result<Vec<u8>> {
        let mut list = RegDescList::new(span.memory)?;
        list.add_desc(span.address, span.bytes, span.device);
        Ok(self.agent.get_local_partial_md(&list, Some(&self.options))?)
    }

    /// Loads metadata of another agent.
    pub fn load(&self, other: &Self, metadata: &[u8]) -> Result<()> {
        let loaded = self.agent.load_remote_md(metadata)?;
        if loaded != other.name {
            bail!("metadata of `{}` was loaded as that of `{loaded}`", other.name);
        }
        Ok(())
    }

    /// Makes NIXL forget another agent and disconnect from it.
    pub fn forget(&self, other: &Self) -> Result<()> {
        Ok(self.agent.invalidate_remote_md(&other.name)?)
    }

    fn with(self, span: Span) -> Result<Side> {
        Ok(Side { _registration: self.register(&span)?, bare: self, span })
    }
}

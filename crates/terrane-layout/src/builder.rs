//! The typestate builder: config, kind, memory, registration, build.

use std::slice;
use std::sync::Arc;

use terrane_core::{AgentName, Allocate, Limits, Memory, Region, Register, Registered};

use crate::adopt::{check_regions, check_registrations};
use crate::config::LayoutConfig;
use crate::error::{LayoutError, Part};
use crate::geometry::Geometry;
use crate::kind::{BlockDimension, LayoutKind};
use crate::physical::{PhysicalLayout, RegistrationState};
use crate::plan::{LayoutPlan, PaddingReport};
use crate::state::{
    Adopted, FromAllocator, NeedsKind, NeedsMemory, NeedsRegistration, Policy, Ready,
};

/// Builds a [`PhysicalLayout`] in steps whose order the compiler checks.
///
/// 1. [`new`](LayoutBuilder::new) with a config, or
///    [`from_geometry`](LayoutBuilder::from_geometry), which needs no kind.
/// 2. The kind: [`fully_contiguous`](LayoutBuilder::fully_contiguous),
///    [`layer_separate`](LayoutBuilder::layer_separate) or [`kind`](LayoutBuilder::kind).
/// 3. The memory: [`allocate`](LayoutBuilder::allocate), [`adopt`](LayoutBuilder::adopt),
///    [`adopt_memory`](LayoutBuilder::adopt_memory) or
///    [`adopt_registered`](LayoutBuilder::adopt_registered).
/// 4. The registration (not after `adopt_registered`):
///    [`unregistered`](LayoutBuilder::unregistered), [`register`](LayoutBuilder::register) or
///    [`register_if_supported`](LayoutBuilder::register_if_supported).
/// 5. `build`.
///
/// Nothing is acquired before `build`. `build` first plans and checks everything under the limits
/// of the allocator and the registrar. Only then does it allocate or register.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct LayoutBuilder<S = NeedsKind> {
    state: S,
}

impl LayoutBuilder<NeedsKind> {
    /// Starts with the dimensions.
    pub fn new(config: LayoutConfig) -> Self {
        Self { state: NeedsKind(config) }
    }

    /// One region, in which each block is contiguous.
    pub fn fully_contiguous(self) -> LayoutBuilder<NeedsMemory> {
        self.kind(LayoutKind::FullyContiguous)
    }

    /// One region for each layer.
    pub fn layer_separate(self, block_dimension: BlockDimension) -> LayoutBuilder<NeedsMemory> {
        self.kind(LayoutKind::LayerSeparate { block_dimension })
    }

    /// One of the kinds, chosen at run time.
    pub fn kind(self, kind: LayoutKind) -> LayoutBuilder<NeedsMemory> {
        LayoutBuilder { state: NeedsMemory { geometry: Geometry::new(&self.state.0, kind) } }
    }
}

impl LayoutBuilder<NeedsMemory> {
    /// Starts with a geometry, whose sections define the contents and their order.
    pub fn from_geometry(geometry: Geometry) -> Self {
        Self { state: NeedsMemory { geometry: Ok(geometry) } }
    }

    /// One base allocation of `allocator`, split into the regions at the plan's alignment.
    pub fn allocate<A: Allocate>(
        self,
        allocator: &A,
    ) -> LayoutBuilder<NeedsRegistration<FromAllocator<'_, A>>> {
        self.with_memory(FromAllocator(allocator))
    }

    /// The caller's regions, one for each region of the geometry, in their order.
    ///
    /// `build` checks the count and every size. It also checks that all regions have one storage
    /// kind and that none overlap. Each region must begin at a multiple of the block alignment and
    /// of the registrar's alignment. The 512 bytes of a planned region are not required, because
    /// the alignment of foreign memory is fixed. [`PhysicalLayout::alignment_class`] returns the
    /// actual alignment.
    pub fn adopt(
        self,
        regions: impl IntoIterator<Item = Region>,
    ) -> LayoutBuilder<NeedsRegistration<Adopted>> {
        self.with_memory(Adopted { regions: regions.into_iter().collect() })
    }

    /// Like [`adopt`](Self::adopt), for memory that is not a region yet.
    pub fn adopt_memory(
        self,
        memory: impl IntoIterator<Item = impl Memory>,
    ) -> LayoutBuilder<NeedsRegistration<Adopted>> {
        self.adopt(memory.into_iter().map(Region::new))
    }

    /// The caller's regions, which the caller has registered with `agent`. The next step is
    /// `build`.
    ///
    /// In addition to the checks of [`adopt`](Self::adopt), every region must lie within a
    /// registration of that agent.
    pub fn adopt_registered(
        self,
        agent: AgentName,
        regions: impl IntoIterator<Item = Region>,
    ) -> LayoutBuilder<Ready<'static, Adopted>> {
        self.adopt(regions).with_policy(Policy::Settled(RegistrationState::Adopted { agent }))
    }

    fn with_memory<M>(self, memory: M) -> LayoutBuilder<NeedsRegistration<M>> {
        let geometry = self.state.geometry;
        LayoutBuilder { state: NeedsRegistration { geometry, memory } }
    }
}

impl<M> LayoutBuilder<NeedsRegistration<M>> {
    /// Registers nothing.
    pub fn unregistered(self) -> LayoutBuilder<Ready<'static, M>> {
        self.with_policy(Policy::Settled(RegistrationState::Unregistered))
    }

    /// Registers the base allocation, or each adopted region. If that fails, `build` fails.
    pub fn register(self, registrar: &dyn Register) -> LayoutBuilder<Ready<'_, M>> {
        self.with_policy(Policy::Register { registrar, required: true })
    }

    /// Registers the base allocation, or all adopted regions, if the registrar accepts them.
    /// Otherwise nothing stays registered, and [`PhysicalLayout::registration_state`] has the
    /// reason.
    pub fn register_if_supported(self, registrar: &dyn Register) -> LayoutBuilder<Ready<'_, M>> {
        self.with_policy(Policy::Register { registrar, required: false })
    }

    fn with_policy(self, policy: Policy<'_>) -> LayoutBuilder<Ready<'_, M>> {
        let NeedsRegistration { geometry, memory } = self.state;
        LayoutBuilder { state: Ready { geometry, memory, policy } }
    }
}

impl<A: Allocate> LayoutBuilder<Ready<'_, FromAllocator<'_, A>>> {
    /// Plans, allocates, registers and cuts the base allocation into regions.
    ///
    /// # Errors
    ///
    /// [`LayoutError`]; nothing stays allocated or registered. Sizes that overflow or exceed the
    /// limits are refused before the allocation. After it, the allocator and the registrar may
    /// refuse, or the memory may not match the request.
    pub fn build(self) -> Result<PhysicalLayout, LayoutError> {
        let Ready { geometry, memory: FromAllocator(allocator), policy } = self.state;
        let check = LayoutPlan::check_base;
        let (plan, (), policy) = planned(geometry, allocator.limits(), policy, check)?;
        let memory = allocator
            .allocate(&plan.base_request())
            .map_err(|source| LayoutError::Allocate { source: Box::new(source) })?;
        // This finds an allocator that breaks its contract before a peer can access the memory.
        Part::Base.check(&memory, plan.base_bytes(), plan.alignment())?;
        let (storage_kind, held) = (memory.kind(), memory.length());
        let mut base = Region::new(memory);
        let registration = policy.register(slice::from_mut(&mut base), |_| Part::Base)?;
        let padding = PaddingReport::new(plan.geometry(), held);
        let regions = plan.cut(&base)?;
        Ok(PhysicalLayout::new(&plan, regions, storage_kind, registration, padding))
    }
}

impl LayoutBuilder<Ready<'_, Adopted>> {
    /// Plans, checks and registers.
    ///
    /// # Errors
    ///
    /// [`BuildFailed`] returns the regions, registered as before the call, with the cause.
    pub fn build(self) -> Result<PhysicalLayout, BuildFailed> {
        let Ready { geometry, memory: Adopted { mut regions }, policy } = self.state;
        let registered_with = match &policy {
            Policy::Settled(state) => state.agent().cloned(),
            Policy::Register { .. } => None,
        };
        let planned = planned(geometry, Limits::NONE, policy, |plan| {
            let checked = check_regions(plan, &regions)?;
            if let Some(agent) = &registered_with {
                check_registrations(plan, &regions, agent)?;
            }
            Ok(checked)
        });
        let built = planned.and_then(|(plan, checked, policy)| {
            Ok((plan, checked, policy.register(&mut regions, Part::Region)?))
        });
        match built {
            Ok((plan, (storage_kind, padding), registration)) => {
                Ok(PhysicalLayout::new(&plan, regions, storage_kind, registration, padding))
            }
            Err(cause) => Err(BuildFailed { regions, cause }),
        }
    }
}

/// A failed build over adopted regions: the caller's regions, and the cause.
#[derive(Debug)]
pub struct BuildFailed {
    /// The regions, in the caller's order.
    pub regions: Vec<Region>,
    /// Why no layout could be built over them.
    pub cause: LayoutError,
}

terrane_core::delegate_error!(BuildFailed, into LayoutError);

/// Plans under the limits of the memory and of the registrar, and calls `check` with the plan. If
/// registration is optional and only the registrar's limits prevent the layout, plans without them.
fn planned<'r, T>(
    geometry: Result<Geometry, LayoutError>,
    limits: Limits,
    policy: Policy<'r>,
    check: impl Fn(&LayoutPlan) -> Result<T, LayoutError>,
) -> Result<(LayoutPlan, T, Policy<'r>), LayoutError> {
    let geometry = geometry?;
    let plan_under = |limits, policy| {
        let plan = LayoutPlan::of(geometry.clone(), limits)?;
        let checked = check(&plan)?;
        Ok((plan, checked, policy))
    };
    let Policy::Register { registrar, required } = policy else {
        return plan_under(limits, policy);
    };
    match plan_under(limits.and(registrar.limits()), policy) {
        Err(cause) if !required => {
            plan_under(limits, Policy::Settled(refused(registrar.agent().clone(), cause)))
        }
        planned => planned,
    }
}

impl Policy<'_> {
    /// Registers the regions in place. If that fails, all of them stay as they were.
    fn register(
        self,
        regions: &mut [Region],
        part: impl Fn(u32) -> Part,
    ) -> Result<RegistrationState, LayoutError> {
        let (registrar, required) = match self {
            Self::Settled(state) => return Ok(state),
            Self::Register { registrar, required } => (registrar, required),
        };
        let agent = registrar.agent().clone();
        let mut registered = Vec::with_capacity(regions.len());
        for (number, region) in (0_u32..).zip(&*regions) {
            match Registered::new(registrar, region.clone()) {
                Ok(region) => registered.push(Region::new(region)),
                Err(failed) => {
                    // The latest first, in the reverse order of registration.
                    while registered.pop().is_some() {}
                    let source = Box::new(failed.cause);
                    let cause = LayoutError::Register { part: part(number), source };
                    return if required { Err(cause) } else { Ok(refused(agent, cause)) };
                }
            }
        }
        regions.iter_mut().zip(registered).for_each(|(region, registered)| *region = registered);
        Ok(RegistrationState::Registered { agent })
    }
}

fn refused(agent: AgentName, cause: LayoutError) -> RegistrationState {
    RegistrationState::Refused { agent, cause: Arc::new(cause) }
}

//! The rules for transfers at the same time: endpoints and the claims on their blocks, tickets, and
//! transfers that wait for others.

pub(crate) mod address_claims;
pub(crate) mod conflict;
pub(crate) mod deferred;
pub(crate) mod endpoint;
pub(crate) mod group_overlap;
pub(crate) mod notify;
pub(crate) mod orphaned_claims;
pub(crate) mod table;
pub(crate) mod ticket;
pub(crate) mod ticket_end;

//! The way from a device back to itself: which port, which GID, and what its queue pairs can have.

use super::LoopbackError;
use crate::{
    access::Access,
    device::VerbsDevice,
    sys::{
        queue_pair::Caps,
        verbs::{CallError, Port},
    },
};

/// Work requests in each queue.
const DEPTH: u32 = 128;
/// Reads and atomics under way.
const RD_ATOMIC: u8 = 16;

/// The way from the device back to itself.
pub(super) struct Route {
    pub(super) port: Port,
    pub(super) gid: Option<([u8; 16], u8)>,
    pub(super) caps: Caps,
}

impl Route {
    pub(super) fn find(verbs: &VerbsDevice) -> Result<Self, LoopbackError> {
        let context = verbs.shared_pd().context();
        let device = || context.name().to_owned();
        let failed = |e: CallError| LoopbackError::Verbs {
            call: e.call,
            device: device(),
            source: e.source,
        };
        let limits = context.limits().map_err(failed)?;
        let mut active = None;
        for number in 1..=limits.ports {
            let port = context.port(number).map_err(failed)?;
            if port.active {
                active = Some(port);
                break;
            }
        }
        let port = active.ok_or_else(|| LoopbackError::NoActivePort { device: device() })?;
        // InfiniBand without a subnet manager's LID is reached by GID as well.
        let by_gid = port.ethernet || port.lid == 0;
        let gid = if by_gid {
            let gid = best_gid(verbs, &port);
            Some(gid.ok_or_else(|| LoopbackError::NoGid { device: device(), port: port.number })?)
        } else {
            None
        };
        let mut access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        access.set(Access::REMOTE_ATOMIC, limits.atomics);
        access.set(Access::MW_BIND, limits.windows);
        let caps = Caps {
            depth: limits.max_wr.clamp(1, DEPTH),
            rd_atomic: limits.max_rd_atomic.min(RD_ATOMIC),
            access,
        };
        Ok(Self { port, gid, caps })
    }
}

/// The GID to go by: RoCE v2 before others, and of those one that stands for an IPv4 address, for such
/// a one is there only if somebody gave the interface an address.
fn best_gid(verbs: &VerbsDevice, port: &Port) -> Option<([u8; 16], u8)> {
    let context = verbs.shared_pd().context();
    let mut best: Option<((bool, bool), [u8; 16], u8)> = None;
    for index in 0..port.gids.min(256) {
        let Ok(gid) = context.gid(port.number, index) else { continue };
        if gid == [0; 16] {
            continue;
        }
        let v2 = verbs.gid_type(port.number, index).is_some_and(|t| t.ends_with("v2"));
        let rank = (v2, stands_for_ipv4(&gid));
        if best.is_none_or(|(b, ..)| rank > b) {
            best = Some((rank, gid, index as u8));
        }
    }
    best.map(|(_, gid, index)| (gid, index))
}

fn stands_for_ipv4(gid: &[u8; 16]) -> bool {
    std::net::Ipv6Addr::from(*gid).to_ipv4_mapped().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_gids_are_told_from_others() {
        let v4 = std::net::Ipv4Addr::new(10, 77, 0, 1).to_ipv6_mapped().octets();
        assert!(stands_for_ipv4(&v4));
        assert!(!stands_for_ipv4(&[0xfe; 16]));
    }
}

//! Addresses whose connections broke the rules of HTTP/2 a moment ago.
//!
//! A connection that breaks them is ended, and its client can make another. Each begins with all that a
//! connection may send at once, so a client that breaks the rules on one connection after the other would keep
//! an event loop busy. New connections from its address wait before their first byte is read.
//!
//! The wait is the same for all of them, however many there are: others may share the address, behind a
//! proxy or a translation of addresses, and must get in, too.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Pause before a new connection of a suspect address is served.
pub(super) const HOLD: Duration = Duration::from_millis(250);

/// Duration for which an address is suspect.
const SUSPECT_FOR: Duration = Duration::from_secs(10);

/// Maximum number of addresses that are remembered. Further suspects are forgotten.
const MOST: usize = 4096;

/// Suspect addresses, and until when they are.
#[derive(Debug, Default)]
pub(super) struct Suspects(Mutex<HashMap<IpAddr, Instant>>);

impl Suspects {
    /// A connection from this address broke the rules.
    pub(super) fn add(&self, address: IpAddr) {
        let now = Instant::now();
        let mut suspects = self.0.lock();
        if suspects.len() >= MOST {
            suspects.retain(|_, until| now < *until);
        }
        let client = client(address);
        if suspects.len() < MOST || suspects.contains_key(&client) {
            suspects.insert(client, now + SUSPECT_FOR);
        }
    }

    /// Whether new connections from this address wait.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        let suspects = self.0.lock();
        let until = suspects.get(&client(address));
        until.is_some_and(|until| Instant::now() < *until)
    }
}

/// The network whose addresses one client can choose from: a host gets 64 bits in IPv6.
fn client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        IpAddr::V4(address) => address.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_suspect_for_a_while_and_others_are_not() {
        let suspects = Suspects::default();
        suspects.add(address("10.0.0.1"));
        suspects.add(address("2001:db8::1"));
        for same in ["10.0.0.1", "::ffff:10.0.0.1", "2001:db8::2:3:4:5"] {
            assert!(suspects.has(address(same)), "{same}");
        }
        for other in ["10.0.0.2", "2001:db8:0:1::1"] {
            assert!(!suspects.has(address(other)), "{other}");
        }
        tokio::time::advance(SUSPECT_FOR).await;
        assert!(!suspects.has(address("10.0.0.1")));
    }

    #[tokio::test(start_paused = true)]
    async fn so_many_are_remembered_and_old_ones_give_way() {
        let suspects = Suspects::default();
        let numbered = |number: usize| {
            let number = u32::try_from(number).unwrap();
            IpAddr::from(number.to_be_bytes())
        };
        for number in 0..MOST + 10 {
            suspects.add(numbered(number));
        }
        assert_eq!(suspects.0.lock().len(), MOST);
        assert!(suspects.has(numbered(MOST - 1)) && !suspects.has(numbered(MOST)));
        tokio::time::advance(SUSPECT_FOR).await;
        suspects.add(numbered(MOST));
        assert_eq!(suspects.0.lock().len(), 1);
    }
}

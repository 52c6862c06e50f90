//! Ports to listen on.

use std::fmt::Debug;
use std::net::TcpListener;

/// Calls `listen` with a TCP port that was free a moment ago, and returns its result and the port.
/// Another process may take the port in between. If `is_taken` recognises that error, another port
/// is tried.
///
/// # Panics
///
/// At any other error.
#[track_caller]
pub fn listening<T, E: Debug>(
    mut listen: impl FnMut(u16) -> Result<T, E>,
    is_taken: impl Fn(&E) -> bool,
) -> (T, u16) {
    loop {
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr());
        let port = free.expect("a free port").port();
        match listen(port) {
            Ok(listening) => return (listening, port),
            Err(error) if is_taken(&error) => {}
            Err(error) => panic!("listening on port {port} failed: {error:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn another_port_is_tried_if_one_is_taken() {
        let (mut tried, mut taken) = (Vec::new(), Vec::new());
        let is_taken = |error: &std::io::Error| error.kind() == ErrorKind::AddrInUse;
        let bind = |port| {
            tried.push(port);
            // Twice, another process is faster and keeps the port.
            if taken.len() < 2 {
                taken.push(TcpListener::bind(("127.0.0.1", port))?);
            }
            TcpListener::bind(("127.0.0.1", port))
        };
        let (listener, port) = listening(bind, is_taken);
        assert_eq!(listener.local_addr().unwrap().port(), port);
        assert_eq!((tried.len(), tried.last()), (3, Some(&port)));
    }

    #[test]
    #[should_panic(expected = "listening on port")]
    fn any_other_error_is_a_failure() {
        listening(|_| Err::<(), _>("refused"), |error| *error == "taken");
    }
}

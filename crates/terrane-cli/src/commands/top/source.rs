//! The source of the metrics: a file, or an HTTP endpoint.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use crate::commands::files;
use crate::error::Failure;

/// A file, or an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    File(PathBuf),
    /// The host with its port, and the path.
    Http {
        authority: String,
        path: String,
    },
}

/// The time limit of each step of a request.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The maximum length of a response.
const MOST: u64 = 16 << 20;

impl Source {
    pub(super) fn parse(text: &str) -> Result<Self, Failure> {
        if text.starts_with("https://") {
            let text =
                "https is not supported; use http on this host, or fetch the metrics to a file";
            return Err(Failure::Usage(text.to_owned()));
        }
        let Some(rest) = text.strip_prefix("http://") else { return Ok(Self::File(text.into())) };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, "metrics"));
        let has_port =
            authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { authority.to_owned() } else { format!("{authority}:80") };
        Ok(Self::Http { authority, path: format!("/{path}") })
    }

    /// Reads the whole text.
    pub(super) fn read(&self) -> Result<String, Failure> {
        match self {
            Self::File(path) => files::read_text(path),
            Self::Http { authority, path } => get(authority, path).map_err(|reason| {
                Failure::Http { url: format!("http://{authority}{path}"), reason }
            }),
        }
    }
}

/// Sends an HTTP/1.0 request. The response ends when the server closes the connection.
fn get(authority: &str, path: &str) -> Result<String, String> {
    let text = |error: std::io::Error| {
        format!("{error}; check the host, the port, and that it serves metrics")
    };
    let address =
        authority.to_socket_addrs().map_err(text)?.next().ok_or("the host has no address")?;
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT).map_err(text)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(text)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(text)?;
    let request = format!(
        "GET {path} HTTP/1.0\r\nHost: {authority}\r\nAccept: application/openmetrics-text, text/plain\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).map_err(text)?;
    let mut response = String::new();
    stream.take(MOST).read_to_string(&mut response).map_err(text)?;
    let (head, body) = response
        .split_once("\r\n\r\n")
        .ok_or("the response is not HTTP; pass an endpoint of metrics")?;
    let status = head.lines().next().unwrap_or_default();
    if status.split_whitespace().nth(1) == Some("200") {
        Ok(body.to_owned())
    } else {
        Err(format!("the status is {status:?}; pass the path of the metrics"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_a_file_or_an_endpoint() {
        let http = |authority: &str, path: &str| Source::Http {
            authority: authority.into(),
            path: path.into(),
        };
        assert_eq!(Source::parse("metrics.txt").unwrap(), Source::File("metrics.txt".into()));
        assert_eq!(Source::parse("http://here:9400/m").unwrap(), http("here:9400", "/m"));
        assert_eq!(Source::parse("http://here").unwrap(), http("here:80", "/metrics"));
        assert!(Source::parse("https://here").unwrap_err().to_string().contains("use http"));
    }
}

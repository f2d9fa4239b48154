//! Serves one page over HTTP/1.1.
//!
//! A client sends one request on a connection, of which only the first line and `Accept` count. It has a few
//! seconds and a few KiB for it. A bounded number of clients is served at a time.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use kickless_control::Exposition;
use kickless_daemon::sentence;
use tracing::warn;

/// The most bytes of a request, and the time that a client has for it. Prometheus sends some 300 bytes.
const REQUEST_BYTES_MAX: usize = 8 << 10;
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// The time in which a client must take some of the answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// The most clients at a time: two Prometheus servers, an operator, and those that do not read.
const CLIENTS_MAX: usize = 16;
/// The time after an error of the host until the next connection is accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Makes the page in a format.
pub(super) type Page = dyn Fn(Exposition) -> Result<String> + Send + Sync;

/// Serves the page until the process ends.
///
/// # Errors
/// The socket does not listen any more.
pub(super) fn serve(listener: &TcpListener, page: Arc<Page>) -> io::Result<()> {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
            // The client is gone already, or the host has no descriptor now.
            Err(_) => {
                thread::sleep(PAUSE);
                continue;
            }
        };
        let place = Place(clients.clone());
        // The client learns from the closed connection that there are too many.
        if clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            continue;
        }
        let page = page.clone();
        let answer = move || {
            let _place = place;
            // The client may be gone.
            let _ = answer(stream, &*page);
        };
        if let Err(error) = thread::Builder::new().name("metrics".into()).spawn(answer) {
            warn!(%error, "a request for metrics cannot be answered");
        }
    }
}

/// The place of a client. Dropping it makes room for another one.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The answers to requests that get no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    BadRequest,
    NotFound,
    MethodNotAllowed,
}

impl Refusal {
    fn status(self) -> &'static str {
        match self {
            Self::BadRequest => "400 Bad Request",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
        }
    }
}

/// Checks the head of a request: everything before the first empty line. Returns whether the body is wanted,
/// and in which format.
fn check(head: &[u8]) -> Result<(bool, Exposition), Refusal> {
    let mut lines = head.split(|byte| *byte == b'\n');
    let line = str::from_utf8(lines.next().unwrap_or_default()).map_err(|_| Refusal::BadRequest)?;
    let mut words = line.trim_end_matches('\r').split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Refusal::BadRequest);
    };
    if !version.starts_with("HTTP/1.") || !target.starts_with('/') {
        return Err(Refusal::BadRequest);
    }
    if !["GET", "HEAD"].contains(&method) {
        return Err(Refusal::MethodNotAllowed);
    }
    let path = target.split('?').next().unwrap_or_default();
    if path == "/metrics" { Ok((method == "GET", accepted(lines))) } else { Err(Refusal::NotFound) }
}

/// Returns the format for a client with these lines of a head. OpenMetrics is for those that name it, and
/// want it as much as plain text. All others read Prometheus text.
fn accepted<'h>(lines: impl Iterator<Item = &'h [u8]>) -> Exposition {
    let accepts = lines.filter_map(|line| {
        let (name, value) = str::from_utf8(line).ok()?.split_once(':')?;
        name.eq_ignore_ascii_case("accept").then_some(value)
    });
    let (mut open, mut plain) = (0.0_f32, 0.0_f32);
    for range in accepts.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(|part| part.trim().to_ascii_lowercase());
        let kind = parts.next().unwrap_or_default();
        let quality =
            parts.find_map(|part| Some(part.strip_prefix("q=")?.parse().unwrap_or(0.0))).unwrap_or(1.0);
        match &*kind {
            "application/openmetrics-text" => open = open.max(quality),
            "text/plain" => plain = plain.max(quality),
            _ => {}
        }
    }
    if open > 0.0 && open >= plain { Exposition::OpenMetrics } else { Exposition::Prometheus }
}

/// Reads the head of a request. Returns `None` if the client does not send a whole one.
fn read_head(stream: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let (deadline, mut head) = (Instant::now() + REQUEST_TIME, Vec::new());
    let mut bytes = [0; 1024];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() > REQUEST_BYTES_MAX {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes)? {
            0 => return Ok(None),
            len => head.extend_from_slice(&bytes[..len]),
        }
        if let Some(end) = head.windows(4).position(|end| end == b"\r\n\r\n") {
            head.truncate(end);
            return Ok(Some(head));
        }
    }
}

fn answer(mut stream: TcpStream, page: &Page) -> io::Result<()> {
    let Some(head) = read_head(&mut stream)? else { return Ok(()) };
    let plain = "text/plain; charset=utf-8";
    let (status, kind, body, has_body) = match check(&head) {
        Err(refusal) => (refusal.status(), plain, "the metrics are at /metrics\n".to_owned(), true),
        Ok((has_body, format)) => match page(format) {
            Ok(text) => ("200 OK", format.content_type(), text, has_body),
            Err(error) => {
                let error = sentence(&*error);
                warn!(error, "the daemon does not answer");
                ("503 Service Unavailable", plain, error + "\n", has_body)
            }
        },
    };
    stream.set_write_timeout(Some(ANSWER_TIME))?;
    let len = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(if has_body { body.as_bytes() } else { b"" })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use anyhow::anyhow;
    use proptest::prelude::*;

    use super::*;

    /// Serves the page on a free port. The thread ends with the test program.
    fn server(page: Arc<Page>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener, page));
        address
    }

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        // A refused client may be reset.
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn the_page_and_nothing_else_is_served() {
        let address = server(Arc::new(|_| Ok("a 1\n# EOF\n".into())));
        let answer = ask(address, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\na 1\n# EOF\n"),
            "{answer}"
        );
        assert!(
            answer.contains("Content-Type: text/plain; version=0.0.4")
                && answer.contains("Content-Length: 10\r\n")
        );
        let answer = ask(address, "HEAD /metrics?a=b HTTP/1.0\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\n"), "{answer}");
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET  /metrics HTTP/1.1\r\n\r\n", "400"),
            ("\r\n\r\n", "400"),
        ] {
            assert!(ask(address, request).starts_with(&format!("HTTP/1.1 {status}")), "{request}");
        }
    }

    #[test]
    fn a_client_gets_the_format_that_it_accepts() {
        let prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, format) in [
            ("", Exposition::Prometheus),
            ("Accept: */*", Exposition::Prometheus),
            ("accept:application/openmetrics-text", Exposition::OpenMetrics),
            (&format!("Accept: {prometheus}"), Exposition::OpenMetrics),
            ("Accept: text/plain, application/openmetrics-text; q=0", Exposition::Prometheus),
            ("Accept: text/plain;q=0.6, application/openmetrics-text;q=0.5", Exposition::Prometheus),
            ("X: application/openmetrics-text", Exposition::Prometheus),
        ] {
            let head = format!("GET /metrics HTTP/1.1\r\nHost: a\r\n{accept}\r");
            assert_eq!(check(head.as_bytes()), Ok((true, format)), "{accept}");
        }
    }

    #[test]
    fn a_daemon_that_is_away_is_reported() {
        let address = server(Arc::new(|_| Err(anyhow!("no daemon"))));
        let answer = ask(address, "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("no daemon\n"), "{answer}");
    }

    #[test]
    fn clients_that_send_too_much_or_nothing_keep_nobody_out() {
        let address = server(Arc::new(|_| Ok("# EOF\n".into())));
        // They are connected while the others are served.
        let silent: Vec<_> = (0..CLIENTS_MAX - 2).map(|_| TcpStream::connect(address).unwrap()).collect();
        assert_eq!(ask(address, &"a".repeat(4 * REQUEST_BYTES_MAX)), "");
        assert!(ask(address, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        drop(silent);
    }

    proptest! {
        #[test]
        fn no_request_panics(head in prop::collection::vec(any::<u8>(), 0..100), text in "(GET|HEAD|A)? ?/?(metrics)?[ -~]{0,20}(HTTP/1.1)?") {
            let _ = check(&head);
            let _ = check(text.as_bytes());
        }
    }
}

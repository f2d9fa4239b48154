//! A web server at the loopback of the host, which has one page.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use anyhow::Result;

/// The server. Its threads end with the program.
#[derive(Clone, Copy, Debug)]
pub struct PageServer {
    port: u16,
}

impl PageServer {
    /// Starts a server that answers each request with `page`, in the network namespace of this thread.
    ///
    /// # Errors
    /// There is no free port.
    pub fn start(page: Vec<u8>) -> Result<PageServer> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (port, page) = (listener.local_addr()?.port(), Arc::new(page));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let page = page.clone();
                // A client that leaves early ends its own thread only.
                thread::spawn(move || answer(&stream, &page));
            }
        });
        Ok(PageServer { port })
    }

    /// Returns the port of the server.
    pub fn port(self) -> u16 {
        self.port
    }
}

/// Reads a request up to its empty line, and answers it.
fn answer(mut stream: &TcpStream, page: &[u8]) -> Result<()> {
    for line in BufReader::new(stream).lines() {
        if line?.is_empty() {
            break;
        }
    }
    write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", page.len())?;
    Ok(stream.write_all(page)?)
}

//! One rank's end of a communicator.

use std::io::{BufReader, BufWriter};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::wire::{Request, read_reply, read_word, write_batch, write_words};
use super::{Failure, IN_PROGRESS, INVALID_USAGE, REMOTE_ERROR, SUCCESS, Status, TIMEOUT, failure};
use crate::faults::faults;
use crate::settings::settings;

#[derive(Debug)]
pub struct Communicator {
    pub rank: usize,
    pub ranks: usize,
    pub device: usize,
    port: u16,
    /// Set once the hub has seen all ranks.
    connection: OnceLock<TcpStream>,
    failed: AtomicI32,
    connecting: AtomicBool,
    aborted: AtomicBool,
    operations: AtomicU64,
    /// Batches take turns in the order in which they were given.
    turn: (Mutex<u64>, Condvar),
    tickets: AtomicU64,
}

impl Communicator {
    pub fn new(port: u16, rank: usize, ranks: usize, device: usize) -> Self {
        Self {
            rank,
            ranks,
            device,
            port,
            connection: OnceLock::new(),
            failed: AtomicI32::new(SUCCESS),
            connecting: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            turn: (Mutex::new(0), Condvar::new()),
            tickets: AtomicU64::new(0),
        }
    }

    /// Connects to the hub and waits until all ranks have.
    pub fn connect(&self) -> Result<(), Failure> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_nodelay(true)?;
        write_words(&mut stream, &[self.rank as u64, self.ranks as u64])?;
        stream.set_read_timeout(Some(Duration::from_secs(settings().timeout_s)))?;
        let ranks = read_word(&mut stream).or_else(|error| {
            let text =
                format!("rank {}: not all {} ranks came within {} s: {error}", self.rank, self.ranks, settings().timeout_s);
            failure(if error.kind() == std::io::ErrorKind::WouldBlock { TIMEOUT } else { REMOTE_ERROR }, text)
        })?;
        if ranks != self.ranks as u64 {
            return failure(INVALID_USAGE, format!("this rank expects {} ranks, another {ranks}", self.ranks));
        }
        stream.set_read_timeout(None)?;
        // Only this call sets it.
        let _ = self.connection.set(stream);
        Ok(())
    }

    /// As `connect`, but returns at once: until it is done, the asynchronous error is "in progress".
    pub fn connect_in_background(self: &Arc<Self>) {
        self.connecting.store(true, Ordering::SeqCst);
        let this = self.clone();
        std::thread::spawn(move || {
            if let Err(failure) = this.connect() {
                this.fail(&failure);
            }
            this.connecting.store(false, Ordering::SeqCst);
        });
    }

    /// The first error of an operation.
    pub fn async_error(&self) -> Status {
        match self.failed.load(Ordering::SeqCst) {
            SUCCESS if self.connecting.load(Ordering::SeqCst) => IN_PROGRESS,
            status => status,
        }
    }

    pub fn check(&self) -> Result<(), Failure> {
        match self.failed.load(Ordering::SeqCst) {
            SUCCESS => Ok(()),
            status => failure(status, "an earlier operation of this communicator failed"),
        }
    }

    fn fail(&self, failure: &Failure) {
        if !self.aborted.load(Ordering::SeqCst) {
            eprintln!("swgpu: rank {} of {}: {}", self.rank, self.ranks, failure.text);
        }
        // Only the first error is kept.
        let _ = self.failed.compare_exchange(SUCCESS, failure.status, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Closes the connection; operations that wait fail.
    pub fn close(&self, abort: bool) {
        self.aborted.fetch_or(abort, Ordering::SeqCst);
        if let Some(connection) = self.connection.get() {
            // It may be closed already.
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
    }

    /// A place in the order of this communicator's batches.
    pub fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::SeqCst)
    }

    /// Runs a batch when its turn has come; a failure is kept as the asynchronous error.
    pub fn run(&self, ticket: u64, batch: &[Request]) -> Option<Vec<Vec<u8>>> {
        let (turn, changed) = &self.turn;
        let mut now = turn.lock().unwrap_or_else(PoisonError::into_inner);
        while *now < ticket {
            now = changed.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
        drop(now);
        let results = self.exchange(batch).inspect_err(|failure| self.fail(failure)).ok();
        // A ticket may be used again by a graph that is launched more than once.
        let mut now = turn.lock().unwrap_or_else(PoisonError::into_inner);
        *now = (*now).max(ticket + 1);
        changed.notify_all();
        results
    }

    fn exchange(&self, batch: &[Request]) -> Result<Vec<Vec<u8>>, Failure> {
        self.check()?;
        for _ in batch {
            self.inject_fault()?;
        }
        let Some(connection) = self.connection.get() else { return failure(INVALID_USAGE, "the communicator is not complete") };
        write_batch(&mut BufWriter::new(connection), batch)?;
        read_reply(&mut BufReader::new(connection))?
    }

    fn inject_fault(&self) -> Result<(), Failure> {
        let number = self.operations.fetch_add(1, Ordering::SeqCst) + 1;
        let faults = faults();
        if let Some((_, milliseconds)) = faults.delay.filter(|delay| delay.0 == self.rank) {
            std::thread::sleep(Duration::from_millis(milliseconds));
        }
        if faults.hang == Some((self.rank, number)) {
            eprintln!("swgpu: fault: rank {} hangs in its operation {number}", self.rank);
            while !self.aborted.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(10));
            }
            return failure(REMOTE_ERROR, format!("fault: rank {} hung in its operation {number}, and was aborted", self.rank));
        }
        if faults.kill == Some((self.rank, number)) {
            eprintln!("swgpu: fault: rank {} ends at its operation {number}", self.rank);
            std::process::exit(9);
        }
        if faults.remote == Some((self.rank, number)) {
            self.close(false);
            return failure(REMOTE_ERROR, format!("fault: rank {} fails at its operation {number}", self.rank));
        }
        Ok(())
    }
}

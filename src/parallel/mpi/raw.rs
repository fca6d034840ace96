//! The few calls of MPI that are needed, with errors as sentences. The crate's own requests end where they are made, whatever
//! happens; a rank that gives up must leave its requests open. Hence the calls themselves.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use ::mpi::ffi;
use anyhow::{Result, anyhow};

use crate::error::exit_code;

/// A communicator.
pub struct Comm(ffi::MPI_Comm);

// SAFETY: a handle. MPI was started for calls from many threads, or not at all.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// What a waiting message says of itself.
pub struct Notice {
    pub from: usize,
    pub tag: i32,
    pub bytes: usize,
}

fn check(code: c_int, what: &str) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // Longer than any implementation's texts.
    let mut text = [0u8; 4096];
    let mut len = 0;
    // SAFETY: MPI writes at most MPI_MAX_ERROR_STRING bytes, 256 or 512.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = String::from_utf8_lossy(&text[..usize::try_from(len).unwrap_or(0).min(text.len())]);
    Err(anyhow!("MPI could not {what}: {text} (code {code})"))
}

/// Ranks and lengths: limited far above what there is of them.
fn int(n: usize) -> c_int {
    c_int::try_from(n).expect("messages are cut, and MPI numbers ranks with this type")
}

/// Whether MPI has been started in this process, by whomever.
pub fn is_started() -> bool {
    let mut flag = 0;
    // SAFETY: may be called at any time.
    unsafe { ffi::MPI_Initialized(&mut flag) };
    flag != 0
}

/// Starts MPI for calls from many threads; whether it can do that.
pub fn start() -> Result<bool> {
    let mut provided = 0;
    // SAFETY: called once, and no arguments are a valid choice. The statics are constants of the C library.
    let (code, wanted) = unsafe {
        (ffi::MPI_Init_thread(null_mut(), null_mut(), ffi::RSMPI_THREAD_MULTIPLE, &mut provided), ffi::RSMPI_THREAD_MULTIPLE)
    };
    check(code, "start")?;
    // Errors are to come back here, from every communicator: they are duplicates of this one.
    // SAFETY: MPI has been started.
    check(unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) }, "set its error handler")?;
    Ok(provided >= wanted)
}

/// Ends MPI. All ranks must come to this.
pub fn finish() {
    // SAFETY: the owner of MPI does this once, as the last call.
    unsafe { ffi::MPI_Finalize() };
}

impl Comm {
    pub fn world() -> Self {
        // SAFETY: a constant.
        Self(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// All ranks must do this together.
    pub fn duplicate(&self) -> Result<Self> {
        let mut new = MaybeUninit::uninit();
        // SAFETY: written by MPI if there is no error.
        unsafe {
            check(ffi::MPI_Comm_dup(self.0, new.as_mut_ptr()), "duplicate its communicator")?;
            Ok(Self(new.assume_init()))
        }
    }

    /// The own rank, and the number of ranks.
    pub fn rank_and_size(&self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: plain outputs.
        check(unsafe { ffi::MPI_Comm_rank(self.0, &mut rank) }, "tell this process's rank")?;
        // SAFETY: as above.
        check(unsafe { ffi::MPI_Comm_size(self.0, &mut size) }, "tell the number of ranks")?;
        Ok((usize::try_from(rank)?, usize::try_from(size)?))
    }

    /// Begins to send `len` bytes from `data`.
    ///
    /// # Safety
    /// They stay valid and unchanged until the request is done.
    pub unsafe fn send(&self, data: *const u8, len: usize, to: usize, tag: i32, requests: &mut Requests) -> Result<()> {
        requests.push("send a message", |request| unsafe {
            ffi::MPI_Isend(data.cast(), int(len), ffi::RSMPI_UINT8_T, int(to), tag, self.0, request)
        })
    }

    /// Begins to receive at most `len` bytes at `place`.
    ///
    /// # Safety
    /// They stay valid, and nobody else looks at them, until the request is done.
    pub unsafe fn receive(&self, place: *mut u8, len: usize, from: usize, tag: i32, requests: &mut Requests) -> Result<()> {
        requests.push("receive a message", |request| unsafe {
            ffi::MPI_Irecv(place.cast(), int(len), ffi::RSMPI_UINT8_T, int(from), tag, self.0, request)
        })
    }

    /// A message from anybody that is there to be received.
    pub fn probe(&self) -> Result<Option<Notice>> {
        let (mut flag, mut status) = (0, MaybeUninit::<ffi::MPI_Status>::uninit());
        // SAFETY: the status is written if the flag is set.
        unsafe {
            let code = ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG, self.0, &mut flag, status.as_mut_ptr());
            check(code, "look for messages")?;
            if flag == 0 {
                return Ok(None);
            }
            let status = status.assume_init();
            let from = usize::try_from(status.MPI_SOURCE)?;
            Ok(Some(Notice { from, tag: status.MPI_TAG, bytes: length(&status)? }))
        }
    }

    /// The message that `probe` found.
    pub fn take(&self, notice: &Notice) -> Result<Vec<u8>> {
        let mut place = vec![0u8; notice.bytes];
        // SAFETY: the place is as long as the message.
        let code = unsafe {
            ffi::MPI_Recv(
                place.as_mut_ptr().cast(),
                int(place.len()),
                ffi::RSMPI_UINT8_T,
                int(notice.from),
                notice.tag,
                self.0,
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        check(code, "receive a message").map(|()| place)
    }

    /// Ends all processes of the job.
    pub fn abort(&self) -> ! {
        // SAFETY: may be called at any time while MPI is up.
        unsafe { ffi::MPI_Abort(self.0, c_int::from(exit_code::FAILURE)) };
        std::process::exit(exit_code::FAILURE.into())
    }
}

fn length(status: &ffi::MPI_Status) -> Result<usize> {
    let mut count = 0;
    // SAFETY: plain output.
    check(unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut count) }, "tell a message's length")?;
    Ok(usize::try_from(count)?)
}

/// Sends and receives that have begun, by their number.
#[derive(Default)]
pub struct Requests {
    all: Vec<ffi::MPI_Request>,
    open: usize,
    indices: Vec<c_int>,
    statuses: Vec<MaybeUninit<ffi::MPI_Status>>,
}

// SAFETY: handles; MPI takes calls from any thread.
unsafe impl Send for Requests {}

impl Requests {
    fn push(&mut self, what: &str, begin: impl FnOnce(*mut ffi::MPI_Request) -> c_int) -> Result<()> {
        // SAFETY: a constant.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        check(begin(&mut request), what)?;
        self.all.push(request);
        self.open += 1;
        Ok(())
    }

    /// How many are not done.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Those done since the last call, each with the length that a received message has.
    pub fn done(&mut self) -> Result<Vec<(usize, usize)>> {
        if self.open == 0 {
            return Ok(Vec::new());
        }
        let mut n = 0;
        self.indices.resize(self.all.len(), 0);
        self.statuses.resize_with(self.all.len(), MaybeUninit::zeroed);
        // SAFETY: three lists of the same length.
        let code = unsafe {
            ffi::MPI_Testsome(
                int(self.all.len()),
                self.all.as_mut_ptr(),
                &mut n,
                self.indices.as_mut_ptr(),
                self.statuses.as_mut_ptr().cast(),
            )
        };
        // Negative (MPI_UNDEFINED) where nothing is open.
        let n = usize::try_from(n).unwrap_or(0).min(self.all.len());
        // SAFETY: zeroed when made, and the first `n` are written: plain numbers.
        let statuses = self.statuses[..n].iter().map(|s| unsafe { s.assume_init_ref() });
        if code != ffi::MPI_SUCCESS as c_int {
            // Which one failed, and why, stands in its own status.
            let own = statuses.map(|s| s.MPI_ERROR).find(|e| *e != ffi::MPI_SUCCESS as c_int);
            check(own.unwrap_or(code), "send or receive a message")?;
        }
        self.open -= n;
        let statuses = self.statuses[..n].iter().map(|s| unsafe { s.assume_init_ref() });
        self.indices.iter().zip(statuses).map(|(i, s)| Ok((usize::try_from(*i)?, length(s)?))).collect()
    }
}

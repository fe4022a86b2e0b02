//! Threads that stay awake for a moment between pieces of work.
//!
//! A token of a small model is some two hundred products of 50 to 300 µs. A thread pool that puts its
//! threads to sleep in between pays for waking them as long as it gains by having them. These threads
//! look for work for [`AWAKE`] before they sleep, and a caller waits for no thread that slept too long
//! to take part.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long a thread looks for work before it sleeps.
const AWAKE: Duration = Duration::from_micros(200);
/// Looks between two looks at the clock, or before a waiting caller lets others use its core.
const LOOKS: u32 = 64;
/// In [`Team::state`]: there is a job that threads may join. The bits below count those that did.
const OPEN: u32 = 1 << 31;

type Piece<'a> = dyn Fn(usize) + Sync + 'a;

struct Team {
    /// Held by the caller whose job it is.
    caller: Mutex<()>,
    state: AtomicU32,
    /// The next piece to be done, and how many there are.
    next: AtomicUsize,
    pieces: AtomicUsize,
    /// Written only while the job is closed and nobody takes part, read only by those who do.
    job: UnsafeCell<Option<*const Piece<'static>>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    members: OnceLock<Vec<Member>>,
}

struct Member {
    thread: Thread,
    asleep: AtomicBool,
}

// SAFETY: `job` is kept to the rule beside it by `state`, and what it points to is Sync.
unsafe impl Sync for Team {}

static TEAM: Team = Team {
    caller: Mutex::new(()),
    state: AtomicU32::new(0),
    next: AtomicUsize::new(0),
    pieces: AtomicUsize::new(0),
    job: UnsafeCell::new(None),
    panic: Mutex::new(None),
    members: OnceLock::new(),
};

/// Calls `piece` with 0 to `pieces` − 1, each once, in this thread and those of the team. False, and
/// nothing done, when the team works for another caller.
///
/// # Panics
/// When a piece does.
pub fn run(pieces: usize, piece: &Piece) -> bool {
    let _caller = match TEAM.caller.try_lock() {
        Ok(caller) => caller,
        // An earlier caller's piece panicked; it has left nothing behind but perhaps a member's panic.
        Err(TryLockError::Poisoned(caller)) => {
            TEAM.caller.clear_poison();
            TEAM.take_panic();
            caller.into_inner()
        }
        Err(TryLockError::WouldBlock) => return false,
    };
    let members = TEAM.members();
    TEAM.next.store(0, SeqCst);
    TEAM.pieces.store(pieces, SeqCst);
    // SAFETY: this caller alone, and no member, is at work. The pointer is used no longer than `piece`
    // lives: `Closing` waits for all who use it, in a panic too.
    unsafe { *TEAM.job.get() = Some(std::mem::transmute::<*const Piece, *const Piece<'static>>(piece)) };
    let closing = Closing;
    TEAM.state.store(OPEN, SeqCst);
    for member in members.iter().take(pieces.saturating_sub(1)) {
        if member.asleep.swap(false, SeqCst) {
            member.thread.unpark();
        }
    }
    TEAM.work(piece);
    drop(closing);
    if let Some(panic) = TEAM.take_panic() {
        resume_unwind(panic);
    }
    true
}

/// Closes the job and waits for those who take part.
struct Closing;

impl Drop for Closing {
    fn drop(&mut self) {
        TEAM.state.fetch_and(!OPEN, SeqCst);
        let mut looks = 0;
        while TEAM.state.load(SeqCst) != 0 {
            looks += 1;
            if looks % LOOKS == 0 { thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl Team {
    fn members(&'static self) -> &'static [Member] {
        self.members.get_or_init(|| {
            (1..super::parallel::threads())
                .filter_map(|index| {
                    let name = format!("team {index}");
                    // A machine that gives no more threads has a smaller team.
                    let spawned =
                        thread::Builder::new().name(name).spawn(move || self.live(index - 1)).ok()?;
                    Some(Member { thread: spawned.thread().clone(), asleep: AtomicBool::new(false) })
                })
                .collect()
        })
    }

    fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic.lock().ok().and_then(|mut panic| panic.take())
    }

    /// Does pieces until none is left.
    fn work(&self, piece: &Piece) {
        loop {
            let index = self.next.fetch_add(1, SeqCst);
            if index >= self.pieces.load(SeqCst) {
                return;
            }
            piece(index);
        }
    }

    /// The life of a member.
    fn live(&'static self, index: usize) {
        let member = &self.members.wait()[index];
        loop {
            self.wait(member);
            let state = self.state.load(SeqCst);
            // Whichever job it joins, it is one that cannot end before it has left.
            if state & OPEN == 0 || self.state.compare_exchange(state, state + 1, SeqCst, SeqCst).is_err() {
                continue;
            }
            // SAFETY: it takes part.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: as said where it is written.
                let done = catch_unwind(AssertUnwindSafe(|| self.work(unsafe { &*job })));
                if let (Err(payload), Ok(mut panic)) = (done, self.panic.lock()) {
                    *panic = Some(payload);
                }
            }
            self.state.fetch_sub(1, SeqCst);
        }
    }

    /// Until there may be something to do.
    fn wait(&self, member: &Member) {
        let is_work =
            || self.state.load(SeqCst) & OPEN != 0 && self.next.load(SeqCst) < self.pieces.load(SeqCst);
        let since = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if is_work() {
                    return;
                }
                std::hint::spin_loop();
            }
            if since.elapsed() < AWAKE {
                continue;
            }
            member.asleep.store(true, SeqCst);
            // A job that was opened before this thread was known to sleep has not woken it.
            if is_work() {
                member.asleep.store(false, SeqCst);
                return;
            }
            thread::park();
            // Parking may end for no reason.
            member.asleep.store(false, SeqCst);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_is_done_once_by_whoever_calls() {
        thread::scope(|scope| {
            for caller in 0..4 {
                scope.spawn(move || {
                    for round in 0..500 {
                        let counts: Vec<AtomicUsize> =
                            (0..1 + (caller + round) % 9).map(|_| 0.into()).collect();
                        let mine = run(counts.len(), &|index| {
                            counts[index].fetch_add(1, SeqCst);
                        });
                        assert!(counts.iter().all(|count| count.load(SeqCst) == usize::from(mine)));
                        if round % 100 == 0 {
                            thread::sleep(2 * AWAKE);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let (mut panicked, since) = (0, Instant::now());
        while panicked < 50 && since.elapsed() < Duration::from_secs(20) {
            let done = catch_unwind(|| {
                run(8, &|index| {
                    thread::sleep(Duration::from_micros(20));
                    assert!(index != 7, "the last piece");
                })
            });
            match done {
                Err(_) => panicked += 1,
                // Another test had the team.
                Ok(mine) => {
                    assert!(!mine);
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        assert!(panicked > 0);
    }
}

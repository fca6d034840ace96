//! What an engine has to offer: messages between ranks, sent and received together. Collectives are written once over this.

use std::fmt;

use anyhow::Result;

/// Streams of messages that do not wait for each other: a rank computes on one while the other reduces gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Channel {
    Main,
    Background,
}

impl Channel {
    pub const ALL: [Channel; 2] = [Channel::Main, Channel::Background];
}

/// Where in the training a rank is, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    pub step: u64,
    /// Block of the model, where there is one.
    pub layer: Option<usize>,
    /// "forward", "backward", "update", ...
    pub phase: &'static str,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.step)?;
        if let Some(layer) = self.layer {
            write!(f, ", layer {layer}")?;
        }
        if !self.phase.is_empty() {
            write!(f, ", {}", self.phase)?;
        }
        Ok(())
    }
}

/// One operation of a group of ranks. All of them must agree on all but the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op {
    pub channel: Channel,
    /// Name of the group.
    pub group: &'static str,
    /// Number of the operation within the group, from 1.
    pub sequence: u64,
    pub name: &'static str,
    pub place: Place,
}

impl Op {
    /// What two ends of a message must have in common.
    pub fn key(&self) -> (&'static str, u64, &'static str) {
        (self.group, self.sequence, self.name)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} of the {} group ({})", self.name, self.sequence, self.group, self.place)
    }
}

/// A message to a rank. Several to one rank arrive in their order.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    pub to: usize,
    pub data: &'a [u8],
}

/// A message that must come.
#[derive(Debug, Clone, Copy)]
pub struct Incoming {
    pub from: usize,
    pub bytes: usize,
}

/// One rank's end of an engine.
pub trait Transport: Send + Sync {
    fn rank(&self) -> usize;

    fn world(&self) -> usize;

    /// Sends and receives all of these; `consume` is called once with what came, in the order of `incoming`, and may look at it
    /// only then. Returns when all is done, so that the caller may change what it sent. A rank sends nothing to itself.
    ///
    /// # Errors
    /// A sentence that names the ranks that have not come in time, or that have failed, or whose operation is another one.
    fn exchange(
        &self,
        op: &Op,
        outgoing: &[Outgoing<'_>],
        incoming: &[Incoming],
        consume: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()>;

    /// Tells all ranks that this one cannot go on.
    fn fail(&self, reason: &str);

    /// This rank has nothing more to say; whoever waits for it is told.
    fn leave(&self);

    /// The failure that is known here, of this rank or another.
    fn failure(&self) -> Option<String>;

    /// This rank has queued an operation on its device: it travels beside this engine, which is told for messages alone.
    fn queued(&self, _: &Op) {}

    /// Of the members of an operation's group, those that have not queued it, and where they are. None: this engine does not know.
    fn missing_from(&self, _: &Op, _members: &[usize]) -> Option<Vec<String>> {
        None
    }
}

/// Another rank's failure, as seen by a rank that was fine itself.
#[derive(Debug)]
pub struct PeerFailed(pub String);

impl fmt::Display for PeerFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PeerFailed {}

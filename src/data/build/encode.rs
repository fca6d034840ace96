//! From blocks of records to blocks of tokens, on several threads, in order.
//!
//! Reading, encoding and writing overlap: readers fill blocks ahead, a thread deals them out to the workers as they come, and
//! whoever takes the results gets them in the order of the blocks while later ones are in work. Queues are short, so memory is
//! bounded by the number of workers.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};

use super::tally::{Left, Taken};
use super::{Corpus, Selection};
use crate::data::shard::TokenType;
use crate::error::bad_input;
use crate::text::Encoder;
use crate::text::chat::{ChatEncoder, marks};
use crate::text::corpus::{Block, Blocks, Place};
use crate::text::record::{Document, Fault, bytes_of, document_of, field_names};

/// Most bytes of a room that is used again.
const KEEP: usize = 16 << 20;

/// Gives the memory of a room back that grew large with an unusually long record.
pub(super) fn shrink<T>(room: &mut Vec<T>) {
    if room.capacity() * size_of::<T>() > KEEP {
        *room = Vec::new();
    }
}

/// 128 bits of the BLAKE3 hash of a text, or of a conversation's tokens and marks.
pub(super) type TextHash = [u8; 16];

/// What became of a record.
pub(super) enum Verdict {
    /// Its ids stand in the block's bytes, after those of the documents before.
    Document {
        taken: Taken,
        utf16: bool,
        hash: Option<TextHash>,
    },
    Left(Left),
    Bad {
        fault: Fault,
        fields: Vec<String>,
    },
    /// The run must end.
    Failed(anyhow::Error),
}

/// A block of records after encoding.
pub(super) struct Encoded {
    pub verdicts: Vec<(Place, Verdict)>,
    /// Ids of the documents, as they lie in a `.bin`.
    pub bytes: Vec<u8>,
    /// Of conversations, one for each of their ids.
    pub marks: Vec<u8>,
    pub bytes_read: u64,
    /// Held until the tokens are written: it knows of the one very long record.
    _block: Block,
}

/// How records become tokens; shared by the workers.
pub(super) struct Rules<'a> {
    pub corpus: &'a Corpus,
    pub selection: &'a Selection,
    /// None: nothing is encoded, only hashed.
    pub encoder: Option<&'a Encoder>,
    /// Records are conversations.
    pub chat: Option<&'a ChatEncoder>,
    pub token_type: TokenType,
}

/// What a worker keeps from one record to the next: room for a text and for its ids.
#[derive(Default)]
struct Room {
    text: Vec<u8>,
    ids: Vec<u32>,
}

impl Rules<'_> {
    /// `bytes`: room for the ids of all.
    fn encode(&self, mut block: Block, mut bytes: Vec<u8>, room: &mut Room) -> Encoded {
        bytes.clear();
        bytes.reserve(block.bytes_in_all());
        let mut marks = Vec::new();
        let verdicts = (0..block.records.len())
            .map(|i| (block.records[i].place, self.judge(&block, i, room, &mut bytes, &mut marks)))
            .collect();
        block.forget_text();
        Encoded { verdicts, bytes, marks, bytes_read: block.bytes_read, _block: block }
    }

    fn judge(&self, block: &Block, number: usize, room: &mut Room, bytes: &mut Vec<u8>, marks: &mut Vec<u8>) -> Verdict {
        room.ids.clear();
        let found = match (self.chat, self.encoder) {
            (Some(chat), Some(encoder)) => self.conversation(chat, encoder, block, number, &mut room.ids, marks),
            _ => self.text(block, number, room),
        };
        let (mut taken, hash) = match found {
            Ok(found) => found,
            Err(verdict) => return verdict,
        };
        let place = block.records[number].place;
        let input = &self.corpus.inputs[place.input];
        let ids = &room.ids;
        taken.tokens = ids.len() as u64;
        if ids.len() > i32::MAX as usize {
            let text = format!(
                "{}: a document of {} tokens is too long: the format holds up to {} a document",
                input.place(place.line),
                ids.len(),
                i32::MAX
            );
            return Verdict::Failed(bad_input(text));
        }
        self.token_type.append(ids, bytes);
        let raw = block.bytes(&block.records[number]);
        let utf16 = taken.replaced > 0 && [&b"\xff\xfe"[..], b"\xfe\xff"].iter().any(|mark| raw.starts_with(mark));
        Verdict::Document { taken, utf16, hash }
    }

    /// Ids of a text, with the token that ends a document; none without an encoder.
    fn text(&self, block: &Block, number: usize, room: &mut Room) -> Result<(Taken, Option<TextHash>), Verdict> {
        let place = block.records[number].place;
        let input = &self.corpus.inputs[place.input];
        let (field, keep) = (&self.corpus.field, &self.selection.keep);
        let Room { text, ids } = room;
        let (document, met) = document_of(block, number, input.layout, field, self.corpus.on_bad, keep, text)
            .map_err(|fault| bad(fault, block, number))?;
        let Document { text, replaced } = document;
        if text.is_empty() {
            return Err(Verdict::Left(Left::Empty));
        }
        if !met {
            return Err(Verdict::Left(Left::Field));
        }
        if !self.selection.fits(|| text.chars().count() as u64) {
            return Err(Verdict::Left(Left::Length));
        }
        let hash = self.selection.dedup.then(|| hash_of(&[text.as_bytes()]));
        let mut taken = Taken { text_bytes: text.len() as u64, replaced, ..Taken::default() };
        if let Some(encoder) = self.encoder {
            encoder.encode_into(&text, ids).map_err(|e| Verdict::Failed(e.context(input.place(place.line))))?;
            if ids.is_empty() {
                // Text of which the tokenizer leaves nothing, such as white space that its normaliser drops.
                return Err(Verdict::Left(Left::Empty));
            }
            taken.unknown = unknown(encoder, ids);
            ids.extend(encoder.eod().map(|(_, id)| id));
        }
        Ok((taken, hash))
    }

    /// Ids and marks of a conversation.
    fn conversation(
        &self,
        chat: &ChatEncoder,
        encoder: &Encoder,
        block: &Block,
        number: usize,
        ids: &mut Vec<u32>,
        marks: &mut Vec<u8>,
    ) -> Result<(Taken, Option<TextHash>), Verdict> {
        let place = block.records[number].place;
        let record = bytes_of(block, number).map_err(|fault| bad(fault, block, number))?;
        let example = chat
            .encode(encoder, record, self.corpus.on_bad, &self.selection.keep)
            .map_err(|e| Verdict::Failed(e.context(self.corpus.inputs[place.input].place(place.line))))?
            .map_err(|fault| bad(fault, block, number))?;
        if !example.met {
            return Err(Verdict::Left(Left::Field));
        }
        if example.ids.is_empty() {
            return Err(Verdict::Left(Left::Empty));
        }
        if !self.selection.fits(|| example.text_chars) {
            return Err(Verdict::Left(Left::Length));
        }
        // What is learnt of them counts too.
        let hash = self.selection.dedup.then(|| hash_of(&[bytemuck::cast_slice(&example.ids), &example.marks]));
        ids.extend_from_slice(&example.ids);
        marks.extend_from_slice(&example.marks);
        let taken = Taken {
            tokens: 0,
            text_bytes: example.text_bytes,
            replaced: example.replaced,
            unknown: unknown(encoder, ids),
            learnt: example.marks.iter().filter(|m| **m & marks::LEARN != 0).count() as u64,
            trimmed: example.trimmed,
        };
        Ok((taken, hash))
    }
}

fn bad(fault: Fault, block: &Block, number: usize) -> Verdict {
    let fields = if fault == Fault::NoField { field_names(block.bytes(&block.records[number])) } else { Vec::new() };
    Verdict::Bad { fault, fields }
}

/// Ids that stand for unknown text.
fn unknown(encoder: &Encoder, ids: &[u32]) -> u64 {
    encoder.unknown().map_or(0, |unknown| ids.iter().filter(|id| **id == unknown).count() as u64)
}

fn hash_of(parts: &[&[u8]]) -> TextHash {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    let mut half = [0; 16];
    half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    half
}

type Work = (Block, SyncSender<Encoded>);

/// Runs every block through `rules` on `workers` threads and hands the results to `take`, in order. An error of the reader comes
/// after all that lies before it; an error of `take` ends everything.
pub(super) fn run(
    rules: &Rules<'_>,
    blocks: Blocks,
    workers: usize,
    mut take: impl FnMut(&mut Encoded) -> Result<()>,
) -> Result<()> {
    let workers = workers.max(1);
    let (work_sender, work) = sync_channel::<Work>(1);
    let (order_sender, order) = sync_channel::<Result<Receiver<Encoded>>>(2 * workers);
    let work = Mutex::new(work);
    // Rooms for ids that were taken: to ask the system for new memory each time would take longer than to write them.
    let spare = Mutex::new(Vec::<Vec<u8>>::new());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let mut room = Room::default();
                loop {
                    let next = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((block, sender)) = next else { break };
                    let bytes = spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
                    let encoded = rules.encode(block, bytes, &mut room);
                    shrink(&mut room.text);
                    shrink(&mut room.ids);
                    // Nobody takes it where the run has ended with an error.
                    let _ = sender.send(encoded);
                }
            });
        }
        scope.spawn(move || deal(blocks, &work_sender, &order_sender));
        // Dropped at the end of the loop, whatever ends it: then the dealer stops, and the workers with it.
        for encoded in order {
            let mut encoded =
                encoded?.recv().map_err(|_| anyhow!("a thread that tokenizes has stopped")).context("tokenizing")?;
            take(&mut encoded)?;
            shrink(&mut encoded.bytes);
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(encoded.bytes);
        }
        Ok(())
    })
}

fn deal(blocks: Blocks, work: &SyncSender<Work>, order: &SyncSender<Result<Receiver<Encoded>>>) {
    for block in blocks {
        let sent = match block {
            Ok(block) => {
                let (sender, receiver) = sync_channel(1);
                order.send(Ok(receiver)).is_ok() && work.send((block, sender)).is_ok()
            }
            Err(e) => order.send(Err(e)).is_ok(),
        };
        if !sent {
            return;
        }
    }
}

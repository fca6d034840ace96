//! The words that an engine's workers have seen, and their ids: what one has learnt, all know.
//!
//! A table that is full is replaced by one of twice the size, or, when the memory allowed is used up, by an empty one. Workers go on
//! with the old one until they notice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use super::key::Key;
use super::table::{Full, Table};

/// The words of one engine.
pub struct Cache {
    table: Mutex<Arc<Table>>,
    /// Counts the tables that there have been.
    version: AtomicU64,
    most_bytes: usize,
}

impl Cache {
    /// A cache of up to about `most_bytes` (while it grows, half as much again).
    pub fn new(most_bytes: usize) -> Self {
        Self { table: Mutex::new(Arc::new(Table::smallest())), version: AtomicU64::new(0), most_bytes }
    }

    /// Forgets all words.
    pub fn clear(&self) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        self.replace(&mut table, Table::smallest());
    }

    /// `table` is the cache's own, under its lock.
    fn replace(&self, table: &mut Arc<Table>, by: Table) {
        *table = Arc::new(by);
        self.version.fetch_add(1, Ordering::Release);
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("most_bytes", &self.most_bytes).finish_non_exhaustive()
    }
}

/// One worker's hold of a cache.
pub struct Words {
    cache: Arc<Cache>,
    table: Arc<Table>,
    version: u64,
}

impl Words {
    pub fn new(cache: Arc<Cache>) -> Self {
        let (table, version) = Self::latest(&cache);
        Self { cache, table, version }
    }

    fn latest(cache: &Cache) -> (Arc<Table>, u64) {
        let table = cache.table.lock().unwrap_or_else(PoisonError::into_inner);
        (table.clone(), cache.version.load(Ordering::Relaxed))
    }

    pub fn are_of(&self, cache: &Arc<Cache>) -> bool {
        Arc::ptr_eq(&self.cache, cache)
    }

    /// Goes on to a table that has come meanwhile.
    #[inline(always)]
    pub fn refresh(&mut self) {
        if self.cache.version.load(Ordering::Relaxed) != self.version {
            (self.table, self.version) = Self::latest(&self.cache);
        }
    }

    #[inline(always)]
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Remembers a short word that [`Table::get`] does not know.
    pub fn insert(&mut self, key: Key, ids: &[u32]) {
        self.add(|table| table.insert(key, ids));
    }

    /// Remembers a word that [`Table::get_long`] does not know.
    pub fn insert_long(&mut self, word: &[u8], ids: &[u32]) {
        self.add(|table| table.insert_long(word, ids));
    }

    fn add(&mut self, insert: impl Fn(&Table) -> Result<(), Full>) {
        if let Err(Full) = insert(&self.table) {
            self.make_room();
            // Where there still is none, the word will be learnt again.
            let _ = insert(&self.table);
        }
    }

    #[cold]
    fn make_room(&mut self) {
        let Cache { table, version, most_bytes } = &*self.cache;
        let mut table = match table.try_lock() {
            Ok(table) => table,
            Err(TryLockError::Poisoned(table)) => table.into_inner(),
            // Somebody is at it.
            Err(TryLockError::WouldBlock) => return,
        };
        if Arc::ptr_eq(&table, &self.table) {
            let next = table.doubled(*most_bytes).unwrap_or_else(|| table.emptied());
            self.cache.replace(&mut table, next);
        }
        (self.table, self.version) = (table.clone(), version.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::SHORT;
    use super::super::table::hash_long;
    use super::*;

    fn word(i: u32) -> Vec<u8> {
        let mut word = format!("{i:x}").into_bytes();
        word.resize(1 + i as usize % 40, b'.');
        word.extend(i.to_le_bytes());
        word
    }

    fn answer(i: u32) -> Vec<u32> {
        (0..1 + i % 6).map(|k| i + k).collect()
    }

    fn find(words: &Words, word: &[u8]) -> Option<Vec<u32>> {
        let (mut ids, table) = (vec![7], words.table());
        let known = if word.len() <= SHORT {
            let key = Key::of(word);
            if let Some((few, count)) = table.first_slots().get_few(key, key.hash()) {
                assert!(table.get(key, key.hash(), &mut ids) && ids[1..] == few[..count]);
                ids.truncate(1);
            }
            table.get(key, key.hash(), &mut ids)
        } else {
            let hash = hash_long(word);
            table.prefetch_long(hash);
            table.prefetch_record(hash);
            table.get_long(word, hash, &mut ids)
        };
        known.then(|| ids.split_off(1))
    }

    fn add(words: &mut Words, i: u32) {
        let word = word(i);
        if word.len() <= SHORT { words.insert(Key::of(&word), &answer(i)) } else { words.insert_long(&word, &answer(i)) }
    }

    #[test]
    fn what_is_found_is_what_was_put_there_and_memory_stays_bounded() {
        let limit = 3 << 20;
        let mut words = Words::new(Arc::new(Cache::new(limit)));
        let mut forgotten = 0;
        for i in (0..200_000).chain((0..200_000).rev()) {
            match find(&words, &word(i)) {
                Some(ids) => assert_eq!(ids, answer(i)),
                None => {
                    forgotten += 1;
                    add(&mut words, i);
                    assert_eq!(find(&words, &word(i)), Some(answer(i)));
                }
            }
            assert!(words.table().size_bytes() <= limit);
        }
        // The second half meets words that had to go.
        assert!(forgotten > 200_000, "{forgotten}");
        assert!(words.table().size_bytes() > Table::smallest().size_bytes());
        words.cache.clear();
        assert!(find(&words, &word(0)).is_some());
        words.refresh();
        assert!((0..200_000).all(|i| find(&words, &word(i)).is_none()));
    }

    /// While others add, and tables come and go, a word has its own ids or none.
    #[test]
    fn threads_learn_from_one_another_and_never_see_half_a_word() {
        let cache = Arc::new(Cache::new(3 << 20));
        let found: u32 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4u32)
                .map(|t| {
                    let cache = &cache;
                    scope.spawn(move || {
                        let (mut words, mut found) = (Words::new(cache.clone()), 0);
                        for i in 0..400_000u32 {
                            // The same words at about the same time, and each thread some of its own.
                            let i = if i % 4 == t { i } else { i / 7 };
                            words.refresh();
                            match find(&words, &word(i)) {
                                Some(ids) => {
                                    assert_eq!(ids, answer(i));
                                    found += 1;
                                }
                                None => add(&mut words, i),
                            }
                        }
                        found
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert!(found > 400_000, "{found}");
    }
}

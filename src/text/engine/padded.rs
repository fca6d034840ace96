//! Text followed by bytes that may be read but mean nothing, so that a wide load near its end needs no care.

/// How far past the end of a [`Padded`] text a load may reach.
pub const PAD: usize = 64;

/// Owns a padded text. The buffer is used again and again.
#[derive(Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    len: usize,
}

impl Buffer {
    /// Replaces the text.
    pub fn set(&mut self, text: &str) {
        self.clear();
        self.push(text);
        self.finish();
    }

    /// Starts an empty text that [`Buffer::push`] extends and [`Buffer::finish`] ends.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.len = 0;
    }

    pub fn push(&mut self, text: &str) {
        self.bytes.extend_from_slice(text.as_bytes());
    }

    pub fn finish(&mut self) {
        self.len = self.bytes.len();
        self.bytes.resize(self.len + PAD, 0);
    }

    /// The text, which [`Buffer::finish`] has ended.
    pub fn text(&self) -> Padded<'_> {
        assert_eq!(self.bytes.len(), self.len + PAD);
        Padded { bytes: &self.bytes, len: self.len }
    }

    /// Gives memory back after an unusually long text.
    pub fn shrink(&mut self, keep: usize) {
        if self.bytes.capacity() > keep {
            *self = Self::default();
        }
    }
}

/// UTF-8 text of `len` bytes with [`PAD`] zero bytes behind it.
#[derive(Clone, Copy)]
pub struct Padded<'a> {
    bytes: &'a [u8],
    len: usize,
}

impl<'a> Padded<'a> {
    /// Length of the text, without the padding.
    pub fn len(self) -> usize {
        self.len
    }

    /// The text and its padding.
    #[inline(always)]
    pub fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// 64 bytes from `at`, which is at most the length of the text.
    #[inline(always)]
    pub fn block(self, at: usize) -> &'a [u8; 64] {
        assert!(at <= self.len);
        // SAFETY: `PAD` = 64 bytes follow the text, and `at` is not past its end.
        unsafe { &*self.bytes.as_ptr().add(at).cast() }
    }

    /// 16 bytes from `at`, which is at most the length of the text.
    #[inline(always)]
    pub fn sixteen(self, at: usize) -> &'a [u8; 16] {
        self.block(at).first_chunk().expect("64 bytes hold 16")
    }

    /// The part before `end` as a text of its own. What follows it is no longer zero: nobody may rely on that.
    pub fn until(self, end: usize) -> Self {
        assert!(end <= self.len);
        Self { bytes: self.bytes, len: end }
    }
}

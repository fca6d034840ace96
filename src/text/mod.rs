//! Corpus readers and tokenizers.

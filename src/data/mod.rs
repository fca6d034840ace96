//! Token shards, mixtures, sample order, loader.

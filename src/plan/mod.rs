//! Will it fit, how long will it take: sizes, FLOPs and memory before anything runs.

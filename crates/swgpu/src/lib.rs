//! A software GPU for tests.

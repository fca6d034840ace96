//! Failpoints: `ZAYA_FAIL=...` makes a named point of the program fail. Inert unless set.

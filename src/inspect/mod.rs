//! Every intermediate tensor under a name: what parity checks look at.

"""L1: the arena in shared memory, its index, and what is kept in it."""

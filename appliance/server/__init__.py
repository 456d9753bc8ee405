"""The running daemon: one loop that does all in-memory work, and the threads around it."""

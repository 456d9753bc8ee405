"""The web process: pages, REST API, health checks and metrics, in a process of its own.

It is an admin client of the daemon: it reads the daemon's ``status`` over the protocol, the catalog read-only, and
nothing else. A slow page never reaches the data path, and the pages still answer, saying so, when the daemon does not.
"""

"""What the daemon and its peers agree on: messages, bounds, the layout of the arena and of its lock files."""

PROTOCOL_VERSION = 1
"""Raised when a message's meaning changes; both sides refuse another version at hello."""

MAX_CONTROL_BYTES = 4 * 1024 * 1024
"""The largest control message, request or reply."""

DEFAULT_PORT = 6555
DEFAULT_HTTP_PORT = 6580

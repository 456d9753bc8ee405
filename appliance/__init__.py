"""The Pagewarden daemon: keeps computed prompt prefixes in host memory and lends them to engines."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pagewarden")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

"""The consistency check: arena tables, index, holds and catalog compared online, in short looks between the loop's turns."""

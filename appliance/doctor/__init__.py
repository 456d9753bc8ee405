"""The doctor: what about this machine, the daemon and its engines will go wrong, with evidence and a remedy.

It looks, and changes nothing. Before a start it judges the settings; beside a running daemon also what that says.
"""

"""Runs the ranks: in the core's process, as processes of this host, or on several hosts."""

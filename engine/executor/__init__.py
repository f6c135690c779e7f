"""Who runs the ranks: in this process, as processes of this host, on several hosts, or under Ray."""

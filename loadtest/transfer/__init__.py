"""`baton bench transfer`: KV transfer beside memcpy, raw sockets and NIXL, all with the same blocks, in one run."""

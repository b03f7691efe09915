"""Values <-> one msgpack header and raw buffers, within limits."""

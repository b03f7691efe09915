"""A value is encoded as one msgpack header and raw buffers, and decoded within limits."""

"""Pictures and videos: references, digests, decoding and the byte-bounded store."""

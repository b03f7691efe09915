"""Images: references and the policy for them, digests, decoding, and the byte-bounded store."""

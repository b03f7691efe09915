"""A trajectory is the token tree of one episode, with its provenance and its packed forms."""

"""The token tree of one episode, its provenance, and its packed forms."""

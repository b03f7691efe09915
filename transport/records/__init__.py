"""A record file is appended to, read, merged and repaired."""

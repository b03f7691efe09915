"""HTTP requests to a vLLM server: connections, deadlines, retries, bounds, typed errors."""

"""Settings, connections, retries and streams of both clients."""

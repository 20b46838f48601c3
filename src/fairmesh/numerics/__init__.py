"""Array tools that know nothing of learning: random streams, tracing, caches, memory."""

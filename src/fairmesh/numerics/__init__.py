"""Array tools that know nothing of learning: random streams, tracing, caches, memory."""

SECRET_BYTES = 32  # of the secret of a site's random draws

"""Defaults of `MediaOptions` that the processes for images and videos share."""

FETCH_SECONDS = 20.0
"""Time for a whole download (--media-fetch-timeout)."""
MAX_BYTES = 64 * 2**20
"""Bytes of a file (--max-media-bytes)."""
CACHE_GB = 4.0
"""GiB of processed items (--mm-processor-cache-gb)."""

"""`adapterctl cache …`: a running worker's cache, over its daemon's socket (docs/cache.md)."""

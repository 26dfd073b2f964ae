"""The catalog: adapters, their immutable versions, and the aliases that point to them."""

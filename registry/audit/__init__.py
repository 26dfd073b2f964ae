"""The audit log: an append-only hash chain a tenant."""

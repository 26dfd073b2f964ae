"""Publisher keys of a tenant."""

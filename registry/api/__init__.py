"""The REST surface: one file of routes per domain, and what they share."""

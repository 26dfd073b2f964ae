"""Stored files, addressed by tenant and content."""

"""Tenants and their policies."""

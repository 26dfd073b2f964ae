"""Base models and their module tables; they belong to the operator."""

"""Bearer tokens: who calls, and what the caller may do."""

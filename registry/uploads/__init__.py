"""Upload sessions: declared files, bytes on their way in, and what became of them."""

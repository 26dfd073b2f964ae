"""Host memory: from a REF to verified, packed bytes in a slab. No torch, no device; may block, never on the engine."""

"""KV memory as bookkeeping: units, pages, the block table and the prefix cache (no torch)."""

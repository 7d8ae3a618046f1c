"""Where the factors of documents are kept: memory, SQLite, and remote tiers."""

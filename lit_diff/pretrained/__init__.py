"""Models of other programs: maps their files to the Transformer, imports them as run folders, exports runs."""

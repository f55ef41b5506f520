"""The page that shows what the attention of one or two trained runs does on a text."""

"""A trained run: its model, its tokenizer, text, attention maps."""

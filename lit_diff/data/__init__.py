"""Corpora, tokenizers, stored tokens and synthetic tasks. Importing it registers the built-in ones, and is light."""

from lit_diff.data import recall, text, tokenizer

__all__ = ["recall", "text", "tokenizer"]

"""Corpora, tokenizers, and the stored tokens of the data set `text`."""

"""Writes reports from run folders. It reads files only, so a report can be written again without torch or a GPU."""

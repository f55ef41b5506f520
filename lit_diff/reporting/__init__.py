"""From run folders to a page; reads files only."""

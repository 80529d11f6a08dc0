"""Writing with an open book: sampling, drafts from the book, the loop, beams, and a source for every word."""

"""Writing with an open book: sampling, drafts from the book, the loop, and a source for every word."""

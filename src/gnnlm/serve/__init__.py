"""An HTTP server for finished runs, with the wire format of OpenAI's API and a source for every token."""

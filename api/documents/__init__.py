"""From uploaded bytes to a stored document: kind, text, pages, token counts."""

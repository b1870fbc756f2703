"""Media items: where their bytes are, what they are, and fetching them."""

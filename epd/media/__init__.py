"""Media items: their location, their properties, and fetching them."""

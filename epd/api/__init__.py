"""API endpoints: parsing of requests, bodies for instances, and the format of answers. Pure."""

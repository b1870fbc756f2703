"""The operator's page: what happened of late, of all workers, as one document and as a page."""

"""KV events of engines, which make the known content of prefix caches precise."""

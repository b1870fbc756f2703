from tests.support.fixtures import backed, both, fleet, joined, keys, launch, origin, store, url

__all__ = ["backed", "both", "fleet", "joined", "keys", "launch", "origin", "store", "url"]

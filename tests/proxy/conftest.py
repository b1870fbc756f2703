from tests.support.fixtures import backed, fleet, joined, keys, launch, store, url

__all__ = ["backed", "fleet", "joined", "keys", "launch", "store", "url"]

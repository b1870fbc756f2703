from tests.support.fixtures import backed, keys, launch, store, url

__all__ = ["backed", "keys", "launch", "store", "url"]

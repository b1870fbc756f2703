from tests.support.fixtures import backed, store, url

__all__ = ["backed", "store", "url"]

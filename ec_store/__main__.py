"""Entry point of `python -m ec_store`, the same as the `ec-store` command."""

from ec_store.cli import main

if __name__ == "__main__":
    main()

"""`python -m ec_store`."""

from ec_store.cli import main

if __name__ == "__main__":
    main()

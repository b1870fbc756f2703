"""Entry point of `python -m epd`."""

from epd.cli import main

if __name__ == "__main__":
    main()

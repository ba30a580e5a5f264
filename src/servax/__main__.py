"""`python -m servax`: the command line."""

from servax.cli import main

if __name__ == "__main__":
    main()

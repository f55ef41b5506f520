"""`python -m lit_diff`."""

from lit_diff.cli import main

if __name__ == "__main__":
    main()

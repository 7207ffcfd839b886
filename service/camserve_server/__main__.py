"""`python -m camserve_server` is the command `camserve-server`."""

from camserve_server.cli import main

if __name__ == "__main__":
    main()

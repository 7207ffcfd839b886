"""Run the command `camserve-server` as `python -m camserve_server`."""

from camserve_server.cli import main

if __name__ == "__main__":
    main()

"""The web page: its files, the services as JSON over HTTP, and a proxy."""

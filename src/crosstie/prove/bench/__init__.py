"""Load for an endpoint, and what it stood."""

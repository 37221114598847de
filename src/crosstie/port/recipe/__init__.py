"""How the engines of a pool are started."""
